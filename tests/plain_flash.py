"""Fused attention libraries in plain torch that round, read and allocate like those on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
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
    """Flash attention ``[..., n, H, D]`` with a window, a soft cap and documents.

    Rows are read by their strides and must be aligned to 16 bytes; the last dimension is read
    contiguously, whatever its stride. Outputs have the strides of the inputs. Probabilities and
    gradients of scores are rounded to the inputs' dtype before they are multiplied. Where a row
    sees nothing, ``out`` is NaN and ``lse`` plus infinity, as libraries may leave them.
    """

    clips_right_window: bool = False
    takes_any_rows: bool = False  # also those that begin elsewhere than at multiples of 16 bytes

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: FlashOptions, destination: AttentionState | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Allocate and return ``(out, lse)``."""
        del destination
        shape, options = (*q.shape[:-1], v.shape[-1]), self._taken(options, k)
        out = (torch.empty_like(q) if q.shape == shape else q.new_empty(shape)).fill_(torch.nan)
        q_read, k_read, v_read = (
            self._read(q),
            _for_heads(self._read(k), q),
            _for_heads(self._read(v), q),
        )
        lse = torch.full(q_read.shape[:-1], torch.inf, dtype=q_read.dtype)
        for rows, columns in _sequences(q, k, options):
            scores, visible, _ = _scores(q_read[..., rows, :], k_read[..., columns, :], options)
            top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(())
            safe = top.masked_fill(top == -torch.inf, 0.0)
            weights = (scores - safe).exp()
            total = weights.sum(-1, keepdim=True)
            seen = visible.any(-1)[:, None]
            part = _round(weights, q) @ v_read[..., columns, :] / total
            part = part.masked_fill(~seen, torch.nan)
            out[..., rows, :, :] = part.transpose(-3, -2).to(q.dtype)
            lse[..., rows] = (safe + total.log()).masked_fill(~seen, torch.inf).squeeze(-1)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: FlashOptions, destination: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Allocate and return ``(dq, dk, dv)``."""
        del destination
        options, grads = self._taken(options, k), [torch.zeros_like(x) for x in (q, k, v)]
        wide = (
            self._read(dout),
            self._read(out),
            self._read(q),
            _for_heads(self._read(k), q),
            _for_heads(self._read(v), q),
        )
        for rows, columns in _sequences(q, k, options):
            up, local, q_read = (x[..., rows, :] for x in wide[:3])
            k_read, v_read = (x[..., columns, :] for x in wide[3:])
            seen = lse[..., rows].masked_fill(lse[..., rows] == -torch.inf, torch.inf)
            scores, visible, slope = _scores(q_read, k_read, options)
            weights = (scores - seen.unsqueeze(-1)).exp().masked_fill(~visible, 0.0)
            delta = (up * local).sum(-1, keepdim=True)
            dscores = (weights * (up @ v_read.mT - delta) * slope).masked_fill(~visible, 0.0)
            dscores = _round(dscores, q)
            dk, dv = options.scale * (dscores.mT @ q_read), _round(weights, q).mT @ up
            parts = options.scale * (dscores @ k_read), _by_kv_head(dk, k), _by_kv_head(dv, v)
            for grad, at, part in zip(grads, (rows, columns, columns), parts, strict=True):
                grad[..., at, :, :] = part.transpose(-3, -2).to(grad.dtype)
        return grads[0], grads[1], grads[2]

    def _taken(self, options: FlashOptions, k: Tensor) -> FlashOptions:
        """Return the options as the library interprets them."""
        if not self.clips_right_window:
            return options
        keys = k.shape[-3] if options.documents is None else options.documents.max_k
        left, right = (None if n is None or n >= keys else n for n in options.window)
        if (left is None) != (right is None):
            left, right = (keys if n is None else n for n in (left, right))
        return options._replace(window=(left, right))

    def _read(self, x: Tensor) -> Tensor:
        """Return what is read of ``[..., n, H, D]``, as ``[..., H, n, D]`` in at least float32."""
        starts = [n * x.itemsize for n in (x.data_ptr() // x.itemsize, *x.stride()[:-1])]
        assert self.takes_any_rows or not any(start % 16 for start in starts)
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.as_strided(x.shape, (*x.stride()[:-1], 1)).transpose(-3, -2).to(wide)


def _sequences(q: Tensor, k: Tensor, options: FlashOptions) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns of each document."""
    if options.documents is None:
        yield slice(0, q.shape[-3]), slice(0, k.shape[-3])
        return
    cu_q, cu_k, max_q, max_k = options.documents
    assert cu_q.dtype == cu_k.dtype == torch.int32
    rows, columns = cu_q.tolist(), cu_k.tolist()
    assert (rows[-1], columns[-1]) == (q.shape[0], k.shape[0])
    for cuts, longest in ((rows, max_q), (columns, max_k)):
        assert max(b - a for a, b in pairwise(cuts)) == longest
    for document in zip(pairwise(rows), pairwise(columns), strict=True):
        yield slice(*document[0]), slice(*document[1])


def _round(x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype).to(x.dtype)


def _for_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values ``[..., K, m, D]`` for each query head."""
    return x.repeat_interleave(q.shape[-2] // x.shape[-3], dim=-3)


def _by_kv_head(x: Tensor, like: Tensor) -> Tensor:
    summed: Tensor = x.unflatten(-3, (like.shape[-2], -1)).sum(-3)
    return summed


def _scores(q: Tensor, k: Tensor, options: FlashOptions) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return masked scores ``[..., H, n, m]``, the mask, aligned bottom right, and the slope."""
    scores: Tensor = options.scale * (q @ k.mT)
    slope: Tensor | float = 1.0
    if options.softcap is not None:
        squashed = torch.tanh(scores / options.softcap)
        scores, slope = options.softcap * squashed, 1 - squashed**2
    rows, columns = scores.shape[-2:]
    apart = torch.arange(columns) - (torch.arange(rows)[:, None] + columns - rows)
    left, right = options.window
    visible = torch.ones(rows, columns, dtype=torch.bool)
    visible &= apart <= right if right is not None else True
    visible &= -apart <= left if left is not None else True
    return scores.masked_fill(~visible, -torch.inf), visible, slope


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
