"""Block lists of FlashAttention-4: the blocks that it computes, with and without their mask.

It takes two lists for each block of the outer side, of inner blocks in ascending order: those that
need their mask, and those that show all. Where the host knows the mask, it says of which kind each
block is, and lists are made once of that. Segment ids are on the device: one kernel compares the
least and the largest id of each block, so a block of the first list may show nothing.
"""

# Triton's decorator, and the arguments of kernels, have no types in Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_core import WorkItem
from ring_core.base.arguments import EMPTY, FULL, PARTIAL
from ring_torch.capture import capture_safe_cache
from ring_torch.kernels.block_index import Grid, kinds_on
from ring_torch.launches.direct import DirectKernel

_INNER = 32  # blocks that a program looks at, at a time


#: Lists of inner blocks for each outer block, int32: counts and numbers of the partial blocks, then
#: of the full ones. Counts are ``[B or 1, outer]``. Numbers of blocks are ``[B or 1, outer, n]``,
#: where ``n`` is at least the largest count; those behind a block's count mean nothing.
BlockLists = tuple[Tensor, ...]


def block_lists(item: WorkItem, grid: Grid, segments: tuple[Tensor, Tensor] | None) -> BlockLists:
    """Return the lists of an item.

    ``segments`` are the segment ids of its rows, int32 ``[B, n]``, and of its columns, ``[B, m]``.
    """
    if segments is None:
        return _known_lists(item, grid)
    q_ids, k_ids = (x.contiguous() for x in segments)
    kinds = kinds_on(item, grid)
    (_, num_q_blocks, num_k_blocks), batch = kinds.shape, q_ids.shape[0]
    sides = (q_ids, grid.block_q, num_q_blocks), (k_ids, grid.block_k, num_k_blocks)
    (outer_ids, outer_size, outer), (inner_ids, inner_size, inner) = (
        reversed(sides) if grid.k_major else sides
    )
    counts = torch.empty(2, batch, outer, dtype=torch.int32, device=q_ids.device)
    blocks = torch.empty(2, batch, outer, inner, dtype=torch.int32, device=q_ids.device)
    steps = (1, num_k_blocks) if grid.k_major else (num_k_blocks, 1)
    _list_blocks[(outer, batch)](
        outer_ids,
        inner_ids,
        kinds,
        counts,
        blocks,
        outer_ids.shape[1],
        inner_ids.shape[1],
        outer,
        inner,
        *steps,
        OUTER_SIZE=outer_size,
        INNER_SIZE=inner_size,
        OUTER_PADDED=triton.next_power_of_2(outer_size),
        INNER_PADDED=triton.next_power_of_2(inner_size),
        INNER=min(_INNER, triton.next_power_of_2(inner)),
        FULL=FULL,
        EMPTY=EMPTY,
    )
    return counts[0], blocks[0], counts[1], blocks[1]


@capture_safe_cache(maxsize=64)  # of a long sequence each takes megabytes
def _known_lists(item: WorkItem, grid: Grid) -> BlockLists:
    """Return the lists of an item without segment ids, from a bounded cache.

    The first time the host waits for the device, to learn the largest count.
    """
    kinds = kinds_on(item, grid)
    if grid.k_major:
        kinds = kinds.transpose(1, 2).contiguous()
    lists: list[Tensor] = []
    for kind in (PARTIAL, FULL):
        chosen = kinds == kind
        order = torch.argsort((~chosen).to(torch.int8), dim=2, stable=True)
        counts = chosen.sum(dim=2)
        blocks = order[..., : max(1, int(counts.max()))].to(torch.int32).contiguous()
        lists += [counts.to(torch.int32), blocks]
    return tuple(lists)


@DirectKernel
@triton.jit
def _list_blocks(
    outer_ids,
    inner_ids,
    kinds,
    counts,
    blocks,
    outer_tokens,
    inner_tokens,
    outer_count,
    inner_count,
    outer_step,
    inner_step,
    OUTER_SIZE: tl.constexpr,
    INNER_SIZE: tl.constexpr,
    OUTER_PADDED: tl.constexpr,
    INNER_PADDED: tl.constexpr,
    INNER: tl.constexpr,
    FULL: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """Write the lists of one outer block of one sequence, comparing segment ids by extremes."""
    outer, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tl.arange(0, OUTER_PADDED)
    token_index = outer * OUTER_SIZE + token
    inside = (token < OUTER_SIZE) & (token_index < outer_tokens)
    ids = tl.load(outer_ids + batch * outer_tokens + token_index, mask=inside, other=0)
    least = tl.min(tl.where(inside, ids, 2147483647), axis=0)
    largest = tl.max(tl.where(inside, ids, -2147483648), axis=0)
    row = (batch * outer_count + outer) * inner_count
    # Both kinds of lists lie in one buffer, the full ones behind all partial ones.
    partial_dst, full_dst = (
        blocks + row,
        blocks + tl.num_programs(1) * outer_count * inner_count + row,
    )
    partial_count, full_count = 0, 0
    # A program alone writes the lists of its outer block: it goes over the inner blocks in order,
    # and appends those of each kind behind the ones it has written.
    for start in range(0, inner_count, INNER):
        inner = start + tl.arange(0, INNER)
        kind = tl.load(
            kinds + outer * outer_step + inner * inner_step, mask=inner < inner_count, other=EMPTY
        )
        inner_token = tl.arange(0, INNER_PADDED)[None, :]
        inner_index = inner[:, None] * INNER_SIZE + inner_token
        is_inside = (inner_token < INNER_SIZE) & (inner_index < inner_tokens)
        block_ids = tl.load(inner_ids + batch * inner_tokens + inner_index, mask=is_inside, other=0)
        inner_least = tl.min(tl.where(is_inside, block_ids, 2147483647), axis=1)
        inner_largest = tl.max(tl.where(is_inside, block_ids, -2147483648), axis=1)
        meets = (least <= inner_largest) & (inner_least <= largest)
        # Tokens with negative ids see nothing and are not seen.
        meets = meets & (largest >= 0) & (inner_largest >= 0) & (kind != EMPTY)
        # Only blocks of one id on both sides show all that the band shows.
        alike = (least == largest) & (inner_least == inner_largest) & (least == inner_least)
        full = meets & alike & (kind == FULL)
        partial = (meets & ~full).to(tl.int32)
        full = full.to(tl.int32)
        tl.store(partial_dst + partial_count + tl.cumsum(partial, 0) - 1, inner, mask=partial != 0)
        tl.store(full_dst + full_count + tl.cumsum(full, 0) - 1, inner, mask=full != 0)
        partial_count += tl.sum(partial, axis=0)
        full_count += tl.sum(full, axis=0)
    tl.store(counts + batch * outer_count + outer, partial_count)
    tl.store(counts + (tl.num_programs(1) + batch) * outer_count + outer, full_count)
