"""Time attention of new tokens over one rank's pages of a K/V cache, beside a plain read.

    python -m benchmarks.torch.decode --json decode.json
    python -m benchmarks.torch.decode --tokens 4096 --heads 4 --kv-heads 2 --width 16  # on a CPU

The rank holds ``--tokens`` tokens on scattered pages. What a decode step does there is captured in
a CUDA graph and timed beside a sum and a maximum over the same bytes, in turns: the ratio is the
plain read's time, of the faster of the two, over the kernel's. On a CPU nothing is captured.

Results are compared with float64 first; where they are wrong nothing is timed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common.report import Report, command
from benchmarks.torch.methods import described
from benchmarks.torch.timing import median_ms
from ring_core import Mask
from ring_torch.serving import kernels, paged
from ring_torch.serving.paged import PagedKeys, Rules

#: Most that results may be off, relative to their norm: rounding to 16 bits.
MOST_ERROR = 0.01
FLUSHED = 256 << 20  # bytes that are written before each run, so that none are in the cache


class Row(NamedTuple):
    """Row of the table.

    Attributes:
        name: Its name.
        shares: Tokens of each request, as parts of all of them.
        new: New tokens of each.
        page_size: Tokens of a page.
    """

    name: str
    shares: Sequence[float]
    new: int = 1
    page_size: int = 128


ROWS = (
    *(Row(f"{n} new", (1.0,), n) for n in (1, 2, 4, 8)),
    Row("unlike lengths", (0.5, 0.25, 0.125, 0.0625, 0.0625)),
    Row("pages of 16", (1.0,), page_size=16),
)


def call_of(row: Row, options: Any, device: str) -> tuple[Tensor, Tensor, PagedKeys, range, Rules]:
    """Return the arguments of a kernel: queries at the ends of requests, on scattered pages."""
    torch.manual_seed(0)
    lengths = [int(options.tokens * share) for share in row.shares]
    pages = [-(-length // row.page_size) for length in lengths]
    order = torch.randperm(sum(pages), dtype=torch.int32, device="cpu")
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32, device="cpu")
    for request, part in enumerate(order.split(pages)):
        table[request, : len(part)] = part
    shape = sum(pages), row.page_size, options.kv_heads, options.width
    k, v = (torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(2))
    q = torch.randn(len(lengths), row.new, options.heads, options.width, device=device)
    ends = torch.tensor(lengths, device="cpu")[:, None]
    positions = ends + torch.arange(-row.new, 0, device="cpu")
    keys = PagedKeys(k, v, table.to(device), 0, 1)
    rules = Rules(Mask(causal=True), options.width**-0.5, None, None)
    return q.to(torch.bfloat16), positions.int().to(device), keys, range(max(pages)), rules


def error(attend: kernels.Attend, call: tuple[Tensor, Tensor, PagedKeys, range, Rules]) -> float:
    """Return how far a kernel's output is from float64, relative to its norm."""
    q, positions, keys, columns, rules = call
    wide = keys._replace(k=keys.k.double(), v=keys.v.double())
    exact, _ = paged.attend(q.double(), positions, wide, columns, rules)
    return float((attend(*call)[0].double() - exact).norm() / exact.norm())


def timed(run: Callable[[], object], repeats: int) -> float:
    """Return the median of a run's milliseconds: on a GPU of its graph, with cold caches."""
    replay = run
    if torch.cuda.is_available():
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
        flushed = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")

    def cold(run: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    return median_ms(replay, repeats, cold)


def measured(row: Row, options: Any, device: str) -> dict[str, Any]:
    """Compare and time a row; without times if its results are wrong."""
    call = call_of(row, options, device)
    q, _, keys, *_ = call
    attend = kernels.attend_by(kernels.chosen("auto", q)[0])
    found: dict[str, Any] = {"row": row.name, "error": error(attend, call)}
    if not found["error"] <= MOST_ERROR:
        return found | {"failed": f"{row.name} is WRONG: its error may be {MOST_ERROR}"}
    read = torch.cat([keys.k.flatten(), keys.v.flatten()])
    add = partial(torch.sum, read, dtype=torch.float32)
    top = partial(torch.amax, read.view(torch.float32))
    turns = [
        (
            min(timed(x, options.repeats) for x in (add, top)),
            timed(partial(attend, *call), options.repeats),
        )
        for _ in range(options.turns)
    ]
    ratios = [plain / ours for plain, ours in turns]
    found |= {"bytes": read.nbytes, "turns_ms": turns, "ratios": ratios}
    return found | {"ratio": statistics.median(ratios)}


def body(options: Any) -> int:
    """Compare, measure, print, and write the figures; return how many rows were wrong."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {name: x for name, x in vars(options).items() if isinstance(x, int)}
    report = Report(options.json, partial(described, **sizes), keep=True)
    for row in ROWS:
        if not report.has(row=row.name):
            report.add(measured(row, options, device))
    return sum("failed" in row for row in report.rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Time each row; return the exit code."""
    sizes = {"--tokens": 131072, "--heads": 32, "--kv-heads": 8, "--width": 128}
    counts = {"--repeats": 30, "--turns": 3}
    arguments = {name: {"type": int, "default": x} for name, x in (sizes | counts).items()}
    return command(__doc__, arguments, body, argv)


if __name__ == "__main__":
    sys.exit(main())
