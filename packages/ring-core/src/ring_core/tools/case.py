"""Calls that command lines ask about, and their options: ``64k``, ``4096,0``, ``32/8``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ring_core.base.config import STRATEGIES, StrategyConfig
from ring_core.choose.balance import ALL_LAYOUTS, layout_for
from ring_core.layouts.layout import LAYOUTS, Layout, LayoutSpec
from ring_core.masks.mask import Mask, Window
from ring_core.plan.plan import make_plan
from ring_core.programs.ring import ring_program

#: Options of a command: the arguments of ``add_argument`` of each flag.
Options = Mapping[str, Mapping[str, Any]]

DTYPES = ("float64", "float32", "bfloat16", "float16")  # names that all frameworks know
CAUSAL = Mask(causal=True)
_UNIT_SIZES = {"k": 1 << 10, "m": 1 << 20}


@dataclass(frozen=True)
class Case:
    """A call: attention of ``[batch, seq_len, heads, head_dim]`` over ``ranks``.

    Attributes:
        dtype: One of :data:`DTYPES`.
        layout, strategy, kernel, transport: As in a call.
        kv_seq_len: Number of keys; ``None`` for as many as queries.
        backward: True if a backward will follow; ``None`` where that changes nothing.
    """

    ranks: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    mask: Mask = CAUSAL
    layout: LayoutSpec = "zigzag"
    strategy: str = "auto"
    kernel: str = "auto"
    transport: Any = "auto"
    kv_seq_len: int | None = None
    batch: int = 1
    backward: bool | None = None

    @property
    def local_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a rank's queries and of its keys, padded to what the layout takes."""
        queries, keys = (
            Layout.padded(self.layout, length, self.ranks).local_len
            for length in (self.seq_len, self.kv_seq_len or self.seq_len)
        )
        return (
            (self.batch, queries, self.heads, self.head_dim),
            (self.batch, keys, self.kv_heads, self.head_dim),
        )

    @property
    def options(self) -> dict[str, Any]:
        """Options of the call: the mask, names that were chosen, and the length if it is padded."""
        padded = self.local_shapes[0][1] * self.ranks > self.seq_len
        return {
            "mask": self.mask, "seq_len": self.seq_len if padded else None,
            "strategy": self.strategy, "kernel": self.kernel, "transport": self.transport,
        }  # fmt: skip

    def describe(self) -> str:
        """Return the call in one line."""
        return (
            f"{self.seq_len} tokens, {self.mask.describe()}, {self.heads} query and "
            f"{self.kv_heads} key/value heads of {self.head_dim}, {self.dtype}, "
            f"{self.layout}, strategy {self.strategy}, over {self.ranks}"
        )

    def describe_rank(self, device: str) -> str:
        """Return the tensors of rank 0 on a device in one line."""
        q, k = self.local_shapes
        passes = {None: "", True: "; forward and backward", False: "; forward"}[self.backward]
        return (
            f"rank 0 of {self.ranks} has queries {list(q)} and keys {list(k)}, {self.dtype} on "
            f"{device}{passes}"
        )


@dataclass(frozen=True)
class Check:
    """A comparison of a result with float64: its largest error, and the largest allowed.

    Attributes:
        name: The kernel, strategy, transport or layout that was tested.
        where: The devices, and how many.
        result: Name of the result, or ``runs``.
        error: The largest absolute error; ``None`` if it is not finite, or there is no result.
        limit: The largest error allowed.
        passed: True if the error is within the limit.
        trace: The traceback of an exception instead of a result; else empty.
    """

    name: str
    where: str
    result: str
    error: float | None
    limit: float
    passed: bool
    trace: str = ""


def shown_checks(title: str, checks: Sequence[Check], *, healthy: bool) -> list[str]:
    """Return the last lines of a report: a line for each check, and the verdict."""
    lines = ["", f"self-test: {title} against dense attention in float64"]
    names = max((len(check.name) for check in checks), default=0) + 2
    for check in checks:
        verdict = "ok" if check.passed else "FAILED"
        error = "not finite" if check.error is None else f"{check.error:.1e}"
        lines.append(
            f"  {check.name:{names}}{check.where:18}{check.result:6}{verdict:8}"
            f"{check.trace or f'error {error}, limit {check.limit:.1e}'}"
        )
    return [*lines, "", "all is well" if healthy else "something is wrong"]


def size(text: str) -> int:
    """Read an integer, which may end in ``k`` for 1,024 or ``m`` for 1,048,576.

    >>> size("64k")
    65536
    """
    word = text.strip().lower()
    unit = _UNIT_SIZES.get(word[-1:], 1)
    try:
        return int(word[:-1] if unit > 1 else word) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number such as 65536, 64k or 1m"
        ) from None


def integers(text: str) -> tuple[int, ...]:
    """Read integers as ``0,64,128``, each as :func:`size` does."""
    return tuple(map(size, text.split(",")))


def window(text: str) -> Window:
    """Read a window as ``LEFT,RIGHT``, as ``window=(left, right)`` of a call; ``none`` is ``None``.

    >>> window("4k,0"), window("none,128")
    ((4096, 0), (None, 128))
    """
    sides = [None if side.strip().lower() == "none" else size(side) for side in text.split(",")]
    if len(sides) != 2:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no LEFT,RIGHT such as 4096,0 or 4096,none: keys before and after its own "
            f"that a query sees"
        )
    return sides[0], sides[1]


def head_counts(text: str) -> tuple[int, int]:
    """Read numbers of query heads and of key/value heads as ``H/K``, or ``H`` for as many of both.

    >>> head_counts("32/8"), head_counts("16")
    ((32, 8), (16, 16))
    """
    counts = [int(n) if n.isdecimal() else 0 for n in text.split("/")]
    if len(counts) > 2 or min(counts) < 1 or counts[0] % counts[-1]:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no H/K such as 32/8: query heads, and key/value heads, a divisor of them"
        )
    return counts[0], counts[-1]


def option(words: str, kind: Any = str, metavar: str | None = None, **more: Any) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for an option that takes a value."""
    return {"help": words, "type": kind, "metavar": metavar, **more}


_WINDOW = "keys before and after its own that a query sees: 4096,0; none is no limit: 4096,none"
_DEFAULT = "default: %(default)s"

#: Options of a sequence and its mask, which :func:`mask_of` reads.
MASK_OPTIONS: Options = {
    "--seq-len": option("queries over all ranks, such as 65536 or 64k", size, "N", required=True),
    "--kv-seq-len": option("keys over all ranks; default: as many", size, "N"),
    "--causal": {
        "action": argparse.BooleanOptionalAction, "default": True,
        "help": "a query sees no later key, which is the default",
    },
    "--window": option(_WINDOW, window, "LEFT,RIGHT"),
    "--chunk-size": option("tokens per chunk, where a query sees its own chunk only", size, "N"),
    "--cu-seqlens": option("offsets of packed documents, in tokens", integers, "0,...,N"),
}  # fmt: skip

#: Options of an ``explain`` command, which :func:`explained_case` reads.
EXPLAIN_OPTIONS: Options = {
    **MASK_OPTIONS,
    "--cp": option("number of ranks", int, "P", required=True),
    "--heads": option(
        "query heads, and key/value heads if they are fewer: 32/8", head_counts, "H/K",
        required=True,
    ),
    "--head-dim": option(f"head dim; {_DEFAULT}", int, "D", default=128),
    "--batch": option(f"sequences; {_DEFAULT}", int, "B", default=1),
    "--dtype": option(_DEFAULT, choices=DTYPES, default="bfloat16"),
    "--layout": option(
        f"which rank holds which tokens; {_DEFAULT}", choices=ALL_LAYOUTS, default="zigzag"
    ),
    "--kernel": option(f"a kernel that `matrix` lists; {_DEFAULT}", metavar="NAME", default="auto"),
    "--strategy": option(f"what moves between ranks; {_DEFAULT}", metavar="NAME", default="auto"),
    "--transport": option(f"how it gets there; {_DEFAULT}", metavar="NAME", default="auto"),
}  # fmt: skip


def explained_case(args: argparse.Namespace) -> Case:
    """Return the call that an ``explain`` command line asks about; refuse it with a ValueError."""
    _check_sizes(vars(args), ("cp", "seq_len", "head_dim", "batch"))
    mask, keys, (heads, kv_heads) = mask_of(args), args.kv_seq_len, args.heads
    layout = layout_for(args.layout, mask, seq_len=args.seq_len, cp_size=args.cp, kv_seq_len=keys)
    return Case(
        args.cp, args.seq_len, heads, kv_heads, args.head_dim, args.dtype, mask, layout,
        args.strategy, args.kernel, args.transport, keys, args.batch,
        getattr(args, "backward", None),
    )  # fmt: skip


#: What ``bench`` times unless options change it: on GPUs and TPUs, and on a CPU.
TIMED, TIMED_ON_CPU = (
    {"seq_len": 32768, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"},
    {"seq_len": 4096, "heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "float32"},
)

#: Options of a ``bench`` command, which :func:`timed_case` reads.
BENCH_OPTIONS: Options = {
    "--ranks": option("devices that share the sequence; default: all, on a CPU 2", int, "P"),
    **{
        f"--{name.replace('_', '-')}": option(
            f"{words}; default: {TIMED[name]}, on a CPU {TIMED_ON_CPU[name]}", kind, metavar, **more
        )
        for name, words, kind, metavar, more in (
            ("seq_len", "tokens over all ranks, such as 65536 or 64k", size, "N", {}),
            ("heads", "query heads", int, "H", {}),
            ("kv_heads", "key/value heads, a divisor of --heads", int, "K", {}),
            ("head_dim", "head dim of Q, K and V", int, "D", {}),
            ("dtype", "dtype of Q, K and V", str, None, {"choices": DTYPES}),
        )
    },
    "--window": MASK_OPTIONS["--window"],
    "--layout": {**EXPLAIN_OPTIONS["--layout"], "choices": LAYOUTS},
    "--strategy": option(
        f"how K/V travel; {_DEFAULT}", choices=("auto", *STRATEGIES), default="auto"
    ),
    "--kernel": EXPLAIN_OPTIONS["--kernel"],
    "--seconds": option("seconds for all rounds; default: 20", float, "S", default=20.0),
    "--json": {"action": "store_true", "help": "print JSON, with times in seconds"},
}  # fmt: skip


def timed_case(args: argparse.Namespace, ranks: int, *, on_cpu: bool) -> Case:
    """Return the call that a ``bench`` command line asks to time; refuse it with a ValueError.

    It is over ``ranks`` unless the command line says how many.
    """
    usual: dict[str, Any] = {**(TIMED_ON_CPU if on_cpu else TIMED), "ranks": ranks}
    values = usual | {x: y for x, y in vars(args).items() if x in usual and y is not None}
    _check_sizes(values, ("ranks", "seq_len", "heads", "kv_heads", "head_dim"))
    if values["heads"] % values["kv_heads"]:
        raise ValueError(
            f"--heads must be a multiple of --kv-heads, got {values['heads']} and "
            f"{values['kv_heads']}"
        )
    case = Case(
        **values, mask=Mask(causal=True, window=args.window), layout=args.layout,
        strategy=args.strategy, kernel=args.kernel, transport=getattr(args, "transport", "auto"),
    )  # fmt: skip
    plan = make_plan(case.mask, seq_len=case.seq_len, cp_size=case.ranks, layout=case.layout)
    ring_program(plan, StrategyConfig(args.strategy).ring_strategy)  # refuses what has no plan
    return case


def _check_sizes(values: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Refuse sizes below 1."""
    for name in names:
        if values[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {values[name]}")


def mask_of(args: argparse.Namespace) -> Mask:
    """Return the mask that a command line asks for; refuse a malformed one with a ValueError."""
    names = "causal", "window", "chunk_size", "cu_seqlens"
    return Mask(**{name: getattr(args, name) for name in names})
