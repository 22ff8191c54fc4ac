"""The backward of a movement is its adjoint: over all ranks, ``<M x, y> == <x, M' y>``.

``M'`` is the backward of the movement ``M``. Checked in float64 on random numbers, without
attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_core import StrategyConfig, gather_program, head_plan
from ring_core.programs.grid import RankGrid
from ring_core.programs.heads import PADDING
from ring_torch.buffers import KeyGradBuffer
from ring_torch.call import SessionSpec
from ring_torch.comm.ranks import ranks_of
from ring_torch.compat.documents import PackMove
from ring_torch.options import CallOptions
from ring_torch.prepare import check_call
from ring_torch.strategies.ulysses import exchanges_of, tables_of
from ring_torch.transports.p2p import HeadMessages

SIZE, TOKENS = 3, 36
ALL = RankGrid(SIZE, SIZE)
LAYOUTS: Any = ("contiguous", "zigzag", "striped")


def over_ranks(*pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Return the dot product of tensors that are spread over the ranks."""
    total = torch.stack([(x * y).sum() for x, y in pairs]).sum()
    dist.all_reduce(total)
    return total


def same(moved: Sequence[tuple[Tensor, Tensor]], returned: Sequence[tuple[Tensor, Tensor]]) -> None:
    moved_dot, returned_dot = over_ranks(*moved), over_ranks(*returned)
    assert moved_dot.abs() > 1e-3, "numbers that show something"
    torch.testing.assert_close(moved_dot, returned_dot, rtol=1e-12, atol=1e-12)


def numbers(rank: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _pack(rank: int, layout: Any) -> None:
    """Check the move of packed documents to the layout of their pack and back."""
    if layout == "striped":
        return
    ring, pack = ranks_of(None), PackMove(layout, (0, 4, 4, 10, TOKENS // SIZE))
    x, y = numbers(rank, *2 * [(TOKENS // SIZE, 4)])
    moved = pack.run(ring, x.requires_grad_())
    (grad,) = torch.autograd.grad(moved, x, y)
    same([(moved.detach(), y)], [(x.detach(), grad)])
    assert torch.equal(pack.run(ring, moved.detach(), back=True), x)


def _ulysses(
    rank: int, layout: Any, q_heads: int = 6, kv_heads: int = 3, grid: RankGrid = ALL
) -> None:
    q, k, v = numbers(rank, *((2, TOKENS // SIZE, n, 4) for n in (q_heads, kv_heads, kv_heads)))
    ring = ranks_of(None)
    groups = StrategyConfig("hybrid", ulysses_size=grid.ulysses_size)
    options = CallOptions(strategy="ulysses" if grid.outer_size == 1 else groups)
    call, inputs = check_call(ring, ring.next_call(), layout, q, k, v, options)
    heads = head_plan(q_heads, kv_heads, grid.ulysses_size)
    layouts = exchanges_of(call, inputs, heads)
    tables = tables_of(call.plan, grid, heads, rank, q.device)
    orders = tables.rows, tables.columns, tables.columns
    members = grid.inner_ranks(rank)
    carry = HeadMessages(ring.part(members))
    by_heads = carry.to_heads(layouts.qkv, tables.placed(q, k, v), orders)
    y = numbers(rank + SIZE, *(x.shape for x in by_heads))
    for grad, places in zip(y, (heads.q, heads.kv, heads.kv), strict=True):
        grad[:, :, torch.tensor(places[members.index(rank)] == PADDING)] = (
            0  # the gradient of padding is zero
        )
    back = tables.without_padding(*carry.to_tokens(layouts.grads, y, orders))
    for x, grad, with_heads, with_tokens in zip((q, k, v), y, by_heads, back, strict=True):
        same([(with_heads, grad)], [(x, with_tokens)])
    again = tables.without_padding(*carry.to_tokens(layouts.grads, by_heads, orders))
    for x, whole, copies in zip((q, k, v), again, (1, heads.copies, heads.copies), strict=True):
        assert torch.equal(x * copies, whole)


def _gather(rank: int, layout: Any, own: bool) -> None:
    """Check the fetch of K/V, whose adjoint returns and sums their gradients."""
    q, k, v = numbers(rank, *3 * [(2, TOKENS // SIZE, 2, 4)])
    ring = ranks_of(None)
    options = CallOptions(causal=True, strategy="gather", transport="p2p")
    call, inputs = check_call(ring, ring.next_call(), layout, q, k, v, options)
    gather = gather_program(call.plan, rank, own=own)
    keys, sums = call.keys, KeyGradBuffer(call.keys, head_major=False)
    spec = SessionSpec(gather, keys, 1, sums)
    (arriving,) = call.open_session(spec, call.forward_signature).fetch(inputs)
    assert arriving.wait is not None
    arriving.wait(None)
    fetched = keys.split(arriving.tensors[0])
    y = numbers(rank, *2 * [tuple(fetched[0].shape)])
    session = call.open_session(spec, call.backward_signature)
    (room,) = session.accumulators(zero=True)
    for sums_of_keys, of in zip(sums.views(room, gather.length), y, strict=True):
        sums_of_keys.copy_(of)
    home = torch.zeros(sums.numel(keys.length), dtype=torch.float64)
    for own_fetch in (fetch for fetch in gather.fetches if fetch.rank == rank):
        places = sums.strided_views(home, keys.length, own_fetch.source)
        for sums_of_keys, of in zip(
            places, sums.strided_views(room, gather.length, own_fetch.target), strict=True
        ):
            sums_of_keys.add_(of)
    returning = session.return_grads(room, 0, overlapped=False)
    returning(home, keys.length, lambda source: source)
    returned = sums.views(home, keys.length)
    same(list(zip(fetched, y, strict=True)), list(zip((k, v), returned, strict=True)))


#: Movements, and query and K/V heads: copies of the one K/V head, and 7 heads padded to 9; K/V
#: heads that the ranks do not divide, and query heads in no range.
MOVEMENTS: dict[str, tuple[Any, ...]] = {
    "pack": (_pack,),
    "ulysses": (_ulysses,),
    "ulysses with copies": (_ulysses, 7, 1),
    "ulysses with padding": (_ulysses, 15, 5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MOVEMENTS)
def test_the_return_of_a_movement_is_its_adjoint(name: str, layout: str, backend: Any) -> None:
    movement, *heads = MOVEMENTS[name]
    backend.pool(SIZE).run(movement, layout, *heads)


@pytest.mark.parametrize("own", [False, True], ids=["of others", "of all"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_gradients_return_to_where_keys_were_fetched(layout: str, own: bool, backend: Any) -> None:
    backend.pool(SIZE).run(_gather, layout, own)


@pytest.mark.parametrize("heads", [(6, 3), (7, 1)], ids=["even", "padded"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_the_return_to_ranks_of_a_group_is_its_adjoint(
    layout: str, heads: tuple[int, int], backend: Any
) -> None:
    backend.pool(4).run(_ulysses, layout, *heads, RankGrid(4, 2))
