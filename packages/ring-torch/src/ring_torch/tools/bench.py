"""Time a ring against one rank that computes the whole sequence: ``python -m ring_torch bench``."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from ring_core.tools.bench import FROM_IDLE, PASSES, Timing, timings
from ring_core.tools.case import Case
from ring_core.tools.doctor import Check
from ring_torch.attention import ring_attention
from ring_torch.checking.settings import check as checking
from ring_torch.local import LocalRanks
from ring_torch.tools.doctor import out_and_grads, ring_checks

PATIENCE = 600.0  # seconds after which a round is given up
CALLS = 4  # calls in a row that a round times on a GPU


def bench(case: Case, seconds: float) -> tuple[list[Check], tuple[Timing, ...]]:
    """Time a ring, and one rank alone, if the ring's results are right.

    It returns the checks, and the timings; none if a result was wrong.

    Raises:
        ValueError: There are fewer GPUs than ranks, or too many ranks for one machine.
        LocalRankError: A rank failed while calls were timed.
    """
    cuda = torch.cuda.is_available()
    if cuda and case.ranks > torch.cuda.device_count():
        raise ValueError(
            f"--ranks {case.ranks}: there are {torch.cuda.device_count()} GPUs here, and a rank needs one"
        )
    with LocalRanks(case.ranks, cuda=cuda, patience=PATIENCE) as ranks:
        checks = list(ring_checks(ranks, case, cuda=cuda))
        if not all(check.passed for check in checks):
            return checks, ()

        def run(group: LocalRanks, check: int, n: int) -> dict[str, float]:
            by_rank = group.run(time_round, case, check, n)
            return {name: max(times[name] for times in by_rank) for name in by_rank[0]}

        with LocalRanks(1, cuda=cuda, patience=PATIENCE) as alone:
            groups = (alone, 0), (ranks, 0), (ranks, 1)
            runs = [partial(run, *x) for x in groups]
            return checks, timings(runs, work_fraction=1 / case.ranks, seconds=seconds)


def time_round(rank: int, case: Case, check: int, seed: int) -> dict[str, float]:
    """Return the mean seconds of a forward, and of a forward and backward, on this rank.

    On a GPU a first call starts on an idle device, when all ranks have met. Calls in a row, as the
    layers of a model queue them, follow: there the host is quicker, and may be ahead. One in
    ``check`` calls is checked; 0 is none.
    """
    torch.manual_seed(1000 * seed + rank)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    length, dtype = case.seq_len // dist.get_world_size(), getattr(torch, case.dtype)
    q, k, v, dout = (
        torch.randn(1, length, heads, case.head_dim, dtype=dtype, device=device)
        for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    )
    attend = partial(ring_attention, layout=case.layout, **case.options)
    calls: list[Callable[[], object]] = [
        torch.no_grad()(partial(attend, q, k, v)),
        partial(out_and_grads, attend, q, k, v, dout),
    ]
    times, idle = dict[str, float](), dict[str, float]()
    with checking(check):
        for name, call in zip(PASSES, calls, strict=True):
            if device == "cuda":
                dist.barrier()
                idle[name + FROM_IDLE] = seconds_of(call, 1, device)
            dist.barrier()
            times[name] = seconds_of(call, CALLS if device == "cuda" else 1, device)
    return times | idle


def seconds_of(run: Callable[[], object], calls: int, device: str) -> float:
    """Return the mean seconds of ``calls`` calls, without waiting for the GPU between them.

    It waits for the GPU before the first call and after the last one, and warms nothing up.
    """
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls
