"""Time head dims, masks and options on one GPU, beside other kernels: ``nox -s bench_options``.

Batch 1, bfloat16, causal; ``common/cases.py`` has the rows, ``methods.py`` the methods: ``ring`` is
``ring_attention`` with the kernel it chooses, ``fa4`` flash-attn-4 called by hand, ``cudnn`` and
``flash`` torch's SDPA on these backends, ``flex`` compiled FlexAttention, whose block mask is made
once.

First out, dQ, dK and dV of each are compared with float32 attention at 1,024 tokens: a method that
errs more than twice as much as the best of the others has no time. Times are CUDA events around
calls that are queued, in rounds in which all take turns, each round in an order of its own, as what
ran before leaves a GPU cooler or warmer; a ratio is one of times in one round. Each is kept as its
quartiles.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import report, turns
from benchmarks.common.cases import (
    OPTIONS_GATE as GATE_LENGTH,
    OPTIONS_LENGTH,
    OURS,
    ROUNDS,
    ROWS,
    Row,
)
from benchmarks.common.report import reason_of
from benchmarks.common.turns import Errors, Run, Times, passing
from benchmarks.torch.cases import OPTIONS, Case
from benchmarks.torch.methods import METHODS, Method, exact, ring_kernel

MOST_CALLS, ROUND_MS = 20, 20.0  # calls of a turn at most, and milliseconds
DEVICE = "cuda"


def errors(row: Row, device: str, methods: Mapping[str, Callable[[Case], Method]]) -> Errors:
    """Return the largest relative RMS error of out, dq, dk and dv, or why a method has none.

    It is ``None`` where results are random: then the method only has to run.
    """
    errors_by_name: Errors = {}
    for rival in row.entrants:
        case = Case(row.of(rival), GATE_LENGTH, device)
        try:
            results = methods[rival.method](case).both(*case.inputs(torch.bfloat16, row.sharpness))
            errors_by_name[rival.name] = (
                None if OPTIONS[row.option].random else _error(case, results)
            )
        except Exception as error:  # noqa: BLE001 - a library's own; the row says so
            errors_by_name[rival.name] = reason_of(error)
    return errors_by_name


def _error(case: Case, results: Sequence[Tensor]) -> float:
    expected = exact(case).both(*case.inputs(torch.float32, case.row.sharpness))
    pairs = zip(results[:4], expected, strict=True)
    return max(float((a.float() - b).square().mean().sqrt() / b.std()) for a, b in pairs)


def rounds(runs: Mapping[str, Run], count: int) -> Times:
    """Return milliseconds per call of each method, in every round."""
    return turns.take_turns(runs, count, _calls, _milliseconds)


def _calls(run: Run) -> int:
    """Return how many calls fill a turn."""
    took = min(_milliseconds(run, 2) for _ in range(2))
    return max(1, min(MOST_CALLS, round(ROUND_MS / took)))


def _milliseconds(run: Run, calls: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    stop.synchronize()
    took: float = start.elapsed_time(stop)
    return max(took / calls, 1e-3)


def measure(row: Row, length: int, count: int, wrong: Errors) -> dict[str, Times]:
    """Return milliseconds by pass and method, of the methods whose results are right.

    A method that raises at this length gets no time, and its reason is put into ``wrong``.
    """
    runs: dict[str, dict[str, Run]] = {"forward": {}, "both": {}}
    names = passing(wrong)
    for rival in (x for x in row.entrants if x.name in names):
        case = Case(row.of(rival), length, DEVICE)
        x = case.inputs(torch.bfloat16)
        try:
            method = METHODS[rival.method](case)
            method.forward(*x[:3])
            method.both(*x)
        except Exception as error:  # noqa: BLE001 - as above
            wrong[rival.name] = reason_of(error)
            continue
        runs["forward"][rival.name] = partial(method.forward, *x[:3])
        runs["both"][rival.name] = partial(method.both, *x)
    return {way: rounds(of_way, count) for way, of_way in runs.items()}


def quartiles(times: Sequence[float]) -> list[float]:
    """Return the first quartile, the median and the third."""
    several = times if len(times) > 1 else [*times, *times]
    return [round(x, 5) for x in statistics.quantiles(several, n=4, method="inclusive")]


def row_of(row: Row, wrong: Errors, took: Mapping[str, Times]) -> dict[str, Any]:
    """Return a row of the result file: times, ratios, the best other, and goals that are met."""
    kept = turns.kept(took, quartiles)
    result: dict[str, Any] = {"row": row.name, "goal": row.goal, "error": wrong, **kept}
    result |= {"best": {}, "met": {}}
    for way, times in took.items():
        medians = {name: statistics.median(x) for name, x in times.items() if name != OURS}
        best = min(medians, key=lambda name: medians[name], default=None)
        result["best"][way] = best
        if row.goal is not None:
            ratio = kept["ratio"][way].get(best)
            result["met"][way] = ratio is not None and ratio[1] <= row.goal
    return result


def measured(row: Row, length: int, count: int) -> dict[str, Any]:
    """Measure a row, and return it with the kernel that ours took."""
    torch.compiler.reset()  # otherwise it stops compiling after a few masks
    wrong = errors(row, DEVICE, METHODS)
    took = measure(row, length, count, wrong)
    kernel = ring_kernel(Case(row, length, DEVICE)) if OURS in took["both"] else None
    return row_of(row, wrong, took) | {"kernel": kernel}


def environment(length: int, count: int) -> dict[str, Any]:
    """Return the environment of a row: GPU, libraries, settings and command."""
    return report.environment(
        torch.cuda.get_device_name(), "flash-attn-4", "triton", torch=torch.__version__,
        cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(), length=length, rounds=count,
        command=shlex.join(["python", "-m", "benchmarks.torch.options", *sys.argv[1:]]),
    )  # fmt: skip


def keep(path: Path, result: dict[str, Any], where: dict[str, Any]) -> None:
    """Put a row and its environment in its place in a result file."""
    kept = report.rows_of(path) if path.exists() else []
    others = {kept_row["row"]: kept_row for kept_row in kept} | {
        result["row"]: result | {"environment": where}
    }
    report.write(path, {"rows": [others[row.name] for row in ROWS if row.name in others]})


def chosen(names: Sequence[str], part: str) -> list[Row]:
    """Return the rows of these names; of a part ``i/n`` every n-th, from the i-th on."""
    first, count = (int(x) for x in part.split("/"))
    if not 1 <= first <= count:
        raise ValueError(f"--part {part}: it is the first to the last of so many parts, as 1/2")
    return [row for row in ROWS if row.name in names][first - 1 :: count]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each row, and write it; return the exit code."""
    parser = report.parser_of(__doc__)
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th row, from the i-th on")
    parser.add_argument("--length", type=int, default=OPTIONS_LENGTH)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--compile", action="store_true", help="fill caches, time nothing")
    options = parser.parse_args(argv)
    if options.table:
        return report.show(options.table)
    rows, where = chosen(options.rows, options.part), environment(options.length, options.rounds)
    for row in (bar := tqdm(rows, unit="row")):
        bar.set_description(row.name)
        result = measured(row, options.length, 1 if options.compile else options.rounds)
        if options.compile:
            continue
        print(json.dumps(result), flush=True)
        if options.json:
            keep(options.json, result, where)
    return 0


if __name__ == "__main__":
    sys.exit(main())
