"""A call like an earlier one runs launches that were bound before, and gives the bits of the first.

Calls are alike in all but their tensors' numbers and memory; strides, alignments, threads and
captured graphs are not. Each kind of launch is tried in each strategy that can run it.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import patched
import pytest
import torch
from dense import sdpa
from plain_flash import Returning, Writing, flash_of
from tiled import KEYS, TiledKernel
from torch import Tensor
from torch.nn.functional import pad
from views import VIEWS

import ring_torch
from ring_core import Layout, StrategyConfig
from ring_core.programs import gather_work
from ring_torch import prepare, ring_attention
from ring_torch.comm.handshake import HEADER_BYTES
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels import fa4, flash
from ring_torch.kernels.api import Kernel
from ring_torch.kernels.eager import EagerKernel
from ring_torch.kernels.sdpa import CpuFlashKernel
from ring_torch.launches import cache
from ring_torch.strategies import gather

TOKENS, HEADS, DIM = 48, (4, 2, 2), 8
View = Callable[[Tensor], Tensor]
Results = list[Tensor]


def spread(x: Tensor) -> Tensor:
    """Return a view whose heads lie farther apart: aligned, with other strides."""
    return pad(x, (0, 8))[..., : x.shape[-1]]


#: Views of q, k, v and dout that are calls of one kind each.
KINDS: dict[str, View] = {
    "plain": torch.clone, "heads first": VIEWS["heads_first"], "spread": spread,
    "offset": VIEWS["offset"],
}  # fmt: skip
#: Kinds whose tensors are copied before each launch: these are not bound.
COPIED = "offset"
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
WAYS = [
    (kernel, strategy, dtype)
    for kernel in KERNELS
    for strategy in STRATEGIES
    for dtype in (torch.float64, torch.bfloat16)
    if (strategy == "two stages") == (kernel.endswith("causal")) or kernel == "sdpa"
    if strategy == "gather" or kernel != "split"
    if (kernel, strategy) != ("sdpa", "gather")
    if dtype == torch.float64 or kernel.startswith(("writes", "returns"))
]


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
        q, k, v = (x.double().requires_grad_() for x in self.whole[:3])
        out = sdpa(q, k, v, is_causal=True)
        expected = out, *torch.autograd.grad(out, (q, k, v), self.whole[3].double())
        tolerance = 2e-2 if results[0].dtype == torch.bfloat16 else 1e-6
        for x, y in zip(results, expected, strict=True):
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
        if (name, strategy) == ("padded", "single"):  # nothing to pad
            continue
        if dtype == torch.bfloat16 and name in ("lse", "padded"):  # no number is rounded elsewhere
            continue
        kernel = KERNELS[kernel_name]()
        events, firsts = events_of(kernel), dict[str, Results]()
        with chosen(kernel, saves=name != "fetched again"):
            # Kinds in turn, then each once more: what one has bound must not serve another.
            for kind in [*[x for x in KINDS for _ in range(3)], *KINDS]:
                events.clear()
                results = numbers.call(KINDS[kind], **more)
                is_repeat = kind in firsts
                if is_repeat:
                    assert_same(firsts[kind], results)
                firsts.setdefault(kind, results)
                if name in ("plain", "fetched again"):
                    numbers.check(results)
                if kernel_name.startswith("writes") and kind != COPIED:
                    check_events(events, is_repeat=is_repeat)
            # What was saved may be restored at addresses of another alignment, where torch's own
            # operations may add in another order.
            for unpack in (torch.clone, VIEWS["offset"], torch.clone):
                results = numbers.call(torch.clone, unpack, **more)
                for x, y in zip(firsts["plain"], results, strict=True):
                    torch.testing.assert_close(x, y)
                if "writes" in kernel_name or "returns" in kernel_name:
                    assert_same(firsts["plain"], results)


def check_events(events: list[str], *, is_repeat: bool) -> None:
    """Check that a first call asks the library and binds what it does, and a later one does not."""
    for name in ("forward", "backward"):
        asked, bound, repeated = (events.count(x + name) for x in ("", "bind ", "repeat "))
        assert asked == bound, events
        assert bool(repeated) if is_repeat else bool(asked + repeated), events
        assert not (is_repeat and asked), events


IDS = [f"{kernel}-{strategy}-{dtype}" for kernel, strategy, dtype in WAYS]
RARE = [
    name
    for name, (kernel, strategy, dtype) in zip(IDS, WAYS, strict=True)
    if dtype == torch.bfloat16
    if kernel.startswith("returns") or strategy in ("balanced", "ulysses", "single")
]


@pytest.mark.nightly(only=RARE)
@pytest.mark.parametrize(("kernel", "strategy", "dtype"), WAYS, ids=IDS)
def test_calls_repeat_the_first(
    kernel: str, strategy: str, dtype: torch.dtype, backend: Any
) -> None:
    backend.pool(STRATEGIES[strategy][0]).run(_repeats, kernel, strategy, dtype)


def _with_captures(rank: int, strategy: str) -> None:
    size, options = STRATEGIES[strategy]
    numbers, kernel = Numbers(rank, size, options, torch.float64), KERNELS["writes"]()
    if strategy == "two stages":
        kernel = KERNELS["writes, causal"]()
    events, calls = events_of(kernel), list[Results]()
    with chosen(kernel):
        for captures in (True, True, False, True):
            events.clear()
            with patch.object(flash, "is_capturing", lambda now=captures: now):
                calls.append(numbers.call(torch.clone))
            assert_same(calls[0], calls[-1]) if calls[1:] else None
            numbers.check(calls[-1])
            bound, repeated = (events.count(x + "forward") for x in ("bind ", "repeat "))
            if len(calls) < 3:
                assert not [x for x in events if x not in ("forward", "backward")]
            elif not captures:
                assert bound > 0
            else:
                assert bound == 0 and "forward" not in events and repeated > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_bound_while_a_graph_is_captured(strategy: str, backend: Any) -> None:
    """Captures use what is bound before, and bind nothing: their memory is the graph's."""
    backend.pool(STRATEGIES[strategy][0]).run(_with_captures, strategy)


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
    barrier, calls = threading.Barrier(2, timeout=30), list[Results]()

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
        ):
            threads = [
                threading.Thread(target=lambda: calls.append(numbers.call(torch.clone)))
                for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        events_of(kernel).clear()
        calls.append(numbers.call(torch.clone))
        assert events_of(kernel) == ["repeat forward", "repeat backward"]
    first, *others = calls
    assert len(others) == 2
    numbers.check(first)
    for again in others:
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
            assert_same(firsts[kind], results) if kind in firsts else None
            firsts.setdefault(kind, results)
            assert ("bind forward" in events, "repeat forward" in events) == (binds, not binds)


HYBRID_RING = StrategyConfig("hybrid", ulysses_size=2)
HYBRID_GATHER = StrategyConfig("hybrid", ulysses_size=2, outer="gather")
#: The most function calls and source files of a pass in any strategy.
GOAL = 120, 14
#: Ranks, strategy, layout: the most calls and files of a repeated forward, and of a backward.
MOST: dict[tuple[int, str | StrategyConfig, str], tuple[tuple[int, int], tuple[int, int]]] = {
    (1, "ring", "zigzag"): ((28, 10), (35, 11)),
    (4, "ring", "zigzag"): ((80, 12), (103, 11)),
    (4, "gather", "zigzag"): ((68, 13), (105, 13)),
    (4, "balanced", "contiguous"): ((101, 13), (114, 12)),
    (4, "ulysses", "zigzag"): ((63, 13), (72, 13)),
    (4, HYBRID_RING, "zigzag"): ((85, 14), (89, 13)),
    (4, HYBRID_GATHER, "zigzag"): ((94, 14), (104, 14)),
}


def counted(rank: int, strategy: str | StrategyConfig, layout: Any) -> list[tuple[int, int]]:
    """Return the calls and files of one more forward like those before, and of its backward."""
    del rank
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, heads, 16).requires_grad_() for heads in (4, 2, 2))
    dout, files = torch.randn(1, 64, 4, 16), Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "/ring_" in name:
            files[name] += 1

    def watched(what: Callable[[], Any]) -> Any:
        files.clear()
        gc.disable()
        sys.setprofile(count)
        result = what()
        sys.setprofile(None)
        gc.enable()
        counts.append((files.total(), len(files)))
        return result

    def forward() -> torch.Tensor:
        return ring_torch.ring_attention(q, k, v, causal=True, layout=layout, strategy=strategy)

    for _ in range(3):
        torch.autograd.grad(forward(), (q, k, v), dout)
    counts: list[tuple[int, int]] = []
    out = watched(forward)
    watched(lambda: torch.autograd.grad(out, (q, k, v), dout))
    return counts


@pytest.mark.parametrize(("size", "strategy", "layout"), MOST)
def test_a_repeated_call(
    size: int, strategy: str | StrategyConfig, layout: str, backend: Any
) -> None:
    assert all(
        calls <= GOAL[0] and files <= GOAL[1] for calls, files in MOST[size, strategy, layout]
    )
    for counts in backend.pool(size).run(counted, strategy, layout):
        for most, (calls, files) in zip(MOST[size, strategy, layout], counts, strict=True):
            assert calls <= most[0] and files <= most[1], counts


#: Rows of the table of messages in ``docs/layouts-and-strategies.md``.
SENT: dict[str, tuple[str | StrategyConfig, str]] = {
    "`ring`": ("ring", "zigzag"),
    "`balanced`, `contiguous`": ("balanced", "contiguous"),
    "`gather`": ("gather", "zigzag"),
    "`ulysses`": ("ulysses", "zigzag"),
    "hybrid, two groups, a ring between them": (HYBRID_RING, "zigzag"),
    "hybrid, two groups, a gather between them": (HYBRID_GATHER, "zigzag"),
}


def messages(rank: int, strategy: str | StrategyConfig, layout: Any) -> list[tuple[int, int]]:
    """Return the messages and all-to-alls of a forward, and of its backward, without headers."""
    del rank
    q, k, v = (torch.randn(1, 96, heads, 16).requires_grad_() for heads in (4, 2, 2))
    sent: list[int] = []
    exchanges: list[object] = []
    start, all_to_all = Ranks.start, Ranks._all_to_all

    def counted_start(ranks: Ranks, sends: Any, receives: Any) -> Any:
        sent.extend(x.nbytes for x, _ in sends if x.nbytes != HEADER_BYTES)
        return start(ranks, sends, receives)

    def counted_all_to_all(*args: Any, **options: Any) -> Any:
        exchanges.append(args)
        return all_to_all(*args, **options)

    def taken() -> tuple[int, int]:
        counts = len(sent), len(exchanges)
        sent.clear()
        exchanges.clear()
        return counts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "start", counted_start)
        patch.setattr(Ranks, "_all_to_all", counted_all_to_all)
        out = ring_torch.ring_attention(q, k, v, causal=True, layout=layout, strategy=strategy)
        forward = taken()
        out.sum().backward()
        return [forward, taken()]


def _span(numbers: Iterable[int]) -> str:
    least, most = min(found := list(numbers)), max(found)
    return f"{least}" if least == most else f"{least} to {most}"


@pytest.mark.parametrize("name", SENT)
def test_messages_are_those_of_the_page(name: str, backend: Any) -> None:
    ranks = backend.pool(4).run(messages, *SENT[name])
    forward, backward = ([counts[n][0] for counts in ranks] for n in range(2))
    (exchanges,) = {count for counts in ranks for _, count in counts}
    row = f"| {name} | {_span(forward)} | {_span(backward)} | {exchanges} |"
    page = Path(__file__).parents[2] / "docs" / "layouts-and-strategies.md"
    assert row in page.read_text().splitlines(), row
