"""Time repeated runs: on several GPUs by CUDA events, on one by what suits, or on a CPU.

``timed_rows`` loads it by its path, for old source trees too, so it imports no benchmark.
"""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

MOST_ROUNDS = 50  # rounds of a short run
Run = Callable[[], object]


def timed(run: Run, seconds: float, layers: int = 1) -> dict[str, Any]:
    """Return milliseconds of the slowest rank, and of this rank's host, for one layer of a run.

    All ranks call it at once, for about ``seconds``.
    """
    for attempt in range(3):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        once = torch.tensor(time.perf_counter() - start, device="cuda")
        dist.all_reduce(once, op=dist.ReduceOp.MAX)
        # The first run may compile kernels. After it, one of over a second needs no more warm-up.
        if attempt > 0 and float(once) > 1:
            break
    repeats = max(3, min(20, int(seconds / float(once))))
    # A host shared with others has slow moments: short runs are spread over all of ``seconds``.
    rounds = max(1, min(MOST_ROUNDS, int(seconds / (repeats * float(once)))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    times, host = list[float](), list[float]()
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        host.append((time.perf_counter() - start) / repeats / layers)
        torch.cuda.synchronize()
        times += [a.elapsed_time(b) / layers for a, b in pairwise(events)]
    local = torch.tensor(times, device="cuda")
    dist.all_reduce(local, op=dist.ReduceOp.MAX)
    ordered = sorted(local.tolist())
    return {
        "ms": statistics.median(ordered), "low": ordered[0], "high": ordered[-1],
        "quartiles": statistics.quantiles(ordered)[::2], "runs": len(ordered),
        "host_ms": 1e3 * statistics.median(host),
    }  # fmt: skip


def event_ms(run: Run, calls: int = 1) -> float:
    """Return a GPU's milliseconds for each of ``calls`` queued calls of a run."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / calls


def median_ms(run: Run, repeats: int, on_gpu: Callable[[Run], float] = event_ms) -> float:
    """Return the median of a run's milliseconds, after two that compile kernels.

    ``on_gpu`` times one where there is a GPU.
    """
    for _ in range(2):
        run()
    if torch.cuda.is_available():
        return statistics.median(on_gpu(run) for _ in range(repeats))
    return 1e3 * statistics.median(timeit.repeat(run, number=1, repeat=repeats))


def captured(run: Run) -> Run:
    """Return a run as a CUDA graph, whose replay costs the host next to nothing."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay
