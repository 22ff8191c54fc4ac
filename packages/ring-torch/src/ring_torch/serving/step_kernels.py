"""Launches of a decode step beside attention, in Triton: new rows are written, partials are merged.

torch's operations do the same in a dozen launches each, which take longer than all that they move.
"""

# Triton's decorator, and the arguments of kernels, have no types in Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_torch.capture import on_device

_BLOCK = 1024  # numbers of a row that a program copies


@triton.jit
def _put_row(x, pool, source, target, block, N, BLOCK: tl.constexpr):
    """Copy a block of a row's numbers."""
    d = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(pool + target * N + d, tl.load(x + source * N + d, mask=d < N), mask=d < N)


@triton.jit
def _write(
    k, v, k_pool, v_pool, lengths, table, n, width, owner, ranks, NK, NV, PAGE: tl.constexpr,
    HAS_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a block of row ``i`` of request ``b`` to its place, if its page is on this rank."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, i = row // n, row % n
    position = tl.load(lengths + b) - n + i
    number = position // PAGE
    if (position >= 0) & (number % ranks == owner):
        page = tl.load(table + b * width + number // ranks).to(tl.int64)
        target = page * PAGE + position % PAGE
        _put_row(k, k_pool, row, target, block, NK, BLOCK)
        if HAS_V:
            _put_row(v, v_pool, row, target, block, NV, BLOCK)


def write(
    k: Tensor, v: Tensor | None, k_pool: Tensor, v_pool: Tensor, lengths: Tensor, table: Tensor,
    owner: int, ranks: int,
) -> None:  # fmt: skip
    """Write the last ``n`` rows of some requests to those of their pages that are on a rank.

    Args:
        k: Keys ``[B, n, K, D]``.
        v: Values ``[B, n, K, Dv]``, or ``None``.
        k_pool: Pages of keys ``[pages, page_size, K, D]``.
        v_pool: Pages of values, unused without ``v``.
        lengths: Number of tokens of each request, int32 ``[B]``.
        table: Numbers of its pages on this rank, contiguous int32 ``[B, width]``.
        owner: This rank.
        ranks: Number of ranks.
    """
    k, v = k.contiguous(), None if v is None else v.contiguous()
    batch, n = k.shape[:2]
    sizes = [x.shape[2] * x.shape[3] for x in (k_pool, v_pool)]
    with on_device(k.device):  # a cache is written outside of a call, which would enter it
        _write[batch * n, -(-max(sizes) // _BLOCK)](
            k, v, k_pool, v_pool, lengths, table, n, table.stride(0), owner, ranks, *sizes,
            PAGE=k_pool.shape[1], HAS_V=v is not None, BLOCK=_BLOCK,
        )  # fmt: skip


@triton.jit
def _combine(parts, merged, rows, P, N, BLOCK: tl.constexpr):
    """Merge a row of all parts; its ``lse`` is the last of its ``N`` numbers."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    top, total, acc = float("-inf"), 0.0, tl.zeros([BLOCK], tl.float32)
    for p in range(P):
        part = parts + (p * rows + row) * N
        lse = tl.load(part + N - 1)
        new_top = tl.maximum(top, lse, propagate_nan=tl.PropagateNan.ALL)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight, shrink = tl.exp(lse - safe), tl.exp(top - safe)
        acc = acc * shrink + weight * tl.load(part + d, mask=d < N - 1, other=0.0)
        total = total * shrink + weight
        top = new_top
    safe = tl.where(top == float("-inf"), 0.0, top)
    some = tl.where(total == 0, 1.0, total)  # `top` is -inf where it is 0
    tl.store(merged + row * N + d, acc / some, mask=d < N - 1)
    tl.store(merged + row * N + N - 1, tl.where(total == 0, top, safe + tl.log(some)))


def combine(parts: Tensor) -> Tensor:
    """Merge ``[P, ..., Dv + 1]`` in float32 over the first dim; see :mod:`merging`."""
    parts = parts.contiguous()
    merged = torch.empty_like(parts[0])
    size = parts.shape[-1]
    rows = merged.numel() // size
    _combine[(rows,)](parts, merged, rows, len(parts), size, BLOCK=triton.next_power_of_2(size))
    return merged
