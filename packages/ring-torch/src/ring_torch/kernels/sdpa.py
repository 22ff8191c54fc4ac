"""``sdpa``: torch's own fused attention operators, which come with torch and return ``lse``.

On the CPU the flash kernel of ``torch.nn.functional.scaled_dot_product_attention``; on CUDA torch's
build of FlashAttention-2. Both take the global ``out`` and ``lse`` in the backward.

Both multiply masked weights, which are 0, with whatever they meet. So blocks that are partly masked
and hold NaN or infinity go to ``eager``, which reads only what is seen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ring_core import Capabilities, WorkItem
from ring_torch.kernels._api import (
    ColumnGrads,
    Columns,
    Params,
    Result,
    RowGrads,
    Rows,
    Upstream,
    merge_into,
)
from ring_torch.kernels.eager import EagerKernel

aten = torch.ops.aten


class CpuFlashKernel:
    """Flash attention on the CPU; takes whole and square causal blocks.

    In half precision it uses an approximate exponential that costs ``lse`` 5e-5, more than the
    inputs' rounding does, so those dtypes are left to ``eager``.
    """

    capabilities = Capabilities(
        name="sdpa", devices=("cpu",), dtypes=("float64", "float32"), bands="causal"
    )

    def forward(
        self, rows: Rows, columns: Columns, item: WorkItem, params: Params, into: Result
    ) -> None:
        """One launch for each query head of a K/V head, so that K/V are not repeated."""
        if _would_leak(item, rows.q, columns.k, columns.v):
            EagerKernel().forward(rows, columns, item, params, into)
            return
        for heads, (q, k, v) in _head_groups(rows.q, columns):
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, item.lo is not None, scale=params.scale
            )
            merge_into(Result(into.out[:, :, heads], into.lse[:, heads]), out.transpose(1, 2), lse)

    def backward(
        self, rows: Rows, columns: Columns, upstream: Upstream, item: WorkItem, params: Params,
        row_grads: RowGrads, column_grads: ColumnGrads,
    ) -> None:  # fmt: skip
        """The kernel computes ``delta`` itself, from the global ``out``."""
        if _would_leak(item, rows.q, columns.k, columns.v, upstream.dout, upstream.out):
            grads = row_grads, column_grads
            EagerKernel().backward(rows, columns, upstream, item, params, *grads)
            return
        for heads, (q, k, v) in _head_groups(rows.q, columns):
            dout, out = (x[:, :, heads].transpose(1, 2) for x in (upstream.dout, upstream.out))
            dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout,
                q,
                k,
                v,
                out,
                upstream.lse[:, heads],
                0.0,
                item.lo is not None,
                scale=params.scale,
            )
            row_grads.dq[:, :, heads] += dq.transpose(1, 2)
            column_grads.dk.add_(dk.transpose(1, 2))
            column_grads.dv.add_(dv.transpose(1, 2))


class CudaFlashKernel:
    """Torch's FlashAttention-2 on CUDA; takes any window."""

    capabilities = Capabilities(
        name="sdpa", devices=("cuda",), dtypes=("bfloat16", "float16"), max_head_dim=256, head_dim_multiple=8,
        bands="any",
    )  # fmt: skip

    def forward(
        self, rows: Rows, columns: Columns, item: WorkItem, params: Params, into: Result
    ) -> None:
        """One launch; K/V heads are shared in the kernel."""
        if _would_leak(item, rows.q, columns.k, columns.v):
            EagerKernel().forward(rows, columns, item, params, into)
            return
        left, right = _sides(item)
        out, lse, *_ = aten._flash_attention_forward(
            rows.q, columns.k, columns.v, None, None, rows.q.shape[1], columns.k.shape[1], 0.0,
            False, False,
            scale=params.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        merge_into(into, out, lse)

    def backward(
        self, rows: Rows, columns: Columns, upstream: Upstream, item: WorkItem, params: Params,
        row_grads: RowGrads, column_grads: ColumnGrads,
    ) -> None:  # fmt: skip
        """One launch with the global ``out`` and ``lse``."""
        if _would_leak(item, rows.q, columns.k, columns.v, upstream.dout, upstream.out):
            grads = row_grads, column_grads
            EagerKernel().backward(rows, columns, upstream, item, params, *grads)
            return
        left, right = _sides(item)
        unused = torch.empty(0, device=rows.q.device)  # dropout's state, of which there is none
        dq, dk, dv = aten._flash_attention_backward(
            upstream.dout.contiguous(), rows.q, columns.k, columns.v, upstream.out.contiguous(),
            upstream.lse.contiguous(), None, None, rows.q.shape[1], columns.k.shape[1], 0.0, False,
            unused, unused,
            scale=params.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        row_grads.dq.add_(dq)
        column_grads.dk.add_(dk)
        column_grads.dv.add_(dv)


def _would_leak(item: WorkItem, *tensors: Tensor) -> bool:
    """Whether a masked weight of an item meets something that 0 times it is not 0."""
    return not item.is_full and not all(bool(torch.isfinite(x).all()) for x in tensors)


def _sides(item: WorkItem) -> tuple[int, int]:
    """FlashAttention-2's window, where -1 is unbounded; trimming made all others non-negative."""
    left, right = item.window
    return -1 if left is None else left, -1 if right is None else right


def _head_groups(q: Tensor, columns: Columns) -> list[tuple[slice, tuple[Tensor, Tensor, Tensor]]]:
    """Slices of query heads that each use another K/V head, with ``[B, heads, T, D]`` views."""
    group = q.shape[2] // columns.k.shape[2]
    k, v = columns.k.transpose(1, 2), columns.v.transpose(1, 2)
    slices = [slice(start, None, group) for start in range(group)]
    return [(heads, (q[:, :, heads].transpose(1, 2), k, v)) for heads in slices]
