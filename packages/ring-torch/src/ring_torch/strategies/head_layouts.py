"""Messages of a call whose ranks trade tokens for heads: which tensors travel together."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ring_core import HeadPlan
from ring_core.viz import text as viz
from ring_torch.buffers import HeadBuffer, HeadPart


class ExchangeLayouts(NamedTuple):
    """Message layouts of a call's exchanges of tokens for heads; ``None`` for those it has not.

    Attributes:
        qkv: Q, K and V from tokens to heads.
        results: ``out`` and ``lse`` from heads to tokens.
        upstream: ``dout``, and ``delta`` where the kernel takes it, from tokens to heads.
        grads: dQ, dK and dV from heads to tokens.
        ids: Segment ids of queries and keys, of which all ranks get all.
        bias: The bias from tokens to heads; one for all heads goes to all ranks.
        bias_shift: The shift of its rows, likewise.
        bias_grad: Its gradient, from heads to tokens.
        most_bytes: Bytes of the largest exchange: of the messages from one rank to all.
    """

    qkv: HeadBuffer
    results: HeadBuffer
    upstream: HeadBuffer
    grads: HeadBuffer
    ids: HeadBuffer | None
    bias: HeadBuffer | None
    bias_shift: HeadBuffer | None
    bias_grad: HeadBuffer | None
    most_bytes: int

    def of_pass(self, *, forward: bool) -> list[HeadBuffer]:
        """Return the exchanges of a pass, in no order."""
        of_forward = self.qkv, self.ids, self.bias, self.bias_shift, self.results
        exchanges = of_forward if forward else (self.upstream, self.grads, self.bias_grad)
        return [x for x in exchanges if x is not None]

    def figure(self, *, backward: bool) -> str:
        """Return a line for ``explain`` with the number of exchanges in each pass."""
        counts = [f"{len(self.of_pass(forward=True))} in the forward"]
        if backward:
            counts.append(f"{len(self.of_pass(forward=False))} in the backward")
        return viz.figure(
            "exchanges", f"{', '.join(counts)}: tokens for heads among {self.qkv.ranks} ranks"
        )


@lru_cache(maxsize=256)
def head_exchanges(
    heads: HeadPlan,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    v_dim: int,
    dtype: torch.dtype,
    acc_dtype: torch.dtype,
    needs_delta: bool,
    has_ids: bool,
    bias: tuple[tuple[int, ...], torch.dtype, bool, bool] | None,
) -> ExchangeLayouts:
    """Make the message layouts of a call from the shapes of its tensors.

    ``bias`` are its shape and dtype, and if it is shifted and has a gradient.
    """
    (ranks, q_places), kv_places = heads.q.shape, heads.kv.shape[1]
    (batch, length, _, dim), k_length = q_shape, k_shape[1]
    q = HeadPart(batch, length, q_places, dim, dtype)
    k = HeadPart(batch, k_length, kv_places, dim, dtype)
    out = q._replace(dim=v_dim)
    # Of lse and delta there is one number for each token and head; kernels keep them head by head.
    row = q._replace(dim=1, dtype=acc_dtype, head_major=True)
    # Gradients of a K/V head with copies are summed before they are rounded.
    dk = k._replace(dtype=dtype if heads.copies == 1 else acc_dtype)
    # A copy of the ids is sent to each rank, as if it were the rank's head.
    ids = [HeadPart(batch, n, 1, 1, torch.int32) for n in (length, k_length)]
    traded_bias = traded_shift = bias_grad = None
    if bias is not None:
        (bias_batch, bias_heads, _, keys), bias_dtype, shifts, has_grad = bias
        # A bias that heads share goes to all ranks whole, and its gradient comes back from all of
        # them.
        places = 1 if bias_heads == 1 else q_places
        part = HeadPart(bias_batch, length, places, keys, bias_dtype, head_major=True)
        shift = part._replace(batch=batch if has_ids else bias_batch, dim=1, dtype=acc_dtype)
        # The gradient of a bias that all heads share is summed over ranks before it is rounded.
        grad = part._replace(dtype=acc_dtype if bias_heads == 1 else bias_dtype)
        traded_bias, traded_shift, bias_grad = (
            HeadBuffer.of(ranks, x) if is_sent else None
            for x, is_sent in ((part, True), (shift, shifts), (grad, has_grad))
        )
    layouts = ExchangeLayouts(
        HeadBuffer.of(ranks, q, k, k._replace(dim=v_dim)),
        HeadBuffer.of(ranks, out, row),
        HeadBuffer.of(ranks, out, *([row] if needs_delta else [])),
        HeadBuffer.of(ranks, q, dk, dk._replace(dim=v_dim)),
        HeadBuffer.of(ranks, *ids) if has_ids else None,
        traded_bias,
        traded_shift,
        bias_grad,
        0,
    )
    # Memory of a pass is reserved once, for its largest exchange: the others reuse it.
    sizes = [ranks * x.message.size for x in layouts if isinstance(x, HeadBuffer)]
    return layouts._replace(most_bytes=max(sizes))
