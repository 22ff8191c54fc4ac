"""Fused attention libraries in plain torch that round, read and allocate like those on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ring_core import Capabilities
from ring_torch.kernels.flash import FlashKernel
from ring_torch.kernels.library import (
    BackwardLaunch,
    Documents,
    FlashLibrary,
    ForwardLaunch,
    LaunchOptions as FlashOptions,
    rounded_to_8,
)
from ring_torch.records import AttentionState


def shown(q: Tensor, k: Tensor, options: FlashOptions) -> Tensor:
    """Return which keys each query of a batch or of documents sees, aligned bottom right."""
    sides = []
    rows, columns = (torch.tensor([0, x.shape[-3]], dtype=torch.int32) for x in (q, k))
    documents = options.documents or Documents(rows, columns, q.shape[-3], k.shape[-3])
    cu_q, cu_k, longest_q, longest_k = documents
    for x, cu, longest in ((q, cu_q, longest_q), (k, cu_k, longest_k)):
        token = torch.arange(x.shape[-3])
        assert cu.dtype == torch.int32 and int(cu[-1]) == len(token)
        assert longest == (most := int(cu.diff().max())) or (most, longest) == (1, 2)
        document = torch.bucketize(token, cu, right=True)
        sides.append((document, token - cu[document]))
    # FlashAttention-2 takes each document to have one query where it is told of one.
    assert longest_q > 1 or cu_q.diff().eq(1).all()
    (q_document, row), (k_document, column) = sides
    apart, visible = row[:, None] - column, q_document[:, None] == k_document
    left, right = options.window
    visible &= apart <= left if left is not None else True
    visible &= -apart <= right if right is not None else True
    return visible


def scores(q: Tensor, k: Tensor, options: FlashOptions, dtype: torch.dtype | None = None) -> Tensor:
    """Return masked scores ``[..., H, n, m]``, whose gradients are rounded to a dtype."""
    k = k.repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)
    every = options.scale * torch.einsum("...nhd,...mhd->...hnm", q, k)
    if every.requires_grad:
        every.register_hook(partial(_rounded, dtype=dtype))
    if options.softcap is not None:
        every = options.softcap * torch.tanh(every / options.softcap)
    return every.masked_fill(~shown(q, k, options), -torch.inf)


def weighted(weights: Tensor, v: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return ``[..., n, H, Dv]``, values by weights ``[..., H, n, m]`` rounded to a dtype."""
    weights = weights + (_rounded(weights, dtype) - weights).detach()
    v = v.repeat_interleave(weights.shape[-3] // v.shape[-2], dim=-2)
    return torch.einsum("...hnm,...mhd->...nhd", weights, v)


def _rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype).to(x.dtype)


def attended(
    q: Tensor, k: Tensor, v: Tensor, options: FlashOptions, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``(out [..., n, H, Dv], lse [..., H, n])``, differentiable."""
    s = scores(q, k, options)
    lse = s.logsumexp(-1)
    weights = (s - lse[..., None]).exp()
    out = weighted(weights, v, dtype) / weights.sum(-1).mT[..., None]  # as lse is rounded
    if options.sinks is None:
        return out, lse
    total = torch.logaddexp(lse, options.sinks[:, None])
    return out * (lse - total).exp().mT[..., None], total


def differentiated(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, options: FlashOptions,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of a launch by the final ``lse`` and ``delta = rowsum(out * dout)``."""
    with torch.enable_grad():
        leaves = q, k, v = [x.detach().requires_grad_() for x in (q, k, v)]
        weights = (scores(q, k, options, dtype) - lse[..., None]).exp()
        weights = weights.masked_fill(~shown(q, k, options), 0.0)
        loss = (weighted(weights, v, dtype) * dout).sum() - (delta[..., None] * weights).sum()
    return torch.autograd.grad(loss, leaves)


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
        out, lse = attended(self._read(q), self._read(k), self._read(v), options, q.dtype)
        unseen = ~shown(q, k, options).any(-1)
        into = torch.empty_like(q) if q.shape == shape else q.new_empty(shape)
        into.copy_(out.masked_fill(unseen[:, None, None], torch.nan))
        return into, lse.masked_fill(unseen, torch.inf)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: FlashOptions, destination: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Allocate and return ``(dq, dk, dv)``."""
        del destination
        wide = [self._read(x) for x in (q, k, v, dout)]
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        delta = (wide[3] * self._read(out)).sum(-1).mT
        options = self._taken(options, k)
        grads = differentiated(wide[0], wide[1], wide[2], wide[3], lse, delta, options, q.dtype)
        dq, dk, dv = (torch.empty_like(x).copy_(y) for x, y in zip((q, k, v), grads, strict=True))
        return dq, dk, dv

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
        """Return what is read of a tensor, in at least float32."""
        starts = [n * x.itemsize for n in (x.data_ptr() // x.itemsize, *x.stride()[:-1])]
        assert self.takes_any_rows or not any(start % 16 for start in starts)
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.as_strided(x.shape, (*x.stride()[:-1], 1)).to(wide)


@dataclass(frozen=True)
class Returning(PlainFlash):
    """A library that returns views of its own tensors, as cuDNN's operators do."""

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``; heads lie before tokens."""
        out, lse = super().forward(*args, **options)
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

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``, in ``destination``, the last argument, if that is given."""
        self.events.append("forward")
        result = super().forward(*args, **options)
        return result if args[-1] is None else _put(result, args[-1])

    def backward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(dq, dk, dv)``, the first in ``destination`` if that is given."""
        self.events.append("backward")
        assert args[5].is_contiguous(), "lse"
        dq, dk, dv = super().backward(*args, **options)
        return dq if args[-1] is None else args[-1].copy_(dq), dk, dv

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
    dtypes = "float64", "float32", "bfloat16", "float16"
    can = Capabilities("flash", dtypes=dtypes, bands=bands, mixed_head_dims=True)
    return FlashKernel(library, can, head_dims=rounded_to_8, unavailable=lambda: None)


FLASH = flash_of(PlainFlash(), "any")
