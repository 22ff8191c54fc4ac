"""Shrinks a failing trial to the simplest one found that fails alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from cases import Case

from fuzz.draw import unit_of
from fuzz.trial import Trial
from ring_core import ChunkLayout, Mask


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
    unit = unit_of(case.layout, case.cp_size)
    changes: list[dict[str, Any]] = [
        {field_of.name: field_of.default}
        for field_of in fields(Case)[2:]
        if field_of.name not in ("cp_size", "seq_len", "heads", "dims", "batch")
        and getattr(case, field_of.name) != field_of.default
    ]
    rules: list[dict[str, Any]] = [
        {field_of.name: field_of.default}
        for field_of in fields(Mask)
        if field_of.init and getattr(mask, field_of.name) != field_of.default
    ]
    changes += [{"mask": replace(mask, **rule)} for rule in rules]
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
