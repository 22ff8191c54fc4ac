"""A case, the way to run it, and both as Python."""

from __future__ import annotations

from dataclasses import dataclass, fields

from cases import Case

from ring_core import ChunkLayout, Mask


@dataclass(frozen=True)
class Trial:
    """A case and the way to run it."""

    case: Case
    way: tuple[tuple[str, str], ...] = ()  # keyword arguments of the backend's ``run``

    def __str__(self) -> str:
        """What to paste into the table of cases, and the way."""
        return f"{expression(self.case)}" + "".join(
            f" {name}={value!r}" for name, value in self.way
        )


def expression(case: Case) -> str:
    """A case as Python that makes it."""
    parts = [repr(case.name), _mask_expression(case.mask)]
    for one in fields(Case)[2:]:
        value = getattr(case, one.name)
        if value != one.default:
            words = (
                f"ChunkLayout({value.chunks})" if isinstance(value, ChunkLayout) else repr(value)
            )
            parts.append(f"{one.name}={words}")
    return f"Case({', '.join(parts)})"


def _mask_expression(mask: Mask) -> str:
    parts = []
    for one in fields(Mask):
        value = getattr(mask, one.name)
        if one.init and value != one.default:
            parts.append(f"{one.name}={getattr(value, '__name__', None) or repr(value)}")
    return f"Mask({', '.join(parts)})"
