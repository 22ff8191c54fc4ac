"""Time rows in one source tree on request: the process that ``old_and_new`` starts.

It imports Ring, and the benchmarks below, from the tree that is in ``PYTHONPATH``; runs over GPUs
are timed by the code of this file's tree, for both. A request is ``{"row": "causal 8k 32/8",
"method": ..., "seconds": ..., "first": ...}``, the answer milliseconds of each pass, or what went
wrong.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from runpy import run_path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.common import cases
from benchmarks.torch import options, scaling
from ring_torch import ring_attention
from ring_torch.local import LocalRanks

ON_CPU = "causal 1k on CPUs"  # a row for machines without GPUs
TOLERANCE = 3e-2  # of results in bfloat16: root mean square, relative to float32's
MOST_OFF = 0.1  # of any number of a row over GPUs
Milliseconds = dict[str, float]


def _over_gpus(ranks: LocalRanks, request: dict[str, Any]) -> Milliseconds:
    """Return the slowest rank's times of a row over several GPUs, checked the first time."""
    lists = ("SETTINGS", "SHORT_SETTINGS", "STRATEGY_SETTINGS")  # an old tree may lack some
    settings = {x.name: x for name in lists for x in getattr(cases, name, ())}
    setting, method = settings[request["row"]], request["method"]
    if request["first"]:
        errors = ranks.run(scaling.gate, setting, method)[0]
        if not all(x < MOST_OFF for name, x in errors.items() if name.endswith("max")):
            raise ValueError(f"results are wrong: {errors}")
    times = ranks.run(_measured, setting, method, request["seconds"])[0]
    return {name: times[name]["ms"] for name in cases.PASSES}


def _measured(rank: int, setting: cases.Setting, method: str, seconds: float) -> dict[str, Any]:
    """Return what the tree's ``scaling`` measures, timed by this tree's ``timing``."""
    timing = run_path(str(Path(__file__).parents[1] / "torch" / "timing.py"))
    with patch.object(scaling, "timed", timing["timed"]):
        measured: dict[str, Any] = scaling.measure(rank, setting, method, seconds)
    return measured


def _on_one_gpu(request: dict[str, Any]) -> Milliseconds:
    """Return the times of ours in a row of the table of options, checked the first time."""
    (row,) = (replace(x, rivals=()) for x in cases.ROWS if x.name == request["row"])
    if request["first"]:
        error = options.errors(row, options.DEVICE, options.METHODS)[cases.OURS]
        if isinstance(error, str) or not (error is None or error < TOLERANCE):
            raise ValueError(f"results are wrong: {error}")
    case = options.Case(row, cases.OPTIONS_LENGTH, options.DEVICE)
    tensors, ring = case.inputs(torch.bfloat16), options.METHODS["ring"](case)
    runs: dict[str, Any]
    runs = {"forward": partial(ring.forward, *tensors[:3]), "both": partial(ring.both, *tensors)}
    return {name: options.rounds({name: run}, 1)[name][0] for name, run in runs.items()}


def _on_a_cpu(_: int) -> Milliseconds:
    """Return this rank's times of a small call."""
    q, k, v = (
        torch.randn(1, cases.K // dist.get_world_size(), heads, 16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    dist.barrier()
    start = time.perf_counter()
    out = ring_attention(q, k, v, causal=True, layout="zigzag")
    forward = time.perf_counter() - start
    torch.autograd.grad(out, (q, k, v), torch.ones_like(q))
    return {"forward": 1e3 * forward, "both": 1e3 * (time.perf_counter() - start)}


def main() -> None:
    """Answer requests until stdin ends; the argument is the number of ranks."""
    cuda, on_one_gpu = torch.cuda.is_available(), {row.name for row in cases.ROWS}
    with LocalRanks(int(sys.argv[1]), cuda=cuda, patience=300.0) as ranks:
        for request in map(json.loads, sys.stdin):
            try:
                if request["row"] == ON_CPU:
                    by_rank = ranks.run(_on_a_cpu)
                    times = {way: max(times[way] for times in by_rank) for way in cases.PASSES}
                elif request["row"] in on_one_gpu:
                    times = _on_one_gpu(request)
                else:
                    times = _over_gpus(ranks, request)
                answer: dict[str, Any] = {"ms": times}
            except Exception as error:  # noqa: BLE001 - whatever a tree raises is told to whom it asked
                answer = {"failed": f"{type(error).__name__}: {error}"}
            print(f"answer: {json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
