"""Time a ring against one rank that computes the whole sequence: ``python -m ring_torch bench``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from ring_core.tools.bench import BenchCase, TimedRound, Timing, default_case, timings
from ring_core.tools.doctor import Check
from ring_torch.attention import ring_attention
from ring_torch.checking.settings import check as checking
from ring_torch.local import LocalRanks
from ring_torch.tools.timing import seconds_of

RingChecks = Callable[..., Iterator[Check]]  # type of ``doctor.ring_checks``
PATIENCE = 600.0  # seconds after which a round is given up
CALLS = 4  # calls in a row that a round times on a GPU


def defaults() -> BenchCase:
    """Return the setting timed by default: a ring of all GPUs, or of two processes on the CPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return default_case(gpus or 2, on_cpu=not gpus)


def bench(
    setting: BenchCase, transport: str, seconds: float, ring_checks: RingChecks
) -> tuple[list[Check], tuple[Timing, ...]]:
    """Time a ring, and one rank alone, if the ring's results on a short sequence are right.

    The ring is timed as it is, and with every call checked. A call that :func:`ring_attention`
    refuses fails the check.

    Args:
        setting: Sizes and options of the call.
        transport: Transport of the call.
        seconds: Time to spend, in seconds.
        ring_checks: Function that checks a ring's results, ``doctor.ring_checks``.

    Returns:
        The checks and the timings; no timings if a check failed.

    Raises:
        ValueError: There are fewer GPUs than ranks, or too many ranks for one machine.
        LocalRankError: A rank failed while it was timed.
    """
    cuda = torch.cuda.is_available()
    if cuda and setting.ranks > torch.cuda.device_count():
        raise ValueError(
            f"--ranks {setting.ranks}: there are {torch.cuda.device_count()} GPUs here, and a rank needs one"
        )
    with LocalRanks(setting.ranks, cuda=cuda, patience=PATIENCE) as ranks:
        checks = list(ring_checks(ranks, setting, transport, cuda=cuda))
        if not all(check.passed for check in checks):
            return checks, ()
        with LocalRanks(1, cuda=cuda, patience=PATIENCE) as alone:
            rounds = (
                cast("TimedRound", partial(_longest_round, group, setting, transport, check))
                for group, check in ((alone, 0), (ranks, 0), (ranks, 1))
            )
            return checks, timings(*rounds, work_fraction=1 / setting.ranks, seconds=seconds)


def _longest_round(
    ranks: LocalRanks, setting: BenchCase, transport: str, check: int, n: int
) -> tuple[float, float]:
    """Return the seconds of a round's forward, and of forward and backward, on the slowest rank."""
    forward, forward_backward = zip(
        *ranks.run(time_round, setting, transport, check, n), strict=True
    )
    return max(forward), max(forward_backward)


def time_round(
    rank: int, setting: BenchCase, transport: str, check: int, seed: int
) -> tuple[float, float]:
    """Return the mean seconds of a forward, and of a forward and backward, on this rank.

    Args:
        rank: This rank.
        setting: Sizes and options of the call.
        transport: Transport of the call.
        check: Interval of the calls that are checked, as in :func:`ring_torch.check`; 0 for none.
        seed: Seed of the random inputs.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1000 * seed + rank)
    length, dtype = setting.seq_len // dist.get_world_size(), getattr(torch, setting.dtype)
    q, k, v, dout = (
        torch.randn(1, length, heads, setting.head_dim, dtype=dtype, device=device)
        for heads in (setting.heads, setting.kv_heads, setting.kv_heads, setting.heads)
    )
    attend = partial(
        ring_attention, layout=setting.layout, mask=setting.mask, kernel=setting.kernel, strategy=setting.strategy,
        transport=transport,
    )  # fmt: skip

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v)

    def forward_backward() -> None:
        inputs: list[Tensor] = [x.requires_grad_() for x in (q, k, v)]
        torch.autograd.grad(attend(*inputs), inputs, dout)

    with checking(check):
        return _together(forward, device), _together(forward_backward, device)


def _together(run: Callable[[], None], device: str) -> float:
    """Return the mean seconds of a call, which all ranks start at once.

    On a GPU calls are timed in a row, as the layers of a model queue them. One before is not
    counted: after a pause the host takes longer for a call than in a training loop.
    """
    calls = 1
    if device == "cuda":
        run()
        calls = CALLS
    dist.barrier()
    return seconds_of(run, calls, device)
