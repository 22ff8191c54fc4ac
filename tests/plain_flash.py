"""Fused attention libraries in plain torch that round, read and allocate like those on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ring_core import Capabilities
from ring_torch.kernels.flash import FlashKernel
from ring_torch.kernels.library import (
    BackwardLaunch,
    FlashLibrary,
    ForwardLaunch,
    LaunchOptions as FlashOptions,
    rounded_to_8,
)
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


@dataclass(frozen=True)
class Returning(PlainFlash):
    """A library that returns views of its own tensors, as cuDNN's operators do."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: FlashOptions, destination: AttentionState | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return ``(out, lse)``; heads lie before tokens."""
        out, lse = super().forward(q, k, v, options, destination)
        return out.transpose(1, 2).clone().transpose(1, 2), lse.unsqueeze(3).squeeze(3)


@dataclass(frozen=True)
class Writing(PlainFlash):
    """A library that writes where it is told, and whose launches can be repeated.

    As compiled code does, a repeated launch goes by the strides and alignments for which it was
    bound: it reads other numbers, or faults, where a tensor has others.

    Attributes:
        events: What was called: ``"forward"``, ``"bind forward"``, ``"repeat forward"``, and of
            backwards likewise.
    """

    events: list[str] = field(default_factory=list, compare=False)

    @property
    def writes(self) -> bool:
        """True."""
        return True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: FlashOptions, destination: AttentionState | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return ``(out, lse)``, in ``destination`` if that is given."""
        self.events.append("forward")
        result = super().forward(q, k, v, options, None)
        return result if destination is None else _put(result, destination)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: FlashOptions, destination: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return ``(dq, dk, dv)``, the first in ``destination`` if that is given."""
        self.events.append("backward")
        dq, dk, dv = super().backward(dout, q, k, v, out, lse, options, None)
        return dq if destination is None else destination.copy_(dq), dk, dv

    def repeated_forward(
        self, q: Tensor, k: Tensor, v: Tensor, destination: AttentionState, options: FlashOptions
    ) -> ForwardLaunch:
        """Return a forward for tensors with these strides and alignments."""
        self.events.append("bind forward")
        compiled = _compiled(q, k, v, *destination)

        def launch(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None
        ) -> None:
            assert sinks is None
            self.events.append("repeat forward")
            q, k, v, *into = compiled(q, k, v, out, lse)
            _put(PlainFlash.forward(self, q, k, v, options, None), AttentionState(*into))

        return launch

    def repeated_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: FlashOptions, destination: Tensor,
    ) -> BackwardLaunch:  # fmt: skip
        """Return a backward for tensors with these strides and alignments."""
        self.events.append("bind backward")
        compiled = _compiled(dout, q, k, v, out, lse, destination)

        def launch(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            self.events.append("repeat backward")
            dout, q, k, v, out, lse, into = compiled(*tensors)
            dq, dk, dv = PlainFlash.backward(self, dout, q, k, v, out, lse, options, None)
            into.copy_(dq)
            return tensors[-1], dk, dv

        return launch


def _compiled(*tensors: Tensor) -> Callable[..., list[Tensor]]:
    """Return how code compiled for these tensors sees others."""
    kinds = [(x.stride(), x.data_ptr() % 16) for x in tensors]

    def seen(*others: Tensor) -> list[Tensor]:
        for x, (_, alignment) in zip(others, kinds, strict=True):
            assert x.data_ptr() % 16 == alignment, "misaligned address"
        pairs = zip(others, kinds, strict=True)
        return [x.detach().as_strided(x.shape, stride) for x, (stride, _) in pairs]

    return seen


def _put(result: tuple[Tensor, Tensor], destination: AttentionState) -> AttentionState:
    for x, into in zip(result, destination, strict=True):
        into.copy_(x)
    return destination


def flash_of(library: PlainFlash, bands: Literal["any", "causal"]) -> FlashKernel:
    """Return a kernel of ring_torch on one of these libraries."""
    return FlashKernel(
        library,
        Capabilities(
            "flash", dtypes=("float64", "float32", "bfloat16", "float16"), bands=bands,
            mixed_head_dims=True,
        ),
        head_dims=rounded_to_8,
        unavailable=lambda: None,
    )  # fmt: skip


FLASH = flash_of(PlainFlash(), "any")
