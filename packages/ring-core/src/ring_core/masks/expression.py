"""A mask's rule as an expression over positions, for kernels that are compiled for one.

The rule is called once with objects that note what is done to them. What they cannot note, such as
a table that is looked up, or an ``if``, leaves the mask without an expression.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partialmethod
from typing import Any

import numpy as np

from ring_core.base.arguments import Ints
from ring_core.masks.mask import Mask

#: ``"q"``, ``"k"``, a number, or an operator's name and its arguments.
Expression = str | int | tuple[Any, ...]
Operators = Mapping[str, Callable[..., Any]]

#: Operators of expressions. Of ``floordiv`` and ``mod`` the first is no less than 0, the second is
#: a number above 0, so that rounding down and towards 0 are one.
OPERATORS: Operators = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "max": np.maximum,
    "floordiv": operator.floordiv, "mod": operator.mod, "shift": operator.rshift,
    "bits": operator.and_, "lt": operator.lt, "le": operator.le, "eq": operator.eq,
    "ne": operator.ne, "and": operator.and_, "or": operator.or_,
}  # fmt: skip

_LIMIT = 1 << 31
_LARGEST = 256  # operators: what is used again counts again, as a kernel would spell it out
_SAMPLED = 64  # positions on each side at which an expression is compared with its mask


def evaluated(expression: Expression, q: Any, k: Any, operators: Operators = OPERATORS) -> Any:
    """What an expression says of positions, by somebody's operators; numpy's by default."""
    if isinstance(expression, tuple):
        name, *args = expression
        return operators[name](*(evaluated(x, q, k, operators) for x in args))
    return {"q": q, "k": k}[expression] if isinstance(expression, str) else expression


@lru_cache(maxsize=64)
def expression_of(
    mask: Mask, q_span: tuple[int, int], k_span: tuple[int, int]
) -> Expression | None:
    """The rule for positions ``start <= q < stop`` and ``start <= k < stop``, in 32-bit integers.

    ``None`` if it is not made of operators on integers alone, is long, has documents, or has
    numbers in it that do not fit.
    """
    if mask.cu_seqlens is not None:
        return None
    q, k = (_Traced(name, span[0], span[1] - 1) for name, span in (("q", q_span), ("k", k_span)))
    try:
        rule = mask.rule(q, k)
    except Exception:  # noqa: BLE001 - a rule may fail in any way on what is no array
        return None
    if not isinstance(rule, _Traced) or not rule.is_bool:
        return None
    rows, columns = _some(q_span)[:, None], _some(k_span)
    with np.errstate(all="ignore"):
        same = evaluated(rule.expression, rows, columns) == mask.dense(rows[:, 0], columns)
    return rule.expression if np.all(same) else None


def _some(span: tuple[int, int]) -> Ints:
    """Positions of a span: its ends, and others at random."""
    found = np.random.default_rng(0).integers(*span, _SAMPLED)
    found[:2], found[-2:] = span[0], span[1] - 1
    return found


@dataclass(frozen=True, eq=False)
class _Traced:
    """A number between two others, or a truth value, and where it comes from."""

    expression: Expression
    low: int
    high: int
    is_bool: bool = False
    size: int = 1

    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None

    def __post_init__(self) -> None:
        if not -_LIMIT <= self.low <= self.high < _LIMIT:
            raise OverflowError("does not fit in 32 bits")
        if self.size > _LARGEST:
            raise OverflowError("is too long")

    def __bool__(self) -> bool:
        raise TypeError("is not known yet")

    def __array__(self, *_: object, **__: object) -> Any:
        raise TypeError("is no array")

    def __add__(self, other: object) -> _Traced:
        a, b = _number(self), _number(other)
        return _of_two("add", (a, b), a.low + b.low, a.high + b.high)

    def __sub__(self, other: object) -> _Traced:
        a, b = _number(self), _number(other)
        return _of_two("sub", (a, b), a.low - b.high, a.high - b.low)

    def __rsub__(self, other: object) -> _Traced:
        return _number(other) - self

    def __neg__(self) -> _Traced:
        return 0 - self

    def __mul__(self, other: object) -> _Traced:
        a, b = _number(self), _number(other)
        ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        return _of_two("mul", (a, b), min(ends), max(ends))

    def __abs__(self) -> _Traced:
        other = -self
        return _of_two(
            "max", (self, other), max(self.low, other.low, 0), max(self.high, other.high)
        )

    def __floordiv__(self, other: object) -> _Traced:
        by = _divisor(other)
        one, times = self._moved_above(by)
        name, number = ("shift", by.bit_length() - 1) if by & (by - 1) == 0 else ("floordiv", by)
        found = _of_two(name, (one, _number(number)), one.low // by, one.high // by)
        return found - times if times else found

    def __mod__(self, other: object) -> _Traced:
        by = _divisor(other)
        one, _ = self._moved_above(by)
        name, number = ("bits", by - 1) if by & (by - 1) == 0 else ("mod", by)
        return _of_two(name, (one, _number(number)), 0, by - 1)

    def _moved_above(self, by: int) -> tuple[_Traced, int]:
        """This and so many times a number that it is no less than 0, and how many."""
        number = _number(self)
        times = max(0, -(number.low // by))
        return (number + times * by if times else number), times

    def _joined(self, name: str, other: object) -> _Traced:
        """Of two truth values, one of which may be known."""
        if not self.is_bool or not (
            isinstance(other, bool | np.bool_) or (isinstance(other, _Traced) and other.is_bool)
        ):
            raise TypeError("is no truth value")
        if isinstance(other, _Traced):
            return _of_two(name, (self, other), 0, 1, is_bool=True)
        if (name, bool(other)) in (("and", True), ("or", False), ("ne", False)):
            return self
        return _of_two(name, (self, _number(int(other))), 0, 1, is_bool=True)

    def _compared(self, name: str, other: object, *, turned: bool = False) -> _Traced:
        a, b = _number(self), _number(other)
        return _of_two(name, (b, a) if turned else (a, b), 0, 1, is_bool=True)

    __and__, __or__ = partialmethod(_joined, "and"), partialmethod(_joined, "or")
    __xor__ = partialmethod(_joined, "ne")
    __invert__ = partialmethod(_joined, "ne", True)
    __lt__, __le__ = partialmethod(_compared, "lt"), partialmethod(_compared, "le")
    __gt__ = partialmethod(_compared, "lt", turned=True)
    __ge__ = partialmethod(_compared, "le", turned=True)
    __eq__ = partialmethod(_compared, "eq")  # type: ignore[assignment]
    __ne__ = partialmethod(_compared, "ne")  # type: ignore[assignment]
    __radd__, __rmul__, __rand__, __ror__, __rxor__ = __add__, __mul__, __and__, __or__, __xor__


def _of_two(
    name: str, parts: tuple[_Traced, _Traced], low: int, high: int, *, is_bool: bool = False
) -> _Traced:
    a, b = parts
    return _Traced((name, a.expression, b.expression), low, high, is_bool, 1 + a.size + b.size)


def _number(x: object) -> _Traced:
    """An integer; what numpy makes of truth values in sums differs from what others do."""
    if isinstance(x, _Traced) and not x.is_bool:
        return x
    if isinstance(x, int | np.integer) and not isinstance(x, bool):
        return _Traced(int(x), int(x), int(x))
    raise TypeError("is no integer")


def _divisor(x: object) -> int:
    if isinstance(x, int | np.integer) and not isinstance(x, bool) and x > 0:
        return int(x)
    raise TypeError("is no number above 0")
