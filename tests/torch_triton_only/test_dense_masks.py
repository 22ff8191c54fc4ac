"""A tensor mask in the Triton kernels: exact, and hidden blocks are on no list."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ring_core import KernelConfig
from ring_torch import ContextParallel, prepare
from ring_torch.kernels.api import Selection
from ring_torch.kernels.block_index import block_index, in_blocks
from ring_torch.kernels.triton import TritonKernel, launch
from ring_torch.local import LocalRanks

T, HEADS, BLOCK = 64, 2, 16
KERNEL = KernelConfig("triton", block_q=BLOCK, block_k=BLOCK)


def _given(shape: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    """Return q, k and v, and a mask of diagonal squares that are no multiple of a block."""
    torch.manual_seed(0)
    chunk = torch.arange(T) // 24
    mask = (chunk[:, None] == chunk) & (torch.rand(shape) < 0.7)
    mask[..., 3, :] = False
    return [torch.randn(2, T, HEADS, 16) for _ in range(3)], mask


def _by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.mT * 16**-0.5).masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    return ((scores - lse.masked_fill(lse == -torch.inf, 0)).exp() @ v).transpose(1, 2)


def _compared(_: int, shape: tuple[int, ...], layout: Any, options: dict[str, Any]) -> None:
    cp = ContextParallel(layout=layout)
    qkv, mask = _given(shape)
    positions = torch.arange(T)
    q, k, v = (x.requires_grad_() for x in qkv)
    whole = [q, k, v]
    shown = mask & (positions[:, None] >= positions) if options.get("causal") else mask
    expected = _by_hand(q, k, v, shown)
    expected.square().sum().backward()
    leaves = [cp.shard(x.detach()).requires_grad_() for x in whole]
    prepare._prepare.cache_clear()
    with patch.object(prepare, "choose", lambda *_: Selection(TritonKernel(), ())):
        out = cp.attention(*leaves, mask=cp.shard(mask, dim=-2), kernel=KERNEL, **options)
        out.square().sum().backward()
    torch.testing.assert_close(out, cp.shard(expected.detach()), rtol=1e-4, atol=1e-5)
    for leaf, x in zip(leaves, whole, strict=True):
        assert leaf.grad is not None
        assert x.grad is not None
        torch.testing.assert_close(leaf.grad, cp.shard(x.grad), rtol=1e-4, atol=1e-5)


@pytest.mark.nightly(unless=["shape0-zigzag-options0", "shape2-contiguous-options2"])
@pytest.mark.parametrize(
    ("shape", "layout", "options"),
    [
        ((T, T), "zigzag", {"causal": True}),
        ((2, 1, T, T), "striped", {}),
        ((1, HEADS, T, T), "contiguous", {"causal": True, "strategy": "balanced"}),
        ((2, HEADS, T, T), "contiguous", {"strategy": "gather"}),
    ],
)
def test_a_dense_mask_is_exact(
    shape: tuple[int, ...], layout: Any, options: dict[str, Any], pool: LocalRanks
) -> None:
    pool.run(_compared, shape, layout, options)


def _visited(_: int, layout: Any) -> tuple[int, int]:
    """Return the number of blocks that the forward visits, and of those with visible pairs."""
    cp, counts = ContextParallel(layout=layout), list[int]()
    qkv, mask = _given((2, 1, T, T))

    def counting(*args: Any) -> Any:
        listed = block_index(*args)
        counts.append(int(listed.counts.sum()))
        return listed

    with (
        patch.object(prepare, "choose", lambda *_: Selection(TritonKernel(), ())),
        patch.object(launch, "block_index", counting),
    ):
        prepare._prepare.cache_clear()
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
