"""Define score and mask functions for FlashAttention-4, in CuTe, which compiles them.

Imported where it is installed.
"""

# They are compiled: their arguments have no types in Python.
# ruff: noqa: ANN001, ANN201, ANN202, ARG001
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import cache
from typing import Any

from cutlass import Float32, Int32, cute
from flash_attn.cute.utils import scalar_to_ssa


@cache
def alibi(step: float, packed: int = 1) -> Any:
    """Return ALiBi's ``score_mod`` with slopes ``2 ** (-step * (head + 1))``.

    Slopes are computed: reading them takes one score at a time. With grouped heads the library's
    backward gives row ``i // packed`` and head ``h * packed + i % packed``.
    """

    @cute.jit
    def score_mod(scores, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        if packed > 1:
            head = head_idx // packed
            q_idx = q_idx * packed + head_idx - head * packed
            head_idx = head
        slopes = cute.math.exp2((head_idx + 1).to(Float32) * -step, fastmath=True)
        return scores + slopes * (kv_idx - q_idx).to(Float32)

    return score_mod


@cute.jit
def biased(scores, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    """Add to each score the bias of its query and key."""
    value = aux_tensors[0][q_idx[0], kv_idx[0]]
    return scores + scalar_to_ssa(value.to(Float32), Float32)


@cute.jit
def unchanged(gradients, scores, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    """Return the gradient of a score to which something was added: the same gradient."""
    return gradients


@cute.jit
def same_segment(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    """Return True where a key is visible: causal, and with an equal id."""
    ids = aux_tensors[0]
    local = scalar_to_ssa(ids[batch_idx[0], q_idx[0]], Int32)
    theirs = scalar_to_ssa(ids[batch_idx[0], kv_idx[0]], Int32)
    return (local == theirs) & (kv_idx <= q_idx)


@cache
def striped(size: int, first: int) -> Any:
    """Return the ``mask_mod`` of ``striped`` in ``cases.py``; ``size`` is a power of two.

    It is causal, within ``size`` keys or among the ``first`` of each ``size`` keys.
    """

    @cute.jit
    def mask_mod(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        near = q_idx - kv_idx < size
        among = (kv_idx & (size - 1)) < first
        return (kv_idx <= q_idx) & (near | among)

    return mask_mod
