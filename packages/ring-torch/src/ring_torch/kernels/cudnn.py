"""``cudnn``: the attention of cuDNN, which comes with torch."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ring_core import Capabilities, Request, RingProgram
from ring_torch.kernels.flash import FlashKernel, capability, old_gpu_reason
from ring_torch.kernels.flash_library import Options, rounded_to_8
from ring_torch.records import AttentionState

aten = torch.ops.aten
_WIDE = 128
_WIDE_FROM = 91900  # cuDNN's version


class Cudnn:
    """Torch's operators for it; whole and square causal blocks, as they take no window."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, _place: AttentionState | None
    ) -> tuple[Tensor, Tensor]:
        """``(out, lse)``; it allocates them."""
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), None, True, 0.0, _is_causal(q, options), False,
            scale=options.scale,
        )  # fmt: skip
        return out.transpose(1, 2), lse.view(lse.shape[:3])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: Options, _place: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """``(dq, dk, dv)``.

        A single query before a single key is more than cuDNN takes: a second token stands behind
        them, which nothing sees and whose own gradient is 0.
        """
        if q.shape[1] == k.shape[1] == 1:
            q, k, v = (torch.cat([x, x], dim=1) for x in (q, k, v))
            dout, out = (torch.cat([x, torch.zeros_like(x)], dim=1) for x in (dout, out))
            causal = options._replace(window=(None, 0))
            lse = torch.cat([lse, lse], dim=2)
            dq, dk, dv = self.backward(dout, q, k, v, out, lse, causal, None)
            return dq[:, :1], dk[:, :1], dv[:, :1]
        state = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout's state
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            *(x.transpose(1, 2) for x in (dout, q, k, v, out)), lse.unsqueeze(-1), state, state,
            None, None, None, q.shape[1], k.shape[1], 0.0, _is_causal(q, options),
            scale=options.scale,
        )  # fmt: skip
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv


def _is_causal(q: Tensor, options: Options) -> bool:
    """Whether to mask; a single query sees its single key, and cuDNN takes no such mask."""
    assert options.documents is None and options.window in ((None, None), (None, 0))
    return options.window == (None, 0) and q.shape[1] > 1


@cache
def _missing() -> str | None:
    return old_gpu_reason() if torch.backends.cudnn.is_available() else "this torch has no cuDNN"


def _limits(request: Request, _program: RingProgram) -> tuple[str, ...]:
    """Head dims that were measured to be right on Hopper, with one version."""
    dims = request.head_dim, request.v_head_dim
    if dims[0] == dims[1] <= _WIDE or (
        capability()[0] == 9 and (torch.backends.cudnn.version() or 0) >= _WIDE_FROM
    ):
        return ()
    return (f"has head dims above {_WIDE}, and unlike ones, on Hopper from cuDNN 9.19 on",)


CUDNN = FlashKernel(
    Cudnn(),
    Capabilities(
        name="cudnn", devices=("cuda",), dtypes=("bfloat16", "float16"), max_head_dim=256,
        mixed_head_dims=True, bands="causal", exact_nan=False,
    ),
    head_dims=rounded_to_8,
    missing=_missing,
    limits=_limits,
)  # fmt: skip
