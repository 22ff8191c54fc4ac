"""``python -m ring_torch bench``: what a ring keeps of one device's rate on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from ring_core.tools.bench import BenchCase, TimedRound, Timing, timings
from ring_core.tools.doctor import Check
from ring_torch import tripwire
from ring_torch.attention import ring_attention
from ring_torch.local import LocalRanks
from ring_torch.tools.rates import seconds_of

RingChecks = Callable[..., Iterator[Check]]  # ``doctor.ring_checks``
PATIENCE = 600.0  # seconds for a round


def defaults() -> BenchCase:
    """What is timed where nothing else is asked for: all GPUs, or two processes on the CPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        return BenchCase(gpus, 32768, 32, 8, 128, "bfloat16", None, "zigzag", "auto", "auto")
    return BenchCase(2, 4096, 8, 2, 64, "float32", None, "zigzag", "auto", "auto")


def bench(
    setting: BenchCase, transport: str, seconds: float, ring_checks: RingChecks
) -> tuple[list[Check], tuple[Timing, ...]]:
    """Time a ring, and one rank alone, if what ``ring_checks`` makes of a short sequence is right.

    Returns:
        The checks, and no timings if one of them failed.

    Raises:
        ValueError: More ranks than GPUs, or what ``attention`` refuses.
        LocalRankError: A rank failed.
    """
    cuda = torch.cuda.is_available()
    if cuda and setting.ranks > torch.cuda.device_count():
        raise ValueError(
            f"--ranks {setting.ranks}: there are {torch.cuda.device_count()} GPUs; a rank needs one"
        )
    with LocalRanks(setting.ranks, cuda=cuda, patience=PATIENCE) as ranks:
        checks = list(ring_checks(ranks, setting, transport, cuda=cuda))
        if not all(check.passed for check in checks):
            return checks, ()
        with LocalRanks(1, cuda=cuda, patience=PATIENCE) as alone:
            every = (
                cast("TimedRound", partial(_longest_round, group, setting, transport, check))
                for group, check in ((alone, 0), (ranks, 0), (ranks, 1))
            )
            return checks, timings(*every, work_fraction=1 / setting.ranks, seconds=seconds)


def _longest_round(
    ranks: LocalRanks, setting: BenchCase, transport: str, check: int, n: int
) -> tuple[float, float]:
    """Seconds of a round on the slowest rank."""
    forward, both = zip(*ranks.run(time_round, setting, transport, check, n), strict=True)
    return max(forward), max(both)


def time_round(
    rank: int, setting: BenchCase, transport: str, check: int, seed: int
) -> tuple[float, float]:
    """Seconds of a forward, and of a forward and backward, on this rank.

    ``check`` is every which call the tripwire checks.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1000 * seed + rank)
    length, dtype = setting.seq_len // dist.get_world_size(), getattr(torch, setting.dtype)
    heads = (setting.heads, setting.kv_heads, setting.kv_heads, setting.heads)
    q, k, v, dout = (
        torch.randn(1, length, h, setting.head_dim, dtype=dtype, device=device) for h in heads
    )
    attend = partial(
        ring_attention, layout=setting.layout, mask=setting.mask, kernel=setting.kernel, strategy=setting.strategy,
        transport=transport,
    )  # fmt: skip

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v)

    def both() -> None:
        inputs: list[Tensor] = [x.requires_grad_() for x in (q, k, v)]
        torch.autograd.grad(attend(*inputs), inputs, dout)

    with tripwire.check(check):
        return _seconds(forward, device), _seconds(both, device)


def _seconds(run: Callable[[], None], device: str) -> float:
    dist.barrier()
    return seconds_of(run, 1, device)
