"""Bind the processes of a benchmark to processors of their own, as launchers of jobs can."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch.distributed as dist


def bind(rank: int) -> int:
    """Bind all threads of this process to its share of the processors; return how many it has.

    Rank ``n`` of ``N`` gets the ``n``-th of ``N`` equal shares, in the order of their numbers.
    """
    cpus = sorted(os.sched_getaffinity(0))
    share = max(1, len(cpus) // dist.get_world_size())
    first = rank * share % len(cpus)
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cpus[first : first + share])
    return share


def cpu_name() -> str:
    """Return the model of this machine's processors, and how many this process may run on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (
        f"{models[0] if models else platform.processor()}, {len(os.sched_getaffinity(0))} of them"
    )
