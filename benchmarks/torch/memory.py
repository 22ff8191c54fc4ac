"""Measure the memory of a call, by torch's allocator, on ranks that share one GPU.

Every method first has to agree with float32 attention on a short sequence. Inputs are there before
and do not count. Nor does symmetric memory, which ranks read of each other: it is not of torch's
allocator. Of all ranks the one that holds most is shown::

    python -m benchmarks.torch.memory --ranks 4 --json memory.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.common import report
from benchmarks.common.cases import (
    SETTINGS,
    SHORT_SETTINGS,
    STRATEGY_SETTINGS,
    Setting,
    mask_of,
)
from benchmarks.common.tables import ALONE
from benchmarks.torch.host_time import described
from benchmarks.torch.one_gpu import ranks_on_one_gpu
from benchmarks.torch.over_gpus import method
from benchmarks.torch.scaling import gate, inputs, without_end, wrong

DEFAULT = ("causal 8k 32/8", "window 512k 32/8", "documents 128k 32/8")
REPEATS = 3  # calls of a pass, of which the last one counts


def peaks(rank: int, setting: Setting, name: str) -> dict[str, float]:
    """Return this rank's peak GiB in each pass, without its inputs."""
    way = method(name, mask_of(setting.mask, setting.seq_len), setting.seq_len)
    length = setting.seq_len // torch.distributed.get_world_size()
    q, k, v, dout, *sinks = inputs(setting, length, seed=rank)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    passes: dict[str, Callable[[], object]] = {
        "forward_gib": partial(way.forward, *leaves, *sinks),
        "both_gib": partial(way.both, *leaves, dout, *sinks),
    }
    before, found = torch.cuda.memory_allocated(), dict[str, float]()
    for key, run in passes.items():
        with way.around():
            for _ in range(REPEATS):
                torch.cuda.reset_peak_memory_stats()
                run()
        torch.cuda.synchronize()
        found[key] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure each setting and method, and write their rows; return the exit code."""
    parser = report.parser_of((__doc__ or "").partition("\n")[0])
    settings = {s.name: s for s in (*SETTINGS, *SHORT_SETTINGS, *STRATEGY_SETTINGS)}
    parser.add_argument("--ranks", type=int, default=4, help="ranks that share the GPU")
    parser.add_argument("--settings", nargs="+", choices=settings, default=DEFAULT, metavar="NAME")
    parser.add_argument(
        "--methods", nargs="+", default=["zigzag/auto/auto/auto"], metavar="NAME",
        help="Ring's methods of benchmarks.torch.scaling, without anything at their ends",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if options.table:
        return report.show(options.table)
    for name in options.methods:
        # Others send messages on GPUs, which ranks that share one cannot.
        if "/" not in name or without_end(name)[1] or ALONE in name:
            parser.error(f"{name}: only Ring's calls are measured, without an end")
    if not torch.cuda.is_available():
        parser.error("the ranks share a GPU, and torch finds none here")
    found = report.Report(options.json, lambda: described(1, 0) | {"ranks": options.ranks})
    with ranks_on_one_gpu(options.ranks) as ranks:
        for name in options.settings:
            for way in options.methods:
                errors = ranks.run(gate, settings[name], way)[0]
                row: dict[str, Any] = {"setting": name, "method": way, "errors": errors}
                if off := wrong(errors):
                    row["wrong"] = off
                else:
                    of_ranks = ranks.run(peaks, settings[name], way)
                    row |= {key: max(x[key] for x in of_ranks) for key in of_ranks[0]}
                found.add(row)
                print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
