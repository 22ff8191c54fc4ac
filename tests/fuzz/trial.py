"""Fuzz trials: a case with the backend's options, printable as Python, and simpler ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from cases import Case

from ring_core import ChunkLayout, LayoutSpec, Mask, StrategyConfig

Choice = str | StrategyConfig


@dataclass(frozen=True)
class Trial:
    """Case and the options of the backend's ``run``."""

    case: Case
    way: tuple[tuple[str, Choice], ...] = ()  # keyword arguments of the backend's ``run``

    def __str__(self) -> str:
        """Return the case as Python for the table of cases, and the options."""
        return expression(self.case) + "".join(f" {name}={value!r}" for name, value in self.way)


def given(record: Case | Mask) -> list[tuple[str, Any, Any]]:
    """Return name, value and default of what is unlike its default, without a name and a mask."""
    every = (x for x in fields(record) if x.init and x.name not in ("name", "mask"))
    values = ((x.name, getattr(record, x.name), x.default) for x in every)
    return [(name, value, default) for name, value, default in values if value != default]


def expression(case: Case) -> str:
    """Return Python code that makes the case."""
    rules = (
        f"{x}={getattr(value, '__name__', None) or repr(value)}" for x, value, _ in given(case.mask)
    )
    parts = [repr(case.name), f"Mask({', '.join(rules)})"]
    for name, value, _ in given(case):
        text = f"ChunkLayout({value.chunks})" if isinstance(value, ChunkLayout) else repr(value)
        parts.append(f"{name}={text}")
    return f"Case({', '.join(parts)})"


def unit_of(layout: LayoutSpec, cp_size: int) -> int:
    """Return the number that sequence lengths have to be multiples of."""
    if isinstance(layout, ChunkLayout):
        return sum(map(len, layout.chunks))
    return 2 * cp_size if layout == "zigzag" else cp_size


def shrink(trial: Trial, fails: Callable[[Trial], bool]) -> Trial:
    """Replace the trial by a simpler one as long as one fails."""
    while True:
        simplest = next((candidate for candidate in simpler(trial) if fails(candidate)), None)
        if simplest is None:
            return trial
        trial = simplest


def simpler(trial: Trial) -> list[Trial]:
    """Return trials that are one step simpler, largest steps first."""
    case, mask = trial.case, trial.case.mask
    unit, kept = (
        unit_of(case.layout, case.cp_size),
        ("cp_size", "seq_len", "heads", "dims", "batch"),
    )
    changes = [{name: default} for name, _, default in given(case) if name not in kept]
    changes += [{"mask": replace(mask, **{name: default})} for name, _, default in given(mask)]
    changes += [{"heads": (1, 1)}, {"dims": (1, 1)}, {"batch": 1}]
    for n in {1, case.seq_len // unit // 2, case.seq_len // unit - 1} - {0}:
        changes.append({"seq_len": unit * n, "mask": _cropped(mask, unit * n)})
    for cp_size in () if isinstance(case.layout, ChunkLayout) else range(1, case.cp_size):
        length = unit_of(case.layout, cp_size)
        seq_len = case.seq_len // length * length
        change = {"cp_size": cp_size, "seq_len": seq_len, "mask": _cropped(mask, seq_len)}
        if case.kv_seq_len is not None:
            change["kv_seq_len"] = max(1, case.kv_seq_len // length) * length
        changes.append(change)
    return [
        replace(trial, case=candidate)
        for candidate in (replace(case, **change) for change in changes)
        if candidate != case and _is_whole(candidate)
    ]


def _cropped(mask: Mask, seq_len: int) -> Mask:
    if mask.cu_seqlens is None:
        return mask
    inside = (offset for offset in mask.cu_seqlens if offset < seq_len)
    return replace(mask, cu_seqlens=(*inside, seq_len))


def _is_whole(case: Case) -> bool:
    """Return True if a simplified case is still valid."""
    if case.keys != case.seq_len and (
        case.segments in ("documents", "padded") or case.mask.cu_seqlens
    ):
        return False
    return case.poison != "padding" or case.segments in ("padded", "scattered")
