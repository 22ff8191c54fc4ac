"""Launches: bound by the first of equal calls; one on one rank; of a gather in two stages.

A call like an earlier one runs launches that were bound before, and gives the bits of the first.
Calls are alike in all but their tensors' numbers and memory; strides, alignments, threads and
captured graphs are not. Each kind of launch that is bound is tried in each strategy, in float64.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import patched
import pytest
import torch
from dense import dense
from on_ranks import on_ranks, on_three_ranks
from plain_flash import Returning, Writing, flash_of
from tiled import KEYS, TiledKernel
from torch import Tensor
from views import VIEWS, spread

from ring_core import Layout, StrategyConfig
from ring_core.programs import gather_work
from ring_torch import ContextParallel, accumulate, memory_ops, prepare, ring_attention
from ring_torch.accumulate import Accumulator
from ring_torch.comm.handshake import HEADER_BYTES
from ring_torch.comm.ranks import Ranks
from ring_torch.compat import zigzag_ring_flash_attn_func
from ring_torch.kernels import fa4, flash
from ring_torch.kernels.api import Kernel
from ring_torch.kernels.eager import EagerKernel
from ring_torch.kernels.sdpa import CpuFlashKernel
from ring_torch.launches import cache
from ring_torch.strategies import gather
from ring_torch.strategies.ring import Ring
from ring_torch.transports.api import add_staged

TOKENS, HEADS, DIM = 48, (4, 2, 2), 8
View = Callable[[Tensor], Tensor]
Results = list[Tensor]


#: Views of q, k, v and dout that are calls of one kind each.
KINDS: dict[str, View] = {
    "plain": torch.clone, "heads first": VIEWS["heads_first"], "spread": spread,
    "offset": VIEWS["offset"], "strided": VIEWS["strided"],
}  # fmt: skip
#: Kinds whose tensors are copied before each launch: these are not bound.
COPIED = ("offset", "strided")
KERNELS: dict[str, Callable[[], Kernel]] = {
    "writes": lambda: flash_of(Writing(), "any"),
    "returns": lambda: flash_of(Returning(), "any"),
    "eager": EagerKernel,
    "split": lambda: TiledKernel([]),
    "writes, causal": lambda: flash_of(Writing(), "causal"),
    "returns, causal": lambda: flash_of(Returning(), "causal"),
    "sdpa": CpuFlashKernel,
}
#: Number of ranks, and options.
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "gather": (2, {"strategy": "gather", "transport": "p2p", "layout": "zigzag"}),
    "two stages": (3, {"strategy": "gather", "transport": "p2p", "layout": "zigzag"}),
    "ring": (2, {"strategy": "ring", "layout": "zigzag"}),
    "balanced": (3, {"strategy": "balanced"}),
    "ulysses": (2, {"strategy": "ulysses", "layout": "striped"}),
}
#: Further options of calls; K/V of those that are fetched again are not saved.
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"return_lse": True},
    "sinks": {"sinks": torch.linspace(-1.0, 1.0, HEADS[0])},
    "padded": {"seq_len": TOKENS - 1},
    "fetched again": {},
}
WAYS = {
    f"{kernel}-{strategy}-{dtype}": (kernel, strategy, dtype)
    for kernel in KERNELS
    for strategy in STRATEGIES
    for dtype in (torch.float64, torch.bfloat16)
    if (strategy == "two stages") == (kernel.endswith("causal")) or kernel == "sdpa"
    if strategy == "gather" or kernel != "split"
    if (kernel, strategy) != ("sdpa", "gather")
    if strategy not in ("balanced", "ulysses") or not kernel.startswith(("eager", "sdpa"))
    if dtype == torch.float64
    or (kernel.startswith("writes") and strategy in ("gather", "two stages", "ring"))
}


def chosen(kernel: Kernel, *, saves: bool = True) -> AbstractContextManager[None]:
    """Let calls take a kernel of small tiles, with or without room to save K/V."""
    return patched.chosen(
        kernel,
        patch.object(gather, "MAX_SAVED_BYTES", (1 << 20) * saves),
        patch.object(fa4, "KEYS", KEYS),
        patch.object(gather_work, "TILE", KEYS),
    )


def events_of(kernel: Any) -> list[str]:
    """Return the events of a kernel's library; none for other kernels."""
    return getattr(getattr(kernel, "flash", None), "events", [])


class Numbers:
    """Inputs of calls, drawn alike on all ranks, of which this rank has a shard."""

    def __init__(self, rank: int, size: int, options: dict[str, Any], dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.whole = [
            torch.randn(2, TOKENS, heads, DIM, generator=generator, dtype=torch.float64).to(dtype)
            for heads in (*HEADS, HEADS[0])
        ]
        layout = Layout(options.get("layout", "contiguous"), TOKENS, size)
        self.positions, self.options = torch.as_tensor(layout.positions(rank)), options
        self.expected = dense(*(x.double() for x in self.whole))

    def call(self, view: View, unpack: View | None = None, **more: Any) -> Results:
        """Make a causal call on new views; return ``out``, ``lse`` if asked, and gradients.

        With ``unpack`` a hook on saved tensors restores them by it.
        """
        *qkv, dout = (view(x[:, self.positions]) for x in self.whole)
        q, k, v = qkv = [x.detach().requires_grad_() for x in qkv]
        hooks = torch.autograd.graph.saved_tensors_hooks
        with nullcontext() if unpack is None else hooks(torch.clone, unpack):
            result: Any = ring_attention(q, k, v, causal=True, **self.options, **more)
        out, *lse = result if isinstance(result, tuple) else (result,)
        return [x.detach() for x in (out, *lse)] + [*torch.autograd.grad(out, qkv, dout)]

    def check(self, results: Results) -> None:
        """Compare a plain call's results with dense attention."""
        tolerance = 2e-2 if results[0].dtype == torch.bfloat16 else 1e-6
        for x, y in zip(results, self.expected, strict=True):
            torch.testing.assert_close(
                x.double(), y[:, self.positions], rtol=tolerance, atol=tolerance
            )


def assert_same(first: Results, again: Results) -> None:
    """Check that the results of two calls are equal to the bit, and no memory is both's."""
    for x, y in zip(first, again, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
        assert x.data_ptr() != y.data_ptr()


def _repeats(rank: int, kernel_name: str, strategy: str, dtype: torch.dtype) -> None:
    size, options = STRATEGIES[strategy]
    numbers = Numbers(rank, size, options, dtype)
    for name, more in CALLS.items():
        # One rank has nothing to pad; in bfloat16 these are rounded at no other places.
        if (name == "padded" and strategy == "single") or (
            name in ("lse", "padded") and dtype != torch.float64
        ):
            continue
        kernel = KERNELS[kernel_name]()
        events, firsts = events_of(kernel), dict[str, Results]()
        captured = kernel_name.startswith("writes") and name == "plain"
        # Kinds in turn, then each once more: what one has bound must not serve another. Options
        # change nothing about a kind, but that what is copied is not bound.
        kinds = [*KINDS] if name == "plain" else ["plain", "offset"]
        with chosen(kernel, saves=name != "fetched again"):
            if captured:
                check_captured(numbers, events, None)
            for kind in [*[x for x in kinds for _ in range(2)], *kinds]:
                events.clear()
                results = numbers.call(KINDS[kind], **more)
                if is_repeat := firsts.setdefault(kind, results) is not results:
                    assert_same(firsts[kind], results)
                elif name in ("plain", "fetched again"):
                    numbers.check(results)
                if kernel_name.startswith("writes") and kind not in COPIED:
                    check_events(events, is_repeat=is_repeat)
            if captured:
                check_captured(numbers, events, firsts["plain"])
            # What was saved may be restored at addresses of another alignment, where torch's own
            # operations may add in another order.
            for unpack in (VIEWS["offset"], torch.clone):
                results = numbers.call(torch.clone, unpack, **more)
                for x, y in zip(firsts["plain"], results, strict=True):
                    torch.testing.assert_close(x, y)
                if "writes" in kernel_name or "returns" in kernel_name:
                    assert_same(firsts["plain"], results)


def check_captured(numbers: Numbers, events: list[str], first: Results | None) -> None:
    """Check that a call in a captured graph binds nothing, as its memory is the graph's."""
    events.clear()
    with patch.object(flash, "is_capturing", lambda: True):
        results = numbers.call(torch.clone)
    numbers.check(results)
    if first is None:
        assert {*events} == {"forward", "backward"}
    else:  # it uses what was bound before
        assert_same(first, results)
        check_events(events, is_repeat=True)


def check_events(events: list[str], *, is_repeat: bool) -> None:
    """Check that a first call asks the library and binds what it does, and a later one does not."""
    for name in ("forward", "backward"):
        asked, bound, repeated = (events.count(x + name) for x in ("", "bind ", "repeat "))
        assert asked == bound, events
        assert bool(repeated) if is_repeat else bool(asked + repeated), events
        assert not (is_repeat and asked), events


@pytest.mark.parametrize("name", WAYS)
def test_calls_repeat_the_first(name: str, backend: Any) -> None:
    backend.pool(STRATEGIES[WAYS[name][1]][0]).run(_repeats, *WAYS[name])


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_launch_that_raises_stays_unbound(name: str) -> None:
    kernel, numbers = flash_of(Writing(), "any"), Numbers(0, 1, {}, torch.float64)
    events = events_of(kernel)
    with chosen(kernel):
        for method in (name, f"repeated_{name}"):
            prepare._prepare.cache_clear()
            with (
                patch.object(Writing, method, side_effect=MemoryError),
                pytest.raises(MemoryError),
            ):
                numbers.call(torch.clone)
            events.clear()
            first = numbers.call(torch.clone)
            assert (events.count(name), events.count(f"bind {name}")) == (1, 1)
            numbers.check(first)
            events.clear()
            assert_same(first, numbers.call(torch.clone))
            assert events == ["repeat forward", "repeat backward"]


def test_two_threads_bind_at_once() -> None:
    """Two threads that are the first to make a call both bind its launches, at the same time."""
    kernel, numbers = flash_of(Writing(), "any"), Numbers(0, 1, {}, torch.float64)
    barrier = threading.Barrier(2, timeout=30)

    def waiting(method: Callable[..., Any]) -> Callable[..., Any]:
        def bind(*args: Any) -> Any:
            barrier.wait()
            launch = method(*args)
            barrier.wait()
            return launch

        return bind

    with chosen(kernel):
        numbers.call(spread)  # prepares the call, so that both threads have the same launches
        with (
            patch.object(Writing, "repeated_forward", waiting(Writing.repeated_forward)),
            patch.object(Writing, "repeated_backward", waiting(Writing.repeated_backward)),
            ThreadPoolExecutor(2) as pool,
        ):
            first, other = pool.map(numbers.call, [torch.clone] * 2)
        events_of(kernel).clear()
        again = numbers.call(torch.clone)
        assert events_of(kernel) == ["repeat forward", "repeat backward"]
    numbers.check(first)
    assert_same(first, other)
    assert_same(first, again)


def test_a_full_cache_loses_its_oldest() -> None:
    kernel, numbers = flash_of(Writing(), "any"), Numbers(0, 1, {}, torch.float64)
    events, firsts = events_of(kernel), dict[str, Results]()
    with chosen(kernel), patch.object(cache, "_MOST", 2):
        for kind, binds in (
            ("plain", True), ("heads first", True), ("plain", False), ("spread", True),
            ("heads first", False), ("plain", True), ("spread", False), ("heads first", True),
        ):  # fmt: skip
            events.clear()
            results = numbers.call(KINDS[kind])
            if firsts.setdefault(kind, results) is not results:
                assert_same(firsts[kind], results)
            assert ("bind forward" in events, "repeat forward" in events) == (binds, not binds)


PAGE = Path(__file__).parents[2] / "docs" / "layouts-and-strategies.md"
#: The most function calls and source files of a pass in any strategy.
GOAL = 120, 14


class Limit(NamedTuple):
    """The most calls and files of a repeated forward and of its backward; the row of the page."""

    forward: tuple[int, int]
    backward: tuple[int, int]
    row: str = ""


HYBRID = "hybrid, two groups, a {} between them"
#: By the number of ranks, strategy and layout.
LIMITS: dict[tuple[int, str | StrategyConfig, str], Limit] = {
    (1, "ring", "zigzag"): Limit((28, 10), (35, 11)),
    (4, "ring", "zigzag"): Limit((80, 12), (103, 11), "`ring`"),
    (4, "gather", "zigzag"): Limit((68, 13), (105, 13), "`gather`"),
    (4, "balanced", "contiguous"): Limit((101, 13), (114, 12), "`balanced`, `contiguous`"),
    (4, "ulysses", "zigzag"): Limit((63, 13), (72, 13), "`ulysses`"),
    (4, StrategyConfig("hybrid", ulysses_size=2), "zigzag"):
        Limit((85, 14), (89, 13), HYBRID.format("ring")),
    (4, StrategyConfig("hybrid", ulysses_size=2, outer="gather"), "zigzag"):
        Limit((94, 14), (104, 14), HYBRID.format("gather")),
}  # fmt: skip


def counted(_: int, strategy: str | StrategyConfig, layout: Any) -> list[tuple[int, ...]]:
    """Return counts of one more forward like those before, and of its backward.

    They are of function calls, of files, of messages without headers, and of all-to-alls.
    """
    q, k, v = (torch.randn(1, 96, heads, 16).requires_grad_() for heads in (4, 2, 2))
    files, counts = Counter[str](), list[tuple[int, ...]]()
    start, all_to_all = Ranks.start, Ranks._all_to_all

    def count(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "/ring_" in name:
            files[name] += 1

    def watched(run: Callable[[], Any]) -> Any:
        files.clear()
        started.reset_mock()
        traded.reset_mock()
        gc.disable()
        sys.setprofile(count)
        result = run()
        sys.setprofile(None)
        gc.enable()
        sent = [x.nbytes for call in started.call_args_list for x, _ in call.args[1]]
        messages = len(sent) - sent.count(HEADER_BYTES)
        counts.append((files.total(), len(files), messages, traded.call_count))
        return result

    def forward() -> Tensor:
        return ring_attention(q, k, v, causal=True, layout=layout, strategy=strategy)

    for _turn in range(3):
        forward().sum().backward()
    with (
        patch.object(Ranks, "start", autospec=True, side_effect=start) as started,
        patch.object(Ranks, "_all_to_all", autospec=True, side_effect=all_to_all) as traded,
    ):
        out = watched(forward)
        watched(lambda: out.sum().backward())
    return counts


def _span(numbers: Iterable[int]) -> str:
    return " to ".join(map(str, sorted({min(found := [*numbers]), max(found)})))


@pytest.mark.parametrize("key", LIMITS, ids=str)
def test_a_repeated_call(key: tuple[Any, ...], backend: Any) -> None:
    """It makes no more calls than it did, and sends the messages of the page."""
    limit, ranks = LIMITS[key], backend.pool(key[0]).run(counted, *key[1:])
    for most, counts in zip(limit[:2], zip(*ranks, strict=True), strict=True):
        assert all(x <= y for x, y in zip(most, GOAL, strict=True))
        for calls, files, *_ in counts:
            assert calls <= most[0] and files <= most[1], counts
    if limit.row:
        forward, backward = (_span(counts[n][2] for counts in ranks) for n in range(2))
        (exchanges,) = {x[3] for counts in ranks for x in counts}
        row = f"| {limit.row} | {forward} | {backward} | {exchanges} |"
        assert row in PAGE.read_text().splitlines(), row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_one_launch_each_way(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is summed or copied, sums are contiguous, and launches get no leaves."""
    launched: list[tuple[str, Any]] = []

    def spy_on(name: str) -> Any:
        method = getattr(EagerKernel, name)

        def spy(kernel: Any, item: Any, params: Any, rows: Any, columns: Any, *rest: Any) -> Any:
            launched.append((name, rest))
            assert not any(x.requires_grad for x in (rows.q, columns.k, columns.v))
            return method(kernel, item, params, rows, columns, *rest)

        return spy

    for owner, name in (
        (Ring, "forward"), (Ring, "backward"), (accumulate, "merge"), (accumulate, "Columns"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, None)
    q, k, v = (
        VIEWS["permuted"](torch.randn(1, TOKENS, 2, DIM, dtype=dtype)).requires_grad_() for _ in "qkv"
    )  # fmt: skip
    bias = torch.randn(1, 2, TOKENS, TOKENS, dtype=dtype, requires_grad=True)
    with patched.replaced(
        EagerKernel, **{name: spy_on(name) for name in ("attend", "differentiate")}
    ):
        out = ring_attention(q, k, v, causal=True, bias=bias, kernel="eager")
        grads = torch.autograd.grad(out, (q, bias), torch.ones_like(out))
    (first, _), (second, (*_, row_grads, column_grads)) = launched
    assert all(x.is_contiguous() for x in (*row_grads, *column_grads))
    assert (first, second) == ("attend", "differentiate")
    if dtype == torch.float64:
        assert [x.data_ptr() for x in row_grads] == [x.data_ptr() for x in grads]


def test_an_lse_that_is_not_asked_for_may_be_anything() -> None:
    """``lse`` is asked for only where a caller or the backward gets it, else it is not read."""
    attend, asked = EagerKernel.attend, list[bool]()

    def careless(self: EagerKernel, item: Any, params: Any, *args: Any) -> Any:
        result = attend(self, item, params, *args)
        asked.append(params.needs_lse)
        return result if params.needs_lse else result._replace(lse=result.lse.fill_(torch.nan))

    x = torch.randn(1, TOKENS, 2, DIM, dtype=torch.bfloat16)
    call: Any = ring_attention
    with patched.replaced(EagerKernel, attend=careless):
        out, lse = call(x, x, x, causal=True, kernel="eager", return_lse=True)
        assert torch.equal(call(x, x, x, causal=True, kernel="eager"), out)
        theirs, their_lse, _ = zigzag_ring_flash_attn_func(
            x, x, x, causal=True, return_attn_probs=True
        )
        assert torch.equal(theirs, out) and torch.equal(their_lse, lse)
        assert asked == [True, False, True]
        with_grad = x.clone().requires_grad_()
        call(with_grad, x, x, causal=True, kernel="eager").sum().backward()
    assert asked[3] and with_grad.grad is not None and not with_grad.grad.isnan().any()


KERNEL = flash_of(Returning(), "causal")
OPTIONS: dict[str, Any] = {"causal": True, "strategy": "gather", "transport": "p2p"}


def _qkv(dtype: torch.dtype = torch.float32) -> Results:
    return [torch.randn(1, 32, n, DIM).to(dtype).requires_grad_() for n in HEADS]


@on_ranks
def test_sinks_and_lse() -> None:
    """A forward with sinks is rounded once, and calls with lse save no keys."""
    qkv = q, k, v = _qkv(torch.bfloat16)
    with chosen(KERNEL), patch.object(gather, "Accumulator", wraps=Accumulator) as made:
        for sinks in (None, torch.zeros(HEADS[0])):
            ring_attention(q, k, v, sinks=sinks, **OPTIONS)
        dtypes = [call.args[0].dtype for call in made.call_args_list]
        assert dtypes == [torch.bfloat16, torch.float32]
        for _ in range(2):
            out, lse = ring_attention(q, k, v, return_lse=True, **OPTIONS)
            assert len(out.grad_fn.saved_tensors) == 10  # inputs, given or not, out and lse
    out, lse = ring_attention(q, k, v, return_lse=True, **OPTIONS)
    torch.autograd.grad(out.sum() + lse.sum(), qkv)
    prepare._prepare.cache_clear()


@on_ranks
def test_results_may_be_changed_in_place() -> None:
    """Results of a repeated call, like those of the first."""
    q, k, v = _qkv()
    bias = torch.ones(DIM, requires_grad=True)
    with chosen(KERNEL):
        for grad in (True, False):
            for _ in range(2):
                with torch.set_grad_enabled(grad):
                    out, lse = ring_attention(q, k, v, return_lse=True, **OPTIONS)
                out += bias
                lse += 1


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@on_three_ranks
def test_rows_whose_scores_are_not_finite(rank: int, layout: Any) -> None:
    """Rows with NaN or infinite scores are NaN in every call, whatever the kernel leaves there."""
    cp = ContextParallel(layout=layout)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2 * TOKENS, n, DIM, generator=generator) for n in HEADS]
    whole[0][0, 1, :, 0] = torch.inf
    whole[1][0, :2, :, 0] = -1.0  # all scores of row 1 are -inf, and its lse with them
    shards = [cp.shard(x) for x in whole]
    with chosen(KERNEL):
        first, *repeats = [
            ring_attention(*shards, return_lse=True, layout=layout, **OPTIONS) for _ in range(3)
        ]
    for repeat in repeats:
        torch.testing.assert_close(repeat, first, rtol=0, atol=0, equal_nan=True)
    if rank == 0:
        out, lse = first
        assert out[:, 1].isnan().all() and lse[:, :, 1].isnan().all()


def test_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are added in order, as one by one, and elements between the rows are not touched."""
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="runs on Linux only")
    kernel: Any = memory_ops._add
    monkeypatch.setattr(memory_ops, "_add", interpreter.InterpretedFunction(kernel.kernel.fn))
    for count in (1, 3, 4, 5):
        total, *addends = (torch.randn(3, 40, 8) for _ in range(1 + count))
        parts, expected = [x[:, 2:35] for x in addends], total.clone()
        add_staged([expected[:, 5:38]], [[part] for part in parts])
        memory_ops.add_on_gpu(total[:, 5:38], parts)
        assert torch.equal(total, expected)
