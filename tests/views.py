"""Strided views with the values of contiguous tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases import VIEWS as KINDS
from torch import Tensor


def strided(x: Tensor) -> Tensor:
    """Return a view of every other element; those between are poison."""
    wide = torch.full((*x.shape, 2), _poison(x), dtype=x.dtype, device=x.device)
    wide[..., 0] = x
    return wide[..., 0]


def permuted(x: Tensor) -> Tensor:
    """Return a view whose axes are reversed in memory."""
    axes = tuple(reversed(range(x.ndim)))
    return x.permute(axes).contiguous().permute(axes)


def heads_first(x: Tensor) -> Tensor:
    """Return a view with heads before tokens in memory, as in ``[B, H, T, D]``."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2) if x.ndim > 2 else permuted(x)


def sliced(x: Tensor) -> Tensor:
    """Return the middle of a tensor that is larger in every dimension, with poison around it."""
    wide = torch.full([n + 2 for n in x.shape], _poison(x), dtype=x.dtype, device=x.device)
    middle = wide[(slice(1, -1),) * x.ndim]
    middle.copy_(x)
    return middle


def expanded(x: Tensor) -> Tensor:
    """Return the first element along the last axis, expanded with stride 0."""
    return x[..., :1].expand(x.shape)


def broadcast(x: Tensor) -> Tensor:
    """Return the first row, expanded to all others with stride 0."""
    return x[(slice(0, 1),) * (x.ndim - 1)].expand(x.shape)


def offset(x: Tensor) -> Tensor:
    """Return a view one element into an allocation, so not aligned to 16 bytes."""
    flat = torch.full((x.numel() + 1,), _poison(x), dtype=x.dtype, device=x.device)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


def spread(x: Tensor) -> Tensor:
    """Return a view whose heads lie farther apart: aligned, with other strides."""
    return torch.nn.functional.pad(x, (0, 8))[..., : x.shape[-1]]


def _poison(x: Tensor) -> float | int:
    return float("nan") if x.is_floating_point() else 77


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    view.__name__: view
    for view in (strided, permuted, heads_first, sliced, expanded, broadcast, offset)
}
assert tuple(VIEWS) == KINDS
