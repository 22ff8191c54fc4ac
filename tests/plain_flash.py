"""Fused attention library in plain torch that rounds, reads and allocates like those on GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ring_core import Capabilities
from ring_torch.kernels.flash import FlashKernel
from ring_torch.kernels.library import FlashLibrary, LaunchOptions as FlashOptions, rounded_to_8
from ring_torch.records import AttentionState


@dataclass(frozen=True)
class PlainFlash(FlashLibrary):
    """Flash attention for whole tensors with a window.

    Rows are read by their strides and must be aligned to 16 bytes; the last dimension is read
    contiguously, whatever its stride. Outputs have the strides of the inputs. Probabilities and
    gradients of scores are rounded to the inputs' dtype before they are multiplied.
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: FlashOptions,
        destination: AttentionState | None,
    ) -> tuple[Tensor, Tensor]:
        """Allocate and return ``(out, lse)``."""
        del destination
        q_read, k_read, v_read = _read(q), _for_heads(_read(k), q), _for_heads(_read(v), q)
        scores = _scores(q_read, k_read, options)
        top = scores.amax(-1, keepdim=True)
        safe = top.masked_fill(top == -torch.inf, 0.0)
        weights = (scores - safe).exp()
        total = weights.sum(-1, keepdim=True)
        heads_first = _round(weights, q) @ v_read / total.masked_fill(total == 0, 1.0)
        lse = (safe + total.log()).squeeze(-1)
        shape = (*q.shape[:3], v.shape[3])
        out = torch.empty_like(q) if q.shape == shape else q.new_empty(shape)
        return out.copy_(heads_first.transpose(1, 2)), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: FlashOptions, destination: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Allocate and return ``(dq, dk, dv)``."""
        del destination
        up, local, q_read = _read(dout), _read(out), _read(q)
        k_read, v_read = _for_heads(_read(k), q), _for_heads(_read(v), q)
        seen = lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1)
        weights = (_scores(q_read, k_read, options) - seen).exp()
        delta = (up * local).sum(-1, keepdim=True)
        dscores = _round(weights * (up @ v_read.mT - delta), q)
        dq = options.scale * (dscores @ k_read)
        dk, dv = options.scale * (dscores.mT @ q_read), _round(weights, q).mT @ up
        inputs_and_grads = (q, dq), (k, _by_kv_head(dk, k)), (v, _by_kv_head(dv, v))
        grads = [torch.empty_like(x).copy_(grad.transpose(1, 2)) for x, grad in inputs_and_grads]
        return grads[0], grads[1], grads[2]


def _read(x: Tensor) -> Tensor:
    """Return what a kernel reads of ``[B, n, H, D]``, as ``[B, H, n, D]`` in at least float32."""
    starts = [n * x.itemsize for n in x.stride()[:-1]]
    assert x.data_ptr() % 16 == 0 and not any(start % 16 for start in starts)
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.as_strided(x.shape, (*x.stride()[:-1], 1)).transpose(1, 2).to(wide)


def _round(x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype).to(x.dtype)


def _for_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values ``[B, K, m, D]`` for each query head."""
    return x.repeat_interleave(q.shape[2] // x.shape[1], dim=1)


def _by_kv_head(x: Tensor, like: Tensor) -> Tensor:
    summed: Tensor = x.unflatten(1, (like.shape[2], -1)).sum(2)
    return summed


def _scores(q: Tensor, k: Tensor, options: FlashOptions) -> Tensor:
    """Return masked scores ``[B, H, n, m]``; the mask is aligned bottom right."""
    scores = options.scale * (q @ k.mT)
    rows, columns = scores.shape[-2:]
    apart = torch.arange(columns) - (torch.arange(rows)[:, None] + columns - rows)
    left, right = options.window
    hidden = torch.zeros(rows, columns, dtype=torch.bool)
    hidden |= apart > right if right is not None else False
    hidden |= -apart > left if left is not None else False
    return scores.masked_fill(hidden, -torch.inf)


#: Kernel of ring_torch on this library.
FLASH = FlashKernel(
    PlainFlash(),
    Capabilities(
        "flash", dtypes=("float64", "float32", "bfloat16", "float16"), bands="any",
        mixed_head_dims=True,
    ),
    head_dims=rounded_to_8,
    unavailable=lambda: None,
)  # fmt: skip
