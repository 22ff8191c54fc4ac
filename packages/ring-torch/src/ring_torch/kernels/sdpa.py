"""Kernels ``sdpa`` and ``cudnn``: fused attention operators that come with torch.

On the CPU ``sdpa`` is the flash kernel of ``torch.nn.functional.scaled_dot_product_attention``, on
CUDA torch's build of FlashAttention-2; ``cudnn`` is the attention of cuDNN. All return ``lse``, and
take the final ``out`` and ``lse`` in the backward.

All multiply masked weights, which are 0, with the values they belong to, and the CPU's returns
``lse = 0`` where all scores of a row are ``-inf``. So on the CPU, items with NaN or infinity go to
``eager``, which reads only what is seen. On CUDA looking for them would stall the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ring_core import Capabilities, Request, RingProgram, WorkItem
from ring_torch.accumulate import merge_in_torch
from ring_torch.capture import capture_safe_cache
from ring_torch.kernels.eager import EagerKernel
from ring_torch.kernels.flash import FlashKernel, old_gpu_reason, unbounded
from ring_torch.kernels.library import (
    FlashLibrary,
    LaunchOptions,
    capability,
    rounded_to_8,
)
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    KernelParams,
    KeyBlock,
    KeyGrads,
    Mode,
    QueryBlock,
    QueryGrads,
)

aten = torch.ops.aten
_WIDE = 128  # head dims above, and different ones for QK and V, need Hopper and a newer cuDNN
_WIDE_FROM = 91900  # version of cuDNN that has them


class CpuFlashKernel(EagerKernel):
    """Kernel ``sdpa`` on the CPU: torch's flash attention, for full and square causal items.

    In half precision its exponential is approximate and costs ``lse`` 5e-5, more than the rounding
    of the inputs, so those dtypes are left to ``eager``, as are items that the operator cannot do.
    The operator computes ``delta`` itself; ``eager`` takes it.
    """

    capabilities = Capabilities(
        name="sdpa", devices=("cpu",), dtypes=("float64", "float32"), bands="causal"
    )

    def attend(
        self,
        item: WorkItem,
        params: KernelParams,
        rows: QueryBlock,
        columns: KeyBlock,
        into: AttentionState | None,
        mode: Mode,
        _key: object = None,
    ) -> AttentionState:
        """Attend and merge into ``into``, without repeating K/V for grouped query heads.

        The operator is called once for each query head of a K/V head.
        """
        assert into is not None
        if _reads_nonfinite(item, rows.q, columns.k, columns.v):
            return super().attend(item, params, rows, columns, into, mode)
        # Each call has one query head of every K/V head; their accumulators are apart.
        for heads, (q, k, v) in _head_groups(rows.q, columns):
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, item.lo is not None, scale=params.scale
            )
            # Views of the accumulators: these heads of all rows.
            own_heads = AttentionState(into.out[:, :, heads], into.lse[:, heads])
            merge_in_torch(own_heads, out.transpose(1, 2), lse)
        return into

    def differentiate(
        self,
        item: WorkItem,
        params: KernelParams,
        rows: QueryBlock,
        columns: KeyBlock,
        upstream: BackwardInputs,
        row_grads: QueryGrads,
        column_grads: KeyGrads,
    ) -> None:
        """Add the item's gradients to the accumulators."""
        if _reads_nonfinite(item, rows.q, columns.k, columns.v, upstream.dout, upstream.out):
            super().differentiate(item, params, rows, columns, upstream, row_grads, column_grads)
            return
        # Query heads that share a K/V head add to the same dK and dV, call by call.
        for heads, (q, k, v) in _head_groups(rows.q, columns):
            dout, out = [x[:, :, heads].transpose(1, 2) for x in (upstream.dout, upstream.out)]
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
            # A query head is in one call only, its K/V head in as many as share it.
            row_grads.dq[:, :, heads] += dq.transpose(1, 2)
            column_grads.dk.add_(dk.transpose(1, 2))
            column_grads.dv.add_(dv.transpose(1, 2))


class TorchFlash(FlashLibrary):
    """Calls of torch's build of FlashAttention-2 on CUDA, for any window and for documents."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: LaunchOptions, _dst: AttentionState | None
    ) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``, allocated by torch."""
        cu_q, cu_k, *longest = options.documents or (None, None, q.shape[1], k.shape[1])
        left, right = (unbounded(side) for side in options.window)
        out, lse, *_ = aten._flash_attention_forward(
            q,
            k,
            v,
            cu_q,
            cu_k,
            *longest,
            0.0,
            False,
            False,
            scale=options.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        options: LaunchOptions,
        _dst: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(dq, dk, dv)``, allocated by torch."""
        cu_q, cu_k, *longest = options.documents or (None, None, q.shape[1], k.shape[1])
        left, right = (unbounded(side) for side in options.window)
        state = torch.empty(0, device=q.device)  # dropout's state, of which there is none
        grads: tuple[Tensor, Tensor, Tensor] = aten._flash_attention_backward(
            dout.contiguous(),
            q,
            k,
            v,
            out.contiguous(),
            lse,
            cu_q,
            cu_k,
            *longest,
            0.0,
            False,
            state,
            state,
            scale=options.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return grads


CUDA_FLASH = FlashKernel(
    TorchFlash(),
    Capabilities(
        name="sdpa",
        devices=("cuda",),
        dtypes=("bfloat16", "float16"),
        max_head_dim=256,
        bands="any",
        documents=True,
        exact_nan=False,
    ),
    head_dims=rounded_to_8,
    clips_right_window=True,
)


class Cudnn(FlashLibrary):
    """Calls of cuDNN by torch's operators, which take no window: for full and causal items."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: LaunchOptions, _dst: AttentionState | None
    ) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``, allocated by torch."""
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention.default(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            None,
            True,
            0.0,
            _is_causal(q, options),
            False,
            scale=options.scale,
        )
        return out.transpose(1, 2), lse.view(lse.shape[:3])

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        options: LaunchOptions,
        _dst: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(dq, dk, dv)``.

        cuDNN's backward refuses a single query and a single key. They get a second token behind
        them, which the first does not see and whose own gradient is 0.
        """
        if q.shape[1] == k.shape[1] == 1:
            # The first query sees the first key alone, as the mask is causal; the second row's dout
            # is 0, so it adds nothing.
            q, k, v = (torch.cat([x, x], dim=1) for x in (q, k, v))
            dout, out = (torch.cat([x, torch.zeros_like(x)], dim=1) for x in (dout, out))
            causal = options._replace(window=(None, 0))
            lse = torch.cat([lse, lse], dim=2)
            dq, dk, dv = self.backward(dout, q, k, v, out, lse, causal, None)
            return dq[:, :1], dk[:, :1], dv[:, :1]
        # torch keeps cuDNN's graphs by q, k and v alone, and a graph reads all later tensors by the
        # strides of its first: those of the others are always the same.
        dout, out = dout.contiguous(), out.contiguous()
        state = _no_dropout(q.device)
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward.default(
            dout.transpose(1, 2),
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            out.transpose(1, 2),
            lse.unsqueeze(-1),
            state,
            state,
            None,
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            _is_causal(q, options),
            scale=options.scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


@capture_safe_cache(maxsize=16)
def _no_dropout(device: torch.device) -> Tensor:
    """Return the state of a dropout that there is not; nothing reads it."""
    return torch.zeros((), dtype=torch.int64, device=device)


def _is_causal(q: Tensor, options: LaunchOptions) -> bool:
    """Return True if cuDNN has to mask causally; a single query sees its key without a mask."""
    assert options.documents is None and options.window in ((None, None), (None, 0))
    return options.window == (None, 0) and q.shape[1] > 1


def _cudnn_limits(request: Request, _program: RingProgram) -> tuple[str, ...]:
    """Return why cuDNN cannot take a call's head dims on this GPU, in its installed version."""
    dims = request.head_dim, request.v_head_dim
    if dims[0] == dims[1] <= _WIDE or (
        capability()[0] == 9 and (torch.backends.cudnn.version() or 0) >= _WIDE_FROM
    ):
        return ()
    return (f"has head dims above {_WIDE}, and unlike ones, on Hopper from cuDNN 9.19 on",)


CUDNN = FlashKernel(
    Cudnn(),
    Capabilities(
        name="cudnn",
        devices=("cuda",),
        dtypes=("bfloat16", "float16"),
        max_head_dim=256,
        mixed_head_dims=True,
        bands="causal",
        exact_nan=False,
    ),
    head_dims=rounded_to_8,
    unavailable=lambda: None if torch.backends.cudnn.is_available() else "this torch has no cuDNN",
    wrong_gpu=old_gpu_reason,
    limits=_cudnn_limits,
)


def _reads_nonfinite(item: WorkItem, q: Tensor, k: Tensor, *value_tensors: Tensor) -> bool:
    """Return True if an item has NaN or infinity that the operator would handle wrongly.

    That is any in q or k and, if some of the item is masked, any in the other tensors: masked
    weights, which are 0, are multiplied with them.
    """
    checked = (q, k) if item.is_full else (q, k, *value_tensors)
    return False in [bool(torch.isfinite(x).all()) for x in checked]


def _head_groups(q: Tensor, columns: KeyBlock) -> list[tuple[slice, tuple[Tensor, Tensor, Tensor]]]:
    """Return slices of query heads, one of each K/V head, with q, k and v ``[B, K, T, D]``."""
    # The operator misreads other strides, without an error.
    assert False not in [x.stride(-1) == 1 for x in (q, columns.k, columns.v) if x.shape[-1] > 1]
    group = q.shape[2] // columns.k.shape[2]
    # K/V of all heads are shared by the calls; only q is sliced.
    k, v = columns.k.transpose(1, 2), columns.v.transpose(1, 2)
    spans = [slice(start, None, group) for start in range(group)]
    return [(heads, (q[:, :, heads].transpose(1, 2), k, v)) for heads in spans]
