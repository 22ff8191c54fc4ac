"""Time a ring against one device that computes everything: a short benchmark for all backends.

``python -m ring_torch bench`` and ``python -m ring_jax bench`` are made of this. The ring is timed
twice, also with ``RING_CHECK=1``. Rounds of the three alternate, so that a machine that slows down
slows all, and each round has new random inputs. ``RING_CHECK=every:100`` is timed in rounds of 100
calls each, which alternate with rounds of 100 unchecked calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Protocol

from ring_core.base.config import STRATEGIES, StrategyConfig
from ring_core.layouts.layout import LAYOUTS, LayoutName
from ring_core.masks.mask import Mask, Window
from ring_core.plan.plan import make_plan
from ring_core.programs.ring import ring_program
from ring_core.tools.sizes import WINDOW, add_each, size

LEAST_ROUNDS, MOST_ROUNDS = 3, 20

#: Function that runs one round, given its number, and returns the seconds of a call by its pass:
#: of each of :data:`PASSES`, and of what else it times, under the same names in every round.
TimedRound = Callable[[int], Mapping[str, float]]
PASSES = ("forward", "forward and backward")
FROM_IDLE = ", from idle"  # behind a pass: the device had finished everything before the call
CHECK_EVERY = 100  # calls of a round of :class:`SparseChecks`


@dataclass(frozen=True)
class BenchCase:
    """A call to time: causal attention of ``[1, seq_len, heads, head_dim]`` over ``ranks``.

    Attributes:
        dtype: A name that both frameworks know, such as ``bfloat16``.
        window: As in :class:`ring_core.Mask`.
        layout, strategy, kernel: As in a call.
    """

    ranks: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    window: Window | None
    layout: LayoutName
    strategy: str
    kernel: str

    @property
    def mask(self) -> Mask:
        """Mask of the call: causal, with the window if there is one."""
        return Mask(causal=True, window=self.window)

    def describe(self) -> str:
        """Return the case in one line."""
        return (
            f"{self.seq_len} tokens, {self.mask.describe()}, {self.heads} query and "
            f"{self.kv_heads} key/value heads of {self.head_dim}, {self.dtype}, "
            f"{self.layout}, strategy {self.strategy}, over {self.ranks}"
        )


@dataclass(frozen=True)
class Timing:
    """Seconds of each round of a pass.

    Attributes:
        name: The pass, one of :data:`PASSES`; followed by :data:`FROM_IDLE` if calls did not follow
            each other but each started on an idle device.
        alone: Seconds on one device that computes everything.
        ring: Seconds on the ring.
        checked: Seconds on the ring with ``RING_CHECK=1``.
        work_fraction: Share of the work that each device of the ring has: 1 / ranks, or 1 where the
            ranks' devices are the same cores as the one device's.
    """

    name: str
    alone: tuple[float, ...]
    ring: tuple[float, ...]
    checked: tuple[float, ...]
    work_fraction: float

    @property
    def check_cost(self) -> float:
        """Time that ``RING_CHECK=1`` adds, as a share of the ring's: the median of all rounds."""
        return statistics.median(
            checked / ring - 1 for checked, ring in zip(self.checked, self.ring, strict=True)
        )

    @property
    def efficiencies(self) -> list[float]:
        """Rate of a device of the ring over that of one alone, for each round, sorted."""
        return sorted(
            self.work_fraction * alone / ring
            for alone, ring in zip(self.alone, self.ring, strict=True)
        )

    @property
    def efficiency(self) -> float:
        """Median of :attr:`efficiencies`."""
        return statistics.median(self.efficiencies)


@dataclass(frozen=True)
class SparseChecks:
    """Seconds of rounds of :data:`CHECK_EVERY` calls, forward and backward.

    Attributes:
        unchecked: Seconds of each round without a check.
        checked: Seconds of each round in which one call is checked, ``RING_CHECK=every:100``.
    """

    unchecked: tuple[float, ...]
    checked: tuple[float, ...]

    @property
    def costs(self) -> list[float]:
        """Time that the checked call adds to a round, as a share of the round's, sorted."""
        return sorted(x / y - 1 for x, y in zip(self.checked, self.unchecked, strict=True))

    @property
    def cost(self) -> float:
        """Median of :attr:`costs`."""
        return statistics.median(self.costs)


def sparse_checks(run: Callable[[int], float], rounds: int) -> SparseChecks:
    """Time rounds with one checked call of 100 and rounds with none, in turns.

    Args:
        run: Returns the seconds of :data:`CHECK_EVERY` calls of which one in so many is checked, 0
            for none.
        rounds: Rounds of each kind, at least 1. Every other time the checked one comes first, so
            that a machine that slows down slows both.
    """
    times: dict[int, list[float]] = {0: [], CHECK_EVERY: []}
    with progress(rounds, "hundred") as bar:
        for n in range(rounds):
            for every in (0, CHECK_EVERY) if n % 2 == 0 else (CHECK_EVERY, 0):
                times[every].append(run(every))
            bar.update()
    return SparseChecks(tuple(times[0]), tuple(times[CHECK_EVERY]))


def default_case(ranks: int, *, on_cpu: bool) -> BenchCase:
    """Return the case that is timed unless options change it: a smaller one on a CPU."""
    sizes = (4096, 8, 2, 64, "float32") if on_cpu else (32768, 32, 8, 128, "bfloat16")
    return BenchCase(ranks, *sizes, None, "zigzag", "auto", "auto")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a ``bench`` command; :func:`default_case` has those left out."""
    usual, on_cpu = (default_case(2, on_cpu=x) for x in (False, True))

    def default(name: str) -> str:
        return f"default: {getattr(usual, name)}, on a CPU {getattr(on_cpu, name)}"

    add_each(parser, {
        "--seq-len": {
            "type": size, "metavar": "N",
            "help": f"tokens over all ranks, such as 65536 or 64k; {default('seq_len')}",
        },
        "--ranks": {
            "type": int, "metavar": "P",
            "help": "devices that share the sequence; default: all, on a CPU 2",
        },
        "--heads": {"type": int, "metavar": "H", "help": f"query heads; {default('heads')}"},
        "--kv-heads": {
            "type": int, "metavar": "K",
            "help": f"key/value heads, a divisor of --heads; {default('kv_heads')}",
        },
        "--head-dim": {
            "type": int, "metavar": "D", "help": f"head dim of Q, K and V; {default('head_dim')}",
        },
        "--dtype": {
            "choices": ("float64", "float32", "bfloat16", "float16"),
            "help": f"dtype of Q, K and V; {default('dtype')}",
        },
        "--window": WINDOW,
        "--layout": {
            "choices": LAYOUTS, "default": "zigzag",
            "help": "which rank holds which tokens; default: zigzag",
        },
        "--strategy": {
            "choices": ("auto", *STRATEGIES), "default": "auto",
            "help": "how K/V travel; default: auto",
        },
        "--kernel": {
            "default": "auto", "metavar": "NAME",
            "help": "a kernel that `matrix` lists; default: auto",
        },
        "--seconds": {
            "type": float, "default": 20.0, "metavar": "S",
            "help": "seconds for all rounds; default: 20",
        },
        "--json": {"action": "store_true", "help": "print JSON, with times in seconds"},
    })  # fmt: skip


def setting_of(args: argparse.Namespace, defaults: BenchCase) -> BenchCase:
    """Return the case that a command line asks for, with the rest from ``defaults``.

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
    alone: TimedRound,
    ring: TimedRound,
    checked: TimedRound,
    *,
    work_fraction: float,
    seconds: float,
) -> tuple[Timing, ...]:
    """Time one device, a ring and a checked ring in turns, with progress on stderr.

    The first round warms up, and is neither counted nor a part of ``seconds``. At least three timed
    ones follow, then as many as ``seconds`` allow, up to twenty.

    Args:
        alone: Runs a round on one device that computes everything.
        ring: Runs it on the ring.
        checked: Runs it on the ring with ``RING_CHECK=1``.
        work_fraction: As in :class:`Timing`.
        seconds: Time for all timed rounds; the one under way at its end is finished.

    Returns:
        Timings of all passes, in the order in which a round names them.
    """
    timed = (alone, ring, checked)
    rounds: list[list[Mapping[str, float]]] = []
    with progress(MOST_ROUNDS, "round") as bar:
        for run in timed:
            run(0)
        end = time.monotonic() + seconds
        for n in range(1, MOST_ROUNDS + 1):
            rounds.append([run(n) for run in timed])
            bar.update()
            if n >= LEAST_ROUNDS and time.monotonic() >= end:
                bar.total = n
                break
    results = []
    for name in rounds[0][0]:
        by_run = [tuple(times[name] for times in column) for column in zip(*rounds, strict=True)]
        results.append(Timing(name, by_run[0], by_run[1], by_run[2], work_fraction))
    return tuple(results)


class Progress(Protocol):
    """A progress bar, as tqdm's: the part of its interface that is used."""

    total: float | None

    def update(self) -> object:
        """Count one more as done."""


@dataclass
class _Lines:
    """Progress without tqdm: a line on stderr for each unit that is done."""

    total: float | None
    unit: str
    done: int = 0

    def update(self) -> None:
        self.done += 1
        sys.stderr.write(f"{self.unit} {self.done} of at most {self.total}\n")


def progress(total: int, unit: str) -> AbstractContextManager[Progress]:
    """Show progress on stderr: a bar if tqdm is installed, otherwise a line for each step."""
    try:
        from tqdm import tqdm
    except ImportError:
        return nullcontext(_Lines(total, unit))
    return tqdm(total=total, desc=f"{unit}s", unit=unit, file=sys.stderr)


def watched[T](items: Iterable[T], total: int, unit: str) -> Iterator[T]:
    """Yield items, with progress (of at most ``total``) where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    with progress(total, unit) as bar:
        for item in items:
            yield item
            bar.update()


def report(
    setting: BenchCase, where: str, timings_of_passes: Sequence[Timing], versions: Mapping[str, str],
    *, as_json: bool, sparse: SparseChecks | None = None,
) -> str:  # fmt: skip
    """Return what a ``bench`` command prints.

    Args:
        setting: The case that was timed.
        where: The devices of the ring, behind their number.
        timings_of_passes: Timings of all passes.
        versions: Installed versions, for JSON.
        as_json: True for JSON with times in seconds, False for a table in milliseconds.
        sparse: Times of rounds with ``RING_CHECK=every:100``; ``None`` if there were none.
    """
    if not as_json:
        return _timings_text(setting, where, timings_of_passes, sparse)
    rows = [
        asdict(timing) | {"efficiency": timing.efficiency, "check_cost": timing.check_cost}
        for timing in timings_of_passes
    ]
    fields = {
        "versions": versions, "setting": asdict(setting), "where": where, "timings": rows,
        "sparse_checks": sparse and asdict(sparse) | {"cost": sparse.cost},
    }  # fmt: skip
    return json.dumps(fields, indent=2)


def _timings_text(
    setting: BenchCase, where: str, timings_of_passes: Sequence[Timing], sparse: SparseChecks | None
) -> str:
    """Return timings as text for people, in milliseconds: medians of all rounds."""
    width = 2 + max(len(timing.name) for timing in timings_of_passes)
    lines = [
        f"{setting.describe()} {where}",
        f"{'pass':{width}}{'alone ms':>10}{'ring ms':>10}  efficiency (rate of a device of the ring / alone)",
    ]
    for timing in timings_of_passes:
        alone, ring = (1e3 * statistics.median(x) for x in (timing.alone, timing.ring))
        lines.append(
            f"{timing.name:{width}}{alone:10.2f}{ring:10.2f}  {timing.efficiency:.2f}  "
            f"({timing.efficiencies[0]:.2f} to {timing.efficiencies[-1]:.2f}, {len(timing.alone)} rounds)"
        )
    both = next(timing for timing in timings_of_passes if timing.name == PASSES[-1])
    lines.append(f"RING_CHECK=1 adds {both.check_cost:.1%} to {both.name}")
    if sparse is not None:
        lines.append(
            f"RING_CHECK=every:{CHECK_EVERY} adds {sparse.cost:.2%} to {CHECK_EVERY} calls {PASSES[-1]} "
            f"({sparse.costs[0]:.2%} to {sparse.costs[-1]:.2%}, {len(sparse.checked)} rounds)"
        )
    return "\n".join(lines)
