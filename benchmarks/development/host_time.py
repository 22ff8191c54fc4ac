"""Time a repeated call on the host: Ring beside flash-attn-4's own function, on several GPUs.

Each rank holds 512 tokens: the GPU has nearly nothing to do, and what is timed is how long the host
takes until it has queued a call. All ways take turns; a row's ratio is to the function called by
hand on one rank's tokens. Results are compared with float32 attention first::

    python -m benchmarks.development.host_time --gpus 4 --json host.json
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.cases import CAUSAL, Setting
from benchmarks.common.harness import Report, command, take_turns
from benchmarks.torch import check_gpus, described
from benchmarks.torch.methods import method
from benchmarks.torch.scaling import gate, inputs, wrong
from ring_torch.local import LocalRanks

TOKENS = 512
WAYS = {
    "by hand": "one", "auto": "zigzag/auto/auto/auto", "ulysses": "zigzag/auto/ulysses/auto",
    "ring": "zigzag/auto/ring/p2p",
}  # fmt: skip
WARM_UP, ROUNDS, AT_ONCE = 30, 15, 8  # calls, rounds, calls of a round
Call = Callable[[], object]


def finish(device: str) -> None:
    """Wait until the device has done everything, and, on GPUs, for the other ranks."""
    if device == "cuda":
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()


def rows(rank: int, size: int) -> list[dict[str, Any]]:
    """Time all ways in turns; return a row for each, of this rank.

    Raises:
        ValueError: Results differ from float32 attention.
    """
    setting = Setting(size * TOKENS, heads=16)
    q, k, v, dout = inputs(setting, TOKENS, seed=rank)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    calls: dict[tuple[str, str], Call] = {}
    for name, of_name in WAYS.items():
        if off := wrong(gate(rank, setting, of_name)):
            raise ValueError(f"results of {of_name} are wrong: {off}")
        way = method(of_name, CAUSAL, setting.seq_len)
        calls[name, "forward"] = partial(way.attend, *leaves)
        calls[name, "forward + backward"] = partial(way.both, *leaves, dout)
    for call in calls.values():
        for _ in range(WARM_UP):
            call()

    def microseconds(call: Call, count: int) -> float:
        finish("cuda")
        start = time.perf_counter()
        for _ in range(count):  # few enough for the GPU to queue
            call()
        taken = (time.perf_counter() - start) / count
        torch.cuda.synchronize()
        return taken * 1e6

    gc.disable()
    taken = take_turns(calls, ROUNDS, lambda _: AT_ONCE, microseconds)
    gc.enable()
    return [
        {
            "way": name, "pass": passes, "us": round(median(times)),
            "least_us": round(min(times)), "most_us": round(max(times)),
            "ratio": round(median(times) / median(taken["by hand", passes]), 2),
        }
        for (name, passes), times in taken.items()
    ]  # fmt: skip


@command(__doc__, {"--gpus": torch.cuda.device_count()})
def main(options: Any) -> int:
    """Time all ways, and write their rows; return the exit code."""
    check_gpus(options.gpus, least=2)
    report = Report(options, described())
    with LocalRanks(options.gpus, cuda=True, patience=300.0) as ranks:
        report.add(*ranks.run(rows, options.gpus)[0])
    return 0
