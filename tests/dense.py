"""Dense attention in plain torch, random numbers for it, its errors and its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import profile


def dense(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, sinks: Tensor | None = None,
    window: int | None = None, visible: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return ``out, dq, dk, dv`` of whole tensors, and ``dsinks``, computed in the tensors' dtype.

    ``window`` is the number of keys that a query sees; ``visible`` are those of another mask.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    q, k, v, *logits = leaves
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    length = q.shape[1]
    position = torch.arange(length, device=q.device)
    distance = position[:, None] - position
    hidden = (distance < 0) | (distance >= (length if window is None else window))
    hidden = hidden if visible is None else ~visible
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    scores = scores.masked_fill(hidden, -torch.inf)
    columns = [scores, *(x[:, None, None].expand(len(q), -1, length, 1) for x in logits)]
    weights = torch.cat(columns, dim=3).softmax(-1)[..., :length]
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return torch's own attention of tensors ``[B, T, H, D]``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(1, 2)


def is_exact(
    cp: Any, attention: Any = None, *, seed: int = 0, tokens: int = 24, **options: Any
) -> bool:
    """Return True if causal attention of a ring, and its gradients, are those of full attention."""
    leaves = [numbers(seed + n, 1, tokens, 2, 8).requires_grad_() for n in range(3)]
    expected = sdpa(*leaves, is_causal=True, scale=options.get("softmax_scale"))
    shards = [cp.shard(x.detach()).requires_grad_() for x in leaves]
    out = (attention or cp.attention)(*shards, causal=True, **options)
    wholes = expected, *torch.autograd.grad(expected.square().sum(), leaves)
    parts = out, *torch.autograd.grad(out.square().sum(), shards)
    return all(torch.allclose(cp.shard(x), y) for x, y in zip(wholes, parts, strict=True))


def numbers(seed: int, *shape: int) -> Tensor:
    """Return random float64 numbers, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def numbers_of(*shape: int) -> Tensor:
    """Return random numbers of this shape, which are others than those of another shape."""
    return numbers(sum(shape), *shape)


def errors(
    results: Sequence[Tensor], exact: Sequence[Tensor], plain: Sequence[Tensor]
) -> list[float]:
    """Return each result's error over that of a plain implementation, both as norms."""
    return [
        float((x.float() - y).norm() / (z.float() - y).norm())
        for x, y, z in zip(results, exact, plain, strict=True)
    ]


def largest_allocation(function: Callable[[], object]) -> int:
    """Return the bytes of the largest allocation of a call."""
    with profile(profile_memory=True, acc_events=True) as profiled:
        function()
    return max(int(event.self_cpu_memory_usage) for event in profiled.events())
