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
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.common.harness import Report, command
from benchmarks.torch import described
from benchmarks.torch.timing import Run, captured, event_ms, median_ms
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
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Row(NamedTuple):
    """Row of decode steps."""

    name: str
    shares: Sequence[float]  # tokens of each request, as parts of all of them
    new: int = 1  # tokens of each
    page_size: int = 128


ROWS = (
    *(Row(f"{n} new", (1.0,), n) for n in (1, 2, 4, 8)),
    Row("unlike lengths", (0.5, 0.25, 0.125, 0.0625, 0.0625)),
    Row("pages of 16", (1.0,), page_size=16),
)


class Call(NamedTuple):
    """Arguments of a kernel: queries, their positions, pages of keys, columns of their table."""

    q: Tensor
    positions: Tensor
    keys: PagedKeys
    columns: range
    rules: Rules

    def kernel(self, step: str) -> str:
        """Return the name of the kernel that a decode step or a prefill takes."""
        return kernels.chosen("auto", step, self.q, self.q.shape[3], self.rules)[0]

    def compared(self, name: str, out: Tensor) -> dict[str, Any]:
        """Return a row with how far an output is from float64, and that it is wrong if it is."""
        wide = self.keys._replace(k=self.keys.k.double(), v=self.keys.v.double())
        exact, _ = paged.attend(self.q.double(), self.positions, wide, *self[3:])
        error = float((out.double() - exact).norm() / exact.norm())
        wrong = {"failed": f"{name} is WRONG: its error may be {MOST_ERROR}"}
        return {"row": name, "error": error} | ({} if error <= MOST_ERROR else wrong)


def random(*shape: int) -> Tensor:
    """Return random numbers in bfloat16."""
    return torch.randn(shape, device=DEVICE).to(torch.bfloat16)


def call_of(row: Row, options: Any) -> Call:
    """Return a call with queries at the ends of requests, on scattered pages."""
    torch.manual_seed(0)
    lengths = [int(options.tokens * share) for share in row.shares]
    pages = [-(-length // row.page_size) for length in lengths]
    order = torch.randperm(sum(pages), dtype=torch.int32, device="cpu").to(DEVICE)
    table = pad_sequence(order.split(pages), batch_first=True)
    k, v = (random(sum(pages), row.page_size, options.kv_heads, options.width) for _ in range(2))
    q = random(len(lengths), row.new, options.heads, options.width)
    positions = positions_of(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), row.new)
    keys = PagedKeys(k, v, table, 0, 1)
    return Call(q, positions, keys, range(max(pages)), rules_of(options))


def rules_of(options: Any) -> Rules:
    """Return the rules of causal attention."""
    return Rules(Mask(causal=True), options.width**-0.5, None, None)


def beside(
    others: Sequence[Run], ours: Run, turns: int, ms: Callable[[Run], float]
) -> dict[str, Any]:
    """Time ours and others in turns; return milliseconds and ratios of the fastest other's."""
    taken = [(min(map(ms, others)), ms(ours)) for _ in range(turns)]
    ratios = [other / own for other, own in taken]
    return {"turns_ms": taken, "ratios": ratios, "ratio": statistics.median(ratios)}


def timed(run: Run, repeats: int) -> float:
    """Return the median of a run's milliseconds: on a GPU of its graph, with cold caches."""
    if not torch.cuda.is_available():
        return median_ms(run, repeats)
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")

    def cold(run: Run) -> float:
        flushed.zero_()
        return event_ms(run)

    return median_ms(captured(run), repeats, cold)


def measured(row: Row, options: Any) -> dict[str, Any]:
    """Compare and time a row; without times if its results are wrong."""
    call = call_of(row, options)
    attend = partial(kernels.attend_by(call.kernel("decode")), *call)
    result = call.compared(row.name, attend()[0])
    if "failed" in result:
        return result
    read = torch.cat([call.keys.k.flatten(), call.keys.v.flatten()])
    add = partial(torch.sum, read, dtype=torch.float32)
    top = partial(torch.amax, read.view(torch.float32))
    ms = partial(timed, repeats=options.repeats)
    return result | {"bytes": read.nbytes} | beside((add, top), attend, options.turns, ms)


def filled(options: Any, new: int) -> tuple[ContextParallel, KVCache, int, list[Tensor]]:
    """Return a cache whose first request is full but for ``new`` tokens, and q, k, v of these.

    Its pages alternate with another request's.
    """
    torch.manual_seed(0)
    cp = ContextParallel()
    sizes = options.kv_heads, options.width
    cache = KVCache(
        cp, num_layers=1, num_kv_heads=sizes[0], head_dim=sizes[1], max_requests=2,
        max_tokens=2 * options.tokens + 256, dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    first, second = cache.add(2)
    left = options.tokens - new
    while left:
        step = min(left, cache.page_size)
        for request in (first, second):
            cache.extend([request], step)
            cache.write(random(1, step, *sizes), random(1, step, *sizes), layer=0)
        left -= step
    cache.extend([first], new)
    heads = options.heads, options.kv_heads, options.kv_heads
    return cp, cache, first, [random(1, new, x, options.width) for x in heads]


def measured_prefill(new: int, options: Any) -> dict[str, Any]:
    """Compare and time a prefill beside flash-attn-4; without times if it is wrong."""
    cp, cache, request, (q, k, v) = filled(options, new)
    run = partial(cp.prefill, q, k, v, cache, layer=0, request=request)
    state = state_of(cache)
    keys, _ = state.keys_of(0, (request,), 1, is_last=False)
    rows = torch.arange(0, new, max(1, new // _SAMPLED), device=DEVICE)
    columns = range(len(state.page_numbers(request)))
    positions = (rows + options.tokens - new)[None]
    call = Call(q[:, rows], positions, keys, columns, rules_of(options))
    result = call.compared(f"prefill of {new}", run()[:, rows])
    if "failed" in result:
        return result
    result["kernel"] = call._replace(q=q).kernel("prefill")
    # Queued, as layers of a model are: the host runs ahead.
    queued = partial(event_ms, calls=20)
    if not q.is_cuda or FA4.unavailable_reason() is not None:
        return result | {"ms": median_ms(run, options.repeats, queued)}
    from flash_attn.cute import flash_attn_func

    table = keys.table[0, : len(columns)].long()
    whole = [x[table].flatten(0, 1)[None, : options.tokens] for x in keys[:2]]
    rival = partial(flash_attn_func, q, *whole, causal=True)
    ms = partial(median_ms, repeats=options.repeats // 3, on_gpu=queued)
    return result | beside([rival], run, options.turns, ms)


def measured_step(options: Any) -> dict[str, Any]:
    """Time a whole step of a layer over its kernel, and its host time."""
    cp, cache, request, (q, k, v) = filled(options, 1)
    keys, ends = state_of(cache).keys_of(0, (request,), 1, is_last=True)
    columns = range(keys.table.shape[1])
    call = Call(q, positions_of(ends, 1), keys, columns, rules_of(options))
    attend = partial(kernels.attend_by(call.kernel("decode")), *call)

    def step() -> None:
        cache.write(k, v, layer=0)
        cp.decode(q, cache, layer=0)

    host = 1e6 * statistics.median(timeit.repeat(step, number=1, repeat=options.repeats))
    ms = partial(timed, repeats=options.repeats)
    turns = beside([step], attend, options.turns, ms)["turns_ms"]
    rest = statistics.median(1e3 * (whole - kernel) for whole, kernel in turns)
    return {"row": "a step", "turns_ms": turns, "rest_us": rest, "host_us": host}


@command(
    __doc__,
    {
        "--tokens": 131072, "--heads": 32, "--kv-heads": 8, "--width": 128, "--repeats": 30, "--turns": 3,
    },
)  # fmt: skip
def main(options: Any) -> int:
    """Compare, measure, print, and write the figures; return how many rows were wrong."""
    report = Report(options, described(), keep=True)
    for row in ROWS:
        if not report.has(row=row.name):
            report.add(measured(row, options))
    report.add(measured_step(options))
    for new in (x for x in PREFILLS if x < options.tokens):
        report.add(measured_prefill(new, options))
    return report.failed
