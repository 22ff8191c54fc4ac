"""Relayouts to other ranks: to a subset, from a subset, and to the same ranks in another order."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import numbers
from messages import Sent
from on_ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from ring_core import Layout, LayoutSpec, RankMismatchError
from ring_torch import ContextParallel
from ring_torch.local import LocalRanks

T, RANKS = 48, 4
#: Ranks that hold the sequence, and ranks that get it. ``(2, 0, 3, 1)`` is a group in that order.
PAIRS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "to some": ((0, 1, 2, 3), (1, 3)), "from some": ((0, 2), (0, 1, 2, 3)),
    "to one": ((0, 1, 2, 3), (2,)), "from one": ((3,), (0, 1, 2, 3)),
    "another order": ((0, 1, 2, 3), (2, 0, 3, 1)), "among some": ((1, 2), (2,)),
}  # fmt: skip
LAYOUTS: dict[str, tuple[LayoutSpec, LayoutSpec]] = {
    "zigzag-contiguous": ("zigzag", "contiguous"), "striped-zigzag": ("striped", "zigzag"),
}  # fmt: skip
SORTS = "sort_ranks" in inspect.signature(dist.new_group).parameters


def cp_over(ranks: tuple[int, ...], layout: LayoutSpec) -> ContextParallel:
    """Return context parallelism over some ranks; every rank has to call this."""
    if list(ranks) != sorted(ranks):
        options: Any = {"sort_ranks": False}
        group: Any = dist.new_group(list(ranks), **options)
        return ContextParallel(group, layout)
    return ContextParallel(DeviceMesh("cpu", list(ranks)), layout)


def part(cp: ContextParallel, ranks: tuple[int, ...], rank: int, x: Tensor, dim: int) -> Tensor:
    """Return this rank's part of a whole tensor; ranks outside of the group get no tokens."""
    return cp.shard(x, dim=dim) if rank in ranks else x.narrow(dim, 0, 0).contiguous()


Move = Callable[[Tensor], Tensor]
RUNS: dict[str, Callable[[Move], Move]] = {
    "eager": lambda move: move,
    "compiled": lambda move: torch.compile(move, backend="aot_eager", fullgraph=True),
    "checkpointed": lambda move: lambda x: checkpoint(move, x, use_reentrant=False),
}


def _relayout(rank: int, name: str, layouts: str, how: str) -> None:
    (source_ranks, target_ranks), (layout, to) = PAIRS[name], LAYOUTS[layouts]
    source, target = cp_over(source_ranks, layout), cp_over(target_ranks, to)
    if rank not in {*source_ranks, *target_ranks}:
        return
    torch._dynamo.reset()
    for dim, shape in ((1, (2, T, 3)), (0, (T,)), (-1, (2, 3, T))):
        whole, grad = numbers(0, *shape), numbers(1, *shape)

        def move(x: Tensor, dim: int = dim) -> Tensor:
            return source.relayout(x, to=target, dim=dim, seq_len=T)

        x = part(source, source_ranks, rank, whole, dim).requires_grad_()
        out = RUNS[how](move)(x)
        assert torch.equal(out, part(target, target_ranks, rank, whole, dim))
        returned = part(target, target_ranks, rank, grad, dim)
        (actual,) = torch.autograd.grad(out, x, returned)
        assert torch.equal(actual, part(source, source_ranks, rank, grad, dim))
        tokens = torch.arange(T)
        moved = source.relayout(
            part(source, source_ranks, rank, tokens, 0), to=target, dim=0, seq_len=T
        )
        assert torch.equal(moved, part(target, target_ranks, rank, tokens, 0))


@pytest.mark.nightly(
    only=[f"{how}-{layouts}-{name}" for how in ("compiled", "checkpointed") for layouts in LAYOUTS
          for name in PAIRS
          if (how, layouts, name) != ("checkpointed", "zigzag-contiguous", "from some")]
)  # fmt: skip
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("how", RUNS)
def test_other_ranks_get_the_tokens_of_their_layout(
    how: str, layouts: str, name: str, pool: LocalRanks
) -> None:
    if name == "another order" and not SORTS:
        pytest.skip("this torch sorts the ranks of every group")
    pool.run(_relayout, name, layouts, how)


def _bytes(rank: int, name: str) -> tuple[int, ...]:
    """Return the bytes that a rank sends and needs to send, forward and backward."""
    source_ranks, target_ranks = PAIRS[name]
    source, target = cp_over(source_ranks, "zigzag"), cp_over(target_ranks, "striped")
    if rank not in {*source_ranks, *target_ranks}:
        return 0, 0, 0, 0
    owner = [torch.empty(T, dtype=torch.int64), torch.empty(T, dtype=torch.int64)]
    layouts: tuple[LayoutSpec, LayoutSpec] = ("zigzag", "striped")
    for of, ranks, layout in zip(owner, PAIRS[name], layouts, strict=True):
        for number, holder in enumerate(ranks):
            of[torch.as_tensor(Layout(layout, T, len(ranks)).positions(number))] = holder
    crossing = owner[0] != owner[1]
    forth = int((crossing & (owner[0] == rank)).sum()) * 2 * 3 * 8
    back = int((crossing & (owner[1] == rank)).sum()) * 2 * 3 * 8
    x = part(source, source_ranks, rank, numbers(0, 2, T, 3), 1).requires_grad_()

    def move() -> Tensor:
        return source.relayout(x, to=target, seq_len=T)

    move().sum().backward()  # ranks have agreed from here on
    with Sent() as forward:
        out = move()
    with Sent() as backward:
        out.sum().backward()
    return forward.sent, forth, backward.sent, back


@pytest.mark.parametrize("name", PAIRS)
def test_only_rows_that_change_rank_are_sent(name: str, pool: LocalRanks) -> None:
    if name == "another order" and not SORTS:
        pytest.skip("this torch sorts the ranks of every group")
    counts = pool.run(_bytes, name)
    for sent, needed, returned, needed_back in counts:
        assert (sent, returned) == (needed, needed_back)
    assert sum(needed for _, needed, *_ in counts) > 0


UNLIKE = {
    "length": "tokens is (48|96) there", "layout": "to is '(striped|zigzag)' there",
    "ranks": r"target_ranks is \[0, [12]\] there", "dtype": "dtype is 'float(32|64)' there",
    "tokens": r"shape is \[2, (23|48), 3\] there", "gradient": "needs_grad is (True|False) there",
    "tokens outside": r"shape is \[2, (1|48), 3\] there",
}  # fmt: skip


@pytest.mark.parametrize("kind", UNLIKE)
@on_ranks
def test_unlike_relayouts_are_named_on_all_ranks(rank: int, kind: str) -> None:
    group: Any = dist.new_group(timeout=timedelta(seconds=20))
    everyone, some = ContextParallel(group), cp_over((0, 2), "zigzag")
    other = cp_over((0, 1), "zigzag")
    x = torch.ones(2, T // 2 if rank in (0, 2) else 0, 3)
    calls: dict[str, Callable[[], Any]] = {
        "length": lambda: some.relayout(x, to=everyone, seq_len=T + 48 * (rank == 1)),
        "layout": lambda: some.relayout(
            x, seq_len=T, to=ContextParallel(group, "striped" if rank == 1 else "zigzag")
        ),
        "ranks": lambda: everyone.relayout(
            torch.ones(2, T // RANKS, 3), to=other if rank % 2 else some
        ),
        "tokens": lambda: some.relayout(x[:, rank == 2 :], to=everyone, seq_len=T),
        "tokens outside": lambda: some.relayout(
            torch.ones(2, 1, 3) if rank == 1 else x, to=everyone, seq_len=T
        ),
        "dtype": lambda: some.relayout(x.double() if rank == 3 else x, to=everyone, seq_len=T),
        "gradient": lambda: some.relayout(
            x.requires_grad_(rank == 1), to=everyone, seq_len=T
        ),
    }  # fmt: skip
    with pytest.raises(RankMismatchError, match=UNLIKE[kind]):
        calls[kind]()


def _refused(rank: int) -> dict[str, str]:
    everyone, some, others = (
        ContextParallel(), cp_over((0, 2), "zigzag"), cp_over((1, 2, 3), "contiguous")
    )  # fmt: skip
    x = torch.ones(2, T // 2 if rank in (0, 2) else 0, 3)
    whole = torch.ones(2, T, 3)
    calls: dict[str, Callable[[], Any]] = {
        "length": lambda: some.relayout(x, to=everyone),
        "apart": lambda: some.relayout(x, to=others, seq_len=T),
        "part": lambda: everyone.relayout(everyone.shard(whole), to=some, seq_len=2 * T),
        "division": lambda: everyone.relayout(torch.ones(1, 1, 3), to=some, seq_len=RANKS),
        "half": lambda: everyone.relayout(everyone.shard(whole), to=some, seq_len=0.5),  # type: ignore[arg-type]  # wrong on purpose
    }
    if rank not in (0, 2):
        calls["member"] = lambda: some.shard(whole)
        calls["rank"] = lambda: some.cp_rank
        calls["attention"] = lambda: some.attention(*[torch.ones(1, 4, 1, 4)] * 3)
    results = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            results[name] = str(error)
        else:
            results[name] = "a result"
    assert everyone.shift(torch.ones(1, 8), 0).sum() == 8
    return results


def test_refusals_say_what_is_possible(pool: LocalRanks) -> None:
    for rank, messages in enumerate(pool.run(_refused)):
        assert "Give seq_len" in messages["length"]
        assert "go through a ContextParallel over a group that has all of them" in messages["apart"]
        assert "x has 12 tokens, and the part that this rank holds" in messages["part"]
        assert "and the part that this rank holds of a sequence of 4 is 2" in messages["division"]
        assert "seq_len must be at least 1, and an integer" in messages["half"]
        if rank not in (0, 2):
            for name in ("member", "rank", "attention"):
                assert "this rank is not in the DeviceMesh of the ranks [0, 2]" in messages[name]
