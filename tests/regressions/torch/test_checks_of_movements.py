"""The check for running jobs counts the bytes of movements, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ring_torch
from ring_torch import ContextParallel, RankMismatchError, WrongResultError
from ring_torch.comm.ranks import DONE, Ranks
from ring_torch.local import LocalRanks

T, SIZE = 40, 2
Move = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalRanks]:
    with LocalRanks(SIZE, timeout=20) as ranks:
        yield ranks


#: Movements of a rank's slice; the second argument is context parallelism of rank 1 alone.
MOVES: dict[str, Callable[[ContextParallel, ContextParallel, Tensor], Tensor]] = {
    "shift": lambda cp, _, x: cp.shift(x, 3, cu_seqlens=(0, 7, 9, T - 1), seq_len=T - 1),
    "halo": lambda cp, _, x: cp.halo(x, 3, 2).rows,
    "relayout": lambda cp, _, x: cp.relayout(x, to="striped"),
    "relayout to one rank": lambda cp, one, x: cp.relayout(x, to=one, seq_len=T),
}


def moves(name: str) -> Move:
    """Return a movement with its ``ContextParallel`` objects."""
    cp, one_rank = ContextParallel(), ContextParallel(DeviceMesh("cpu", [1]))
    return lambda x: MOVES[name](cp, one_rank, x)


def more_rows() -> Any:
    """Let each peer receive its last row twice, and drop the second copy."""
    right = Ranks.start

    def wrong(ranks: Ranks, sends: Any, receives: Any) -> Any:
        if any(x.nbytes == 2048 for x, _ in (*sends, *receives)):  # headers, and findings
            return right(ranks, sends, receives)
        longer = [torch.cat([x, x[-16:]]) for x, _ in receives]
        sends = [(torch.cat([x, x[-16:]]), peer) for x, peer in sends]
        right(ranks, sends, list(zip(longer, (p for _, p in receives), strict=True))).wait()
        for (x, _), y in zip(receives, longer, strict=True):
            x.copy_(y[: len(x)])
        return DONE

    return patch.object(Ranks, "start", wrong)


def _words(rank: int, name: str, how: str) -> list[str]:
    """Return the errors of a movement and of its backward when more is sent than needed."""
    move, messages = moves(name), []
    if how == "compiled":
        torch._dynamo.reset()
        move = torch.compile(move, backend="aot_eager", fullgraph=True)
    for forward_is_wrong in (True, False):
        x = torch.full((1, T // SIZE, 2), 1.0 + rank, dtype=torch.float64).requires_grad_()
        with ExitStack() as stack:
            stack.enter_context(ring_torch.check())
            try:
                with more_rows() if forward_is_wrong else ExitStack():
                    out = move(x)
            except WrongResultError as error:
                messages.append(str(error))
                continue
        with more_rows():  # the backward of a checked movement is checked outside of the block, too
            try:
                out.sum().backward()
            except WrongResultError as error:
                messages.append(str(error))
    return messages


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("name", MOVES)
def test_more_bytes_than_those_of_rows_that_move_are_an_error(
    name: str, how: str, pool: LocalRanks
) -> None:
    by_rank = pool.run(_words, name, how)
    assert by_rank[0] == by_rank[1], "all ranks raise the same"
    forward, backward = by_rank[0]
    kind = name.partition(" ")[0]
    assert f"({kind}) is wrong. rank " in forward, forward
    assert f"({kind} backward) is wrong. rank " in backward, backward
    assert "bytes were sent, and the rows that change rank have" in forward


def _right(_: int) -> None:
    """Check that checked calls have the usual results, for all derivatives, dtypes and dims."""
    for move in map(moves, MOVES):
        x = torch.randn(1, T // SIZE, 2, dtype=torch.float64).requires_grad_()
        with ring_torch.check():
            out = move(x)
            (grad,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
            grad.sum().backward()
            move(torch.ones(2, T // SIZE, dtype=torch.int8))
            move(torch.ones(2, T // SIZE, 0))
        assert torch.equal(out, move(x))


def test_right_movements_pass(pool: LocalRanks) -> None:
    pool.run(_right)


def _unlike(rank: int) -> str:
    cp = ContextParallel()
    with ring_torch.check(rank):
        try:
            cp.shift(torch.ones(1, T // SIZE), 1)
        except RankMismatchError as error:
            return str(error)
    return "no error"


def test_ranks_with_unlike_settings_are_told(pool: LocalRanks) -> None:
    for message in pool.run(_unlike):
        assert "check is" in message
