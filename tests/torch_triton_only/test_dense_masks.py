"""A tensor mask in the Triton kernels: hidden blocks are on no list."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from patched import chosen

from ring_core import KernelConfig
from ring_torch import ContextParallel
from ring_torch.kernels.block_index import block_index, in_blocks
from ring_torch.kernels.triton import TritonKernel, launch
from ring_torch.local import LocalRanks

T, HEADS, BLOCK = 64, 2, 16
KERNEL = KernelConfig("triton", block_q=BLOCK, block_k=BLOCK)


def _visited(_: int, layout: Any) -> tuple[int, int]:
    """Return the number of blocks that the forward visits, and of those with visible pairs."""
    cp, counts = ContextParallel(layout=layout), list[int]()
    torch.manual_seed(0)
    chunk = torch.arange(T) // 24  # squares on the diagonal that are no multiple of a block
    mask = (chunk[:, None] == chunk) & (torch.rand(2, 1, T, T) < 0.7)
    qkv = [torch.randn(2, T, HEADS, 16) for _ in range(3)]

    def counting(*args: Any) -> Any:
        listed = block_index(*args)
        counts.append(int(listed.counts.sum()))
        return listed

    with chosen(TritonKernel(), patch.object(launch, "block_index", counting)):
        cp.attention(*map(cp.shard, qkv), mask=cp.shard(mask, dim=-2), kernel=KERNEL)
    rows, live = cp.shard(mask, dim=-2)[:, 0], 0
    for rank in range(cp.cp_size):
        keys = torch.as_tensor(cp.layout_of(T).positions(rank))
        live += int(in_blocks(rows[..., keys], BLOCK, BLOCK).sum())
    return sum(counts), live


@pytest.mark.nightly(only=["striped"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_hidden_blocks_are_on_no_list(layout: Any, pool: LocalRanks) -> None:
    for visited, live in pool.run(_visited, layout):
        assert visited == live
        assert live < 2 * (T // 2 // BLOCK) * (T // BLOCK) or layout == "striped"


@pytest.mark.parametrize("sizes", [(16, 16), (32, 7)])
def test_blocks_that_it_hides(sizes: tuple[int, int]) -> None:
    """A block is visible if any pair in it is; the last blocks may be shorter."""
    torch.manual_seed(1)
    mask = torch.rand(2, 70, 50) < 0.01
    kinds = in_blocks(mask, *sizes)
    rows = [x.any(dim=1) for x in mask.split(sizes[0], dim=1)]
    expected = torch.stack(
        [torch.stack([x.any(dim=1) for x in row.split(sizes[1], dim=1)], dim=1) for row in rows],
        dim=1,
    )
    assert torch.equal(kinds, expected)
    assert not expected.all()
