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
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common.report import environment, parser_of, write
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
    positions = torch.tensor(lengths, device="cpu")[:, None] + torch.arange(
        -row.new, 0, device="cpu"
    )
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
    for _ in range(2):
        run()
    if not torch.cuda.is_available():
        marks = [time.perf_counter()]
        for _ in range(repeats):
            run()
            marks.append(time.perf_counter())
        return 1e3 * statistics.median(b - a for a, b in pairwise(marks))
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        run()
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(repeats):
        flushed.zero_()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times))


def measured(row: Row, options: Any, device: str) -> dict[str, Any] | None:
    """Compare and time a row; ``None`` if its results are wrong."""
    call = call_of(row, options, device)
    q, _, keys, *_ = call
    attend = kernels.attend_by(kernels.chosen("auto", q)[0])
    if not (off := error(attend, call)) <= MOST_ERROR:
        print(f"{row.name} is WRONG: its error is {off:.2e}, and may be {MOST_ERROR}")
        return None
    read = torch.cat([keys.k.flatten(), keys.v.flatten()])
    plain = (
        partial(torch.sum, read, dtype=torch.float32),
        partial(torch.amax, read.view(torch.float32)),
    )
    turns = [
        (min(timed(x, options.repeats) for x in plain), timed(lambda: attend(*call), options.repeats))
        for _ in range(options.turns)
    ]  # fmt: skip
    ratios = [a / b for a, b in turns]
    print(
        f"{row.name:>15}: {turns[-1][1]:.4f} ms, a plain read of {read.nbytes / 1e6:.0f} MB {turns[-1][0]:.4f} ms; "
        f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); error {off:.1e}"
    )
    return {
        "row": row.name,
        "error": off,
        "bytes": read.nbytes,
        "turns_ms": turns,
        "ratios": ratios,
    }


def main() -> int:
    """Compare, measure, print, and write the figures; return how many rows were wrong."""
    parser = parser_of(__doc__, tables=False)
    parser.add_argument("--tokens", type=int, default=131072, help="cached on the rank")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128, help="numbers of a key and a value")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [measured(row, options, device) for row in ROWS]
    if options.json is not None:
        gpu = torch.cuda.get_device_name() if device == "cuda" else "none"
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        facts = environment(gpu, "torch", "triton")
        write(options.json, {"environment": facts, "settings": settings, "rows": [x for x in rows if x]})  # fmt: skip
    return rows.count(None)


if __name__ == "__main__":
    sys.exit(main())
