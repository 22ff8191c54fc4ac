"""Movements, ``unshard`` and padded sequences over GPUs, compared with whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor

import ring_torch
from ring_core import LayoutSpec
from ring_torch import ContextParallel
from ring_torch.local import LocalRanks

SIZE = 4
Move = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalRanks]:
    with LocalRanks(SIZE, cuda=True) as ranks:
        yield ranks


def _numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    numbers = torch.randn(*shape, generator=generator)
    return (numbers * 8).to(dtype).cuda() if torch.cuda.is_available() else (numbers * 8).to(dtype)


def _shifted(x: Tensor, n: int) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :n]), x[:, :-n]], 1)


def _moves(cp: ContextParallel, length: int) -> dict[str, tuple[Move, Move]]:
    """Return movements of a rank's slice, and the equivalent on the whole sequence."""
    plain = ContextParallel(layout="contiguous")

    def halo_of(x: Tensor) -> Tensor:
        # Rows outside of the sequence index its last row here, which is zero.
        positions = cp.halo(cp.shard(x.detach(), pad=True), 3, 1, seq_len=length).positions
        rows: Tensor = torch.nn.functional.pad(x, (0, 0, 0, 1))[:, positions[: len(positions) // 2]]
        return rows.flatten(0, 1)

    moves: dict[str, tuple[Move, Move]] = {
        "shift": (
            lambda x: cp.shift(x, 5, seq_len=length), lambda x: cp.shard(_shifted(x, 5), pad=True)
        ),
        "relayout": (
            lambda x: cp.relayout(x, to="contiguous", seq_len=length),
            lambda x: plain.shard(x, pad=True),
        ),
    }  # fmt: skip
    if cp.layout != "striped":
        moves["halo"] = lambda x: cp.halo(x, 3, 1, seq_len=length).rows, halo_of
    return moves


@pytest.mark.ranks(SIZE)
@pytest.mark.parametrize(
    ("layout", "length", "compiled"),
    [("zigzag", 256, False), ("zigzag", 251, True), ("contiguous", 254, False), ("striped", 255, False)],
)  # fmt: skip
@on_ranks
def test_moved_rows_and_gradients_are_those_of_whole_sequences(
    rank: int, layout: LayoutSpec, length: int, compiled: bool
) -> None:
    cp = ContextParallel(layout=layout)
    for name, (move, of_whole) in _moves(cp, length).items():
        torch._dynamo.reset()
        run = torch.compile(move, backend="aot_eager", fullgraph=True) if compiled else move
        for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.bool):
            whole = _numbers(dtype, 2, length, 64)
            # The host waits only in the first call of a kind; the check watches the last call.
            for turn in range(3):
                with ring_torch.check(int(turn == 2)):
                    leaf = whole.clone().requires_grad_(whole.is_floating_point())
                    like = whole.clone().requires_grad_(whole.is_floating_point())
                    out, expected = run(cp.shard(leaf, pad=True)), of_whole(like)
                    assert torch.equal(out, expected), (name, dtype, turn)
                    if not whole.is_floating_point():
                        continue
                    # Gradients are integers, so that sums in bfloat16 are exact.
                    (out * (rank + 1)).sum().backward()
                    (expected * (rank + 1)).sum().backward()
                assert leaf.grad is not None and like.grad is not None
                for grad in (leaf.grad, like.grad):
                    dist.all_reduce(grad)
                assert torch.equal(leaf.grad, like.grad), (name, dtype, turn)


def _attends(_: int, strategy: str, length: int) -> list[float]:
    """Return errors of a padded call and of its gradients against the unpadded call."""
    cp = ContextParallel()
    alone: Any = [dist.new_group([n]) for n in range(SIZE)][dist.get_rank()]
    x = [_numbers(torch.bfloat16, 1, length, heads, 64) / 8 for heads in (8, 4, 4)]
    errors = []
    for _turn in range(3):  # repeated calls reuse prepared launches
        leaves, like = ([y.clone().requires_grad_() for y in x] for _ in range(2))
        q, k, v = (cp.shard(y, pad=True, fill=3) for y in leaves)
        out = cp.attention(q, k, v, causal=True, seq_len=length, strategy=strategy)
        whole = cp.unshard(out, grad="slice", seq_len=length)
        expected = ring_torch.ring_attention(*like, causal=True, group=alone)
        assert isinstance(expected, Tensor)
        for y in (whole, expected):
            y.float().square().sum().backward()
        for leaf in leaves:
            assert leaf.grad is not None
            dist.all_reduce(leaf.grad)
        pairs = [
            (whole.detach(), expected.detach()),
            *((a.grad, b.grad) for a, b in zip(leaves, like, strict=True)),
        ]
        errors += [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]  # type: ignore[operator, union-attr] # have grads
    return errors


@pytest.mark.ranks(SIZE)
@pytest.mark.parametrize("length", [3, 1000, 1021])
@pytest.mark.parametrize("strategy", ["gather", "ring", "ulysses"])
def test_padded_calls_are_those_of_one_gpu(strategy: str, length: int, pool: LocalRanks) -> None:
    for errors in pool.run(_attends, strategy, length):
        assert max(errors) < 0.03, errors


def _queued(rank: int, layout: str) -> list[bool]:
    cp = ContextParallel(layout=layout)  # type: ignore[arg-type]  # a parameter of the test
    weight = torch.arange(2 * 64 * 8, device="cuda", dtype=torch.float32).view(2, 64, 8)
    x = cp.shard(weight).requires_grad_()
    right = []
    for n in range(3):
        torch.cuda.set_sync_debug_mode("error" if n else "default")
        try:
            whole = cp.unshard(x, grad="sum")
            (grad,) = torch.autograd.grad(whole, x, weight * (rank + 1))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        right.append(torch.equal(whole, weight) and torch.equal(grad, 3 * x))
    return right


@pytest.mark.nccl
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_no_host_waits_after_the_first_call(layout: str) -> None:
    with LocalRanks(2, cuda=True) as pool:
        assert pool.run(_queued, layout) == [[True] * 3] * 2
