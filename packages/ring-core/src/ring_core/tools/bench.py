"""A short benchmark, shared by the backends: a ring against one device doing all of it.

``python -m ring_torch bench`` and ``python -m ring_jax bench`` are made of this. What is timed
alternates, so that a machine that slows down slows both, and each round has new random inputs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from ring_core.base.config import STRATEGIES, StrategyConfig
from ring_core.layouts.layout import LAYOUTS, LayoutName
from ring_core.masks.mask import Mask
from ring_core.plan.plan import make_plan
from ring_core.programs.ring import ring_program
from ring_core.tools.sizes import size

LEAST_ROUNDS, MOST_ROUNDS = 3, 20

#: Runs a round of its number; seconds of the forward, and of forward and backward.
TimedRound = Callable[[int], tuple[float, float]]
Round = tuple[tuple[float, float], ...]  # of one, the ring, and the ring with a check
PASSES = ("forward", "forward and backward")


@dataclass(frozen=True)
class BenchCase:
    """What is timed: a call of ``[1, seq_len, heads, head_dim]`` over ``ranks``.

    ``dtype`` is a name both frameworks know; the mask is causal, with a window where one is given.
    """

    ranks: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    window: int | None
    layout: LayoutName
    strategy: str
    kernel: str

    @property
    def mask(self) -> Mask:
        """Causal; ``window`` is how many keys before its own a query sees."""
        return Mask(causal=True, window=None if self.window is None else (self.window, 0))

    def describe(self) -> str:
        """In a line."""
        return (
            f"{self.seq_len} tokens, {self.mask.describe()}, {self.heads} query and "
            f"{self.kv_heads} key/value heads of {self.head_dim}, {self.dtype}, "
            f"{self.layout}, strategy {self.strategy}, over {self.ranks}"
        )


@dataclass(frozen=True)
class Timing:
    """Seconds of each round of a pass, on one device, on the ring, and on the ring with a check.

    ``work_fraction`` is what one device has of the work: 1 / ranks, or 1 where the ranks' devices
    are the same cores as the one device's.
    """

    what: str
    one: tuple[float, ...]
    ring: tuple[float, ...]
    checked: tuple[float, ...]
    work_fraction: float

    @property
    def check_cost(self) -> float:
        """What checking every call (``RING_CHECK=1``) adds to it, as a share: the median."""
        return statistics.median(
            checked / ring - 1 for checked, ring in zip(self.checked, self.ring, strict=True)
        )

    @property
    def efficiencies(self) -> list[float]:
        """For each round: the rate a device of the ring keeps, over that of one alone."""
        return sorted(
            self.work_fraction * one / ring for one, ring in zip(self.one, self.ring, strict=True)
        )

    @property
    def efficiency(self) -> float:
        """Their median."""
        return statistics.median(self.efficiencies)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a ``bench`` command; what is not given is the backend's choice."""
    add = parser.add_argument
    add("--seq-len", type=size, metavar="N", help="tokens, over all ranks")
    add("--ranks", type=int, metavar="P", help="default: all devices, at least two processes")
    add("--heads", type=int, metavar="H")
    add("--kv-heads", type=int, metavar="K")
    add("--head-dim", type=int, metavar="D")
    add("--dtype", choices=("float64", "float32", "bfloat16", "float16"))
    add("--window", type=size, metavar="W", help="keys before its own that a query sees")
    add("--layout", choices=LAYOUTS, default="zigzag")
    add("--strategy", choices=("auto", *STRATEGIES), default="auto")
    add("--kernel", default="auto")
    add("--seconds", type=float, default=20.0, help="for all rounds together; default 20")
    add("--json", action="store_true", help="for programs")


def setting_of(args: argparse.Namespace, defaults: BenchCase) -> BenchCase:
    """What a command line asks for, and the rest from ``defaults``.

    Raises:
        ValueError: A size is not positive, or does not fit the others.
    """
    names = ("ranks", "seq_len", "heads", "kv_heads", "head_dim")
    values = {
        name: getattr(defaults if getattr(args, name) is None else args, name)
        for name in (*names, "dtype")
    }
    for name in names:
        if values[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {values[name]}")
    if values["heads"] % values["kv_heads"]:
        raise ValueError(
            f"--heads must be a multiple of --kv-heads, got {values['heads']} and "
            f"{values['kv_heads']}"
        )
    setting = BenchCase(
        **values, window=args.window, layout=args.layout, strategy=args.strategy, kernel=args.kernel
    )
    ring_program(  # refuses what cannot be planned
        make_plan(
            setting.mask, seq_len=setting.seq_len, cp_size=setting.ranks, layout=setting.layout
        ),
        StrategyConfig(setting.strategy).ring_strategy,
    )
    return setting


def timings(
    one: TimedRound, ring: TimedRound, checked: TimedRound, *, work_fraction: float, seconds: float
) -> tuple[Timing, Timing]:
    """Time all in turns, forward and with the backward, showing how far it is on stderr.

    With tqdm that is a progress bar, else a line a round.

    The first round warms up and is not counted; then at least three, at most twenty, or as many as
    ``seconds`` allow.
    """
    rounds: list[Round] = []
    every = (one, ring, checked)
    with progress(MOST_ROUNDS, "round") as bar:
        for run in every:
            run(0)
        end = time.monotonic() + seconds
        for n in range(1, MOST_ROUNDS + 1):
            rounds.append(tuple(run(n) for run in every))
            bar.update()
            if n >= LEAST_ROUNDS and time.monotonic() >= end:
                bar.total = n
                break
    forward, both = (_timing(what, rounds, n, work_fraction) for n, what in enumerate(PASSES))
    return forward, both


def _timing(what: str, rounds: Sequence[Round], n: int, work_fraction: float) -> Timing:
    one, ring, checked = (tuple(times[n] for times in x) for x in zip(*rounds, strict=True))
    return Timing(what, one, ring, checked, work_fraction)


class Progress(Protocol):
    """What of tqdm is used."""

    total: float | None

    def update(self) -> object:
        """Another one is done."""


@dataclass
class _Lines:
    """A line for each that is done."""

    total: float | None
    unit: str
    done: int = 0

    def update(self) -> None:
        self.done += 1
        sys.stderr.write(f"{self.unit} {self.done} of at most {self.total}\n")


def progress(total: int, unit: str) -> AbstractContextManager[Progress]:
    """How far something is, on stderr: with tqdm a bar, else a line each."""
    try:
        from tqdm import tqdm
    except ImportError:
        return nullcontext(_Lines(total, unit))
    return tqdm(total=total, desc=f"{unit}s", unit=unit, file=sys.stderr)


def watched[T](items: Iterable[T], total: int, unit: str) -> Iterator[T]:
    """Items one by one, and where stderr is a terminal how many of at most ``total`` are done."""
    if not sys.stderr.isatty():
        yield from items
        return
    with progress(total, unit) as bar:
        for item in items:
            yield item
            bar.update()


def shown(setting: BenchCase, where: str, found: Sequence[Timing]) -> str:
    """Timings for people."""
    lines = [f"{setting.describe()} {where}", f"{'':22}{'one ms':>10}{'ring ms':>10}  efficiency"]
    for timing in found:
        one, ring = (1e3 * statistics.median(x) for x in (timing.one, timing.ring))
        lines.append(
            f"{timing.what:22}{one:10.2f}{ring:10.2f}  {timing.efficiency:.2f}  "
            f"({timing.efficiencies[0]:.2f} to {timing.efficiencies[-1]:.2f}, {len(timing.one)} rounds)"
        )
    cost = found[-1].check_cost
    lines.append(f"a check adds {cost:.1%} to {found[-1].what}: every:100 is {cost / 100:.2%}")
    return "\n".join(lines)
