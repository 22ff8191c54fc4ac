"""Movements and ``unshard`` over GPUs, compared with whole sequences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor

import ring_torch
from ring_core import LayoutSpec
from ring_core.base.arguments import not_none
from ring_torch import ContextParallel
from ring_torch.local import LocalRanks

RANKS = 4
Move = Callable[[Tensor], Tensor]


def _numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (8 * torch.randn(*shape, generator=generator)).to(dtype).cuda()


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
            lambda x: cp.shift(x, 5, seq_len=length),
            lambda x: cp.shard(torch.cat([torch.zeros_like(x[:, :5]), x[:, :-5]], 1), pad=True),
        ),
        "relayout": (
            lambda x: cp.relayout(x, to="contiguous", seq_len=length),
            lambda x: plain.shard(x, pad=True),
        ),
    }  # fmt: skip
    if cp.layout != "striped":
        moves["halo"] = lambda x: cp.halo(x, 3, 1, seq_len=length).rows, halo_of
    return moves


@pytest.mark.ranks(RANKS)
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
                    leaves = [whole.clone() for _ in range(2)]
                    for leaf in leaves:
                        leaf.requires_grad_(whole.is_floating_point())
                    outs = run(cp.shard(leaves[0], pad=True)), of_whole(leaves[1])
                    assert torch.equal(*outs), (name, dtype, turn)
                    if not whole.is_floating_point():
                        continue
                    # Gradients are integers, so that sums in bfloat16 are exact.
                    for out in outs:
                        (out * (rank + 1)).sum().backward()
                grads = [not_none(leaf.grad) for leaf in leaves]
                for grad in grads:
                    dist.all_reduce(grad)
                assert torch.equal(*grads), (name, dtype, turn)


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
