"""The short causal convolution beside recurrent layers, over sequences that ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ring_core import divisor_of
from ring_core.base.arguments import numbers_as_python
from ring_core.checks import check_choice
from ring_torch.capture import is_traced
from ring_torch.compiled.movement import halo_in_graph, relayout_in_graph
from ring_torch.compiled.static import size_of
from ring_torch.movement import methods
from ring_torch.recurrent.arguments import (
    Explained,
    SplitsSequences,
    explains,
    sharding_of,
    sizes_of,
)
from ring_torch.recurrent.calls import state_dtype
from ring_torch.sharding import length_of

Activation = Literal["silu", "swish"]


@numbers_as_python
def causal_conv1d(
    cp: SplitsSequences, x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    activation: Activation | None = None, cu_seqlens: Sequence[int] | None = None,
    seq_len: int | None = None,
) -> Tensor:  # fmt: skip
    """Convolve each channel with the tokens before it, ``y_t = sum_w weight_w x_{t - W + 1 + w}``.

    A document sees nothing of the one before it, however short documents, runs and ranks' parts
    are. Rows that change rank are sent: the ``W - 1`` before each run, by
    ``cp.halo``; in the ``striped`` layout all rows, there and back. All ranks must
    call it, and if anything requires a gradient run its backward. Gradients of ``weight`` and
    ``bias`` are parts, whose sum over ranks is right.

    Args:
        x: Rows of this rank's tokens, ``[B, T_local, D]``.
        weight: ``[D, W]``; of a depthwise ``torch.nn.Conv1d`` it is ``weight.squeeze(1)``.
        bias: ``[D]``.
        activation: ``"silu"`` or ``"swish"``, which are one; ``None`` for none.
        cu_seqlens: ``(0, ..., T)``, offsets of documents in the whole sequence.
        seq_len: ``T``, if there is padding behind it (``cp.shard`` with
            ``pad=True``), which may hold anything and gets gradients of zero.

    Returns:
        A tensor like ``x``, zeros in padding.

    Raises:
        ValueError: An argument is malformed.
        RankMismatchError: Shapes, dtypes or arguments differ between ranks.

    Example::

        x = cp.causal_conv1d(x, conv.weight.squeeze(1), conv.bias, activation="silu")
    """
    sharding = sharding_of(cp)
    sizes = sizes_of(
        {"x": x, "weight": weight},
        {"x": ("B", "T_local", "D"), "weight": ("D", "W"), "bias": ("D",)},
        bias=bias,
    )
    if activation is not None:
        check_choice("activation", activation, ("silu", "swish"))
    size = size_of(sharding.group)
    seq_len = length_of(x, 1, seq_len, size)
    traced, layout = is_traced(x), sharding.layout
    relayout = relayout_in_graph if traced else methods.relayout
    is_striped = layout == "striped" and size > 1
    if is_striped and not explains():
        # No two neighbours are on one rank: what each token needs is all that other ranks hold.
        x = relayout(sharding, x, sharding.contiguous, dim=1, seq_len=seq_len)
        sharding = sharding.contiguous
    halo = halo_in_graph if traced else methods.halo
    width = sizes["W"]
    if explains():
        own = sharding.contiguous.layout if is_striped else layout
        runs = divisor_of(own, size) // size
        sent = runs * sizes["B"] * (width - 1) * sizes["D"] * x.element_size() if size > 1 else 0
        raise Explained(
            f"causal_conv1d over {size} ranks, {layout}: x {[*x.shape]}, weight {[*weight.shape]}\n"
            f"kernel eager: torch's operations\n"
            f"forward, and backward: a rank sends at most {runs} runs x {sizes['B']} rows x "
            f"{width - 1} tokens x {sizes['D']} channels x {x.element_size()} bytes = {sent:,} bytes"
            + ", and all its rows there and back"
            * is_striped,
            sent,
        )
    rows, _, documents = halo(
        sharding, x, width - 1, 0, dim=1, cu_seqlens=cu_seqlens, seq_len=seq_len
    )
    y = _convolve(rows, documents, weight, bias)
    if activation is not None:
        y = functional.silu(y)
    y = methods.join(y.to(x.dtype), 1, sharding.layout, size)
    return relayout(sharding, y, layout, dim=1, seq_len=seq_len) if is_striped else y


def _convolve(rows: Tensor, documents: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the convolution of runs, inside of documents, in float32 or wider.

    Args:
        rows: Runs with ``W - 1`` rows before each, ``[B * R, W - 1 + L, D]``.
        documents: Number of the document of each row, ``[B * R, W - 1 + L]``; -1 outside.
        weight: ``[D, W]``.
        bias: ``[D]``.
    """
    dtype = state_dtype([rows, weight])
    length = rows.shape[1] - weight.shape[1] + 1
    own = documents[:, -length:].unsqueeze(-1)
    y = rows.new_zeros((), dtype=dtype) if bias is None else bias.to(dtype)
    for tap, column in enumerate(weight.to(dtype).unbind(1)):
        seen = slice(tap, tap + length)
        # Rows of another document are left out, not multiplied by 0: they may be NaN.
        is_same = documents[:, seen].unsqueeze(-1) == own
        y = y + torch.where(is_same, rows[:, seen], 0).to(dtype) * column
    return torch.where(own >= 0, y, 0)  # padding has zeros, also where there is a bias
