"""Fuzz trials: a case with the backend's options, printable as Python."""

from __future__ import annotations

from dataclasses import dataclass, fields

from cases import Case

from ring_core import ChunkLayout, Mask, StrategyConfig

Choice = str | StrategyConfig


@dataclass(frozen=True)
class Trial:
    """Case and the options of the backend's ``run``."""

    case: Case
    way: tuple[tuple[str, Choice], ...] = ()  # keyword arguments of the backend's ``run``

    def __str__(self) -> str:
        """Return the case as Python for the table of cases, and the options."""
        return f"{expression(self.case)}" + "".join(
            f" {name}={value!r}" for name, value in self.way
        )


def expression(case: Case) -> str:
    """Return Python code that makes the case."""
    parts = [repr(case.name), _mask_expression(case.mask)]
    for field in fields(Case)[2:]:
        value = getattr(case, field.name)
        if value != field.default:
            text = f"ChunkLayout({value.chunks})" if isinstance(value, ChunkLayout) else repr(value)
            parts.append(f"{field.name}={text}")
    return f"Case({', '.join(parts)})"


def _mask_expression(mask: Mask) -> str:
    parts = []
    for field in fields(Mask):
        value = getattr(mask, field.name)
        if field.init and value != field.default:
            parts.append(f"{field.name}={getattr(value, '__name__', None) or repr(value)}")
    return f"Mask({', '.join(parts)})"
