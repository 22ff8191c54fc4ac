"""Time attention over one rank's pages of a K/V cache: decode beside a plain read, and prefill.

    python -m benchmarks.torch.decode --json decode.json
    python -m benchmarks.torch.decode --tokens 4096 --heads 4 --kv-heads 2 --width 16  # on a CPU

The rank holds ``--tokens`` tokens on scattered pages. What a decode step does there is captured in
a CUDA graph and timed beside a sum and a maximum over the same bytes, in turns: the ratio is the
plain read's time, of the faster of the two, over the kernel's. On a CPU nothing is captured. Then a
whole step, write and decode, over its kernel, and its host time; and ``cp.prefill`` of new tokens
behind the others beside causal attention of flash-attn-4 to keys without pages, where there is it.

Results are compared with float64 first; where they are wrong nothing is timed.
"""

from __future__ import annotations

import statistics
import sys
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common.report import Report, command
from benchmarks.torch.methods import described
from benchmarks.torch.timing import median_ms
from ring_core import Mask
from ring_torch import ContextParallel, KVCache
from ring_torch.kernels.fa4 import FA4
from ring_torch.serving import kernels, paged
from ring_torch.serving.cache import state_of
from ring_torch.serving.paged import PagedKeys, Rules
from ring_torch.serving.state import positions_of

#: Most that results may be off, relative to their norm: rounding to 16 bits.
MOST_ERROR = 0.01
PREFILLS = (512, 1024, 2048, 8192)  # new tokens
_SAMPLED = 16  # queries of a prefill that are compared
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
    attend = kernels.attend_by(kernels.chosen("auto", "decode", q, q.shape[3], call[4])[0])
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


def filled(
    options: Any, device: str, new: int, *, is_row: bool
) -> tuple[ContextParallel, KVCache, int, tuple[Tensor, ...]]:
    """Return a cache whose first request is full but for ``new`` tokens, and q, k, v of these.

    Its pages lie in a row, or alternate with another request's.
    """
    torch.manual_seed(0)
    cp = ContextParallel()
    sizes = options.kv_heads, options.width
    cache = KVCache(
        cp, num_layers=1, num_kv_heads=sizes[0], head_dim=sizes[1], max_requests=2,
        max_tokens=2 * options.tokens + 256, dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    first, second = cache.add(2)
    left = options.tokens - new
    while left:
        step = left if is_row else min(left, cache.page_size)
        for request in (first,) if is_row else (first, second):
            cache.extend([request], step)
            kv = torch.randn(2, 1, step, *sizes, device=device).to(torch.bfloat16)
            cache.write(kv[0], kv[1], layer=0)
        left -= step
    cache.extend([first], new)
    heads = options.heads + 2 * options.kv_heads
    qkv = torch.randn(1, new, heads, options.width, device=device).to(torch.bfloat16)
    q, k, v = qkv.split([options.heads, *[options.kv_heads] * 2], dim=2)
    return cp, cache, first, (q.contiguous(), k.contiguous(), v.contiguous())


def several(run: Callable[[], object], repeats: int) -> float:
    """Return the median of a run's milliseconds, one run behind the other."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def five(run: Callable[[], object]) -> float:
        start.record()
        for _ in range(5):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 5

    return median_ms(run, repeats, five)


def measured_prefill(new: int, options: Any, device: str, *, is_row: bool) -> dict[str, Any]:
    """Compare and time a prefill beside flash-attn-4; without times if it is wrong."""
    cp, cache, request, (q, k, v) = filled(options, device, new, is_row=is_row)
    run = partial(cp.prefill, q, k, v, cache, layer=0, request=request)
    state = state_of(cache)
    keys, _ = state.keys_of(0, (request,), 1, is_last=False)
    rules = Rules(Mask(causal=True), options.width**-0.5, None, None)
    rows = torch.arange(0, new, max(1, new // _SAMPLED), device=device)
    columns = range(len(state.page_numbers(request)))
    out = run()[:, rows].double()
    wide = keys._replace(k=keys.k.double(), v=keys.v.double())
    positions = (rows + options.tokens - new)[None]
    exact, _ = paged.attend(q[:, rows].double(), positions, wide, columns, rules)
    name = f"prefill of {new}, {'in a row' if is_row else 'scattered'}"
    found: dict[str, Any] = {"row": name, "error": float((out - exact).norm() / exact.norm())}
    if not found["error"] <= MOST_ERROR:
        return found | {"failed": f"{name} is WRONG: its error may be {MOST_ERROR}"}
    found["kernel"] = kernels.chosen("auto", "prefill", q, options.width, rules)[0]
    del wide, exact
    if not q.is_cuda or FA4.unavailable_reason() is not None:
        return found | {"ms": several(run, options.repeats)}
    from flash_attn.cute import flash_attn_func

    whole = [x[keys.table[0, : len(columns)].long()].flatten(0, 1)[None, : options.tokens] for x in keys[:2]]  # fmt: skip
    rival = partial(flash_attn_func, q, *whole, causal=True)
    turns = [
        (several(rival, options.repeats // 3), several(run, options.repeats // 3))
        for _ in range(options.turns)
    ]
    ratios = [fa4 / ours for fa4, ours in turns]
    return found | {"turns_ms": turns, "ratios": ratios, "ratio": statistics.median(ratios)}


def measured_step(options: Any, device: str) -> dict[str, Any]:
    """Time a whole step of a layer over its kernel, and its host time."""
    cp, cache, request, (q, k, v) = filled(options, device, 1, is_row=False)
    state = state_of(cache)
    rules = Rules(Mask(causal=True), options.width**-0.5, None, None)
    attend = kernels.attend_by(kernels.chosen("auto", "decode", q, options.width, rules)[0])
    keys, ends = state.keys_of(0, (request,), 1, is_last=True)
    positions = positions_of(ends, 1)
    columns = range(keys.table.shape[1])

    def step() -> None:
        cache.write(k, v, layer=0)
        cp.decode(q, cache, layer=0)

    host = 1e6 * statistics.median(timeit.repeat(step, number=1, repeat=options.repeats))
    turns = [
        tuple(timed(x, options.repeats) for x in (step, partial(attend, q, positions, keys, columns, rules)))
        for _ in range(options.turns)
    ]  # fmt: skip
    rest = statistics.median(1e3 * (whole - kernel) for whole, kernel in turns)
    return {"row": "a step", "turns_ms": turns, "rest_us": rest, "host_us": host}


def body(options: Any) -> int:
    """Compare, measure, print, and write the figures; return how many rows were wrong."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {name: x for name, x in vars(options).items() if isinstance(x, int)}
    report = Report(options.json, partial(described, **sizes), keep=True)
    for row in ROWS:
        if not report.has(row=row.name):
            report.add(measured(row, options, device))
    report.add(measured_step(options, device))
    for new in (x for x in PREFILLS if x < options.tokens):
        for is_row in (True, False):
            report.add(measured_prefill(new, options, device, is_row=is_row))
    return sum("failed" in row for row in report.rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Time each row; return the exit code."""
    sizes = {"--tokens": 131072, "--heads": 32, "--kv-heads": 8, "--width": 128}
    counts = {"--repeats": 30, "--turns": 3}
    arguments = {name: {"type": int, "default": x} for name, x in (sizes | counts).items()}
    return command(__doc__, arguments, body, argv)


if __name__ == "__main__":
    sys.exit(main())
