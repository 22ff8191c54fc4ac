"""Trace a mask's rule into an expression over positions, for kernels that are compiled for one.

The rule is called once with objects that record the operators applied to them. Something they
cannot record, such as a table that is looked up, or an ``if``, leaves the mask without an
expression.
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

#: Operators of expressions. ``floordiv`` and ``mod`` have operands >= 0 and constant divisors > 0,
#: so that rounding down and rounding towards 0 agree.
OPERATORS: Operators = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "max": np.maximum,
    "floordiv": operator.floordiv, "mod": operator.mod, "shift": operator.rshift,
    "bits": operator.and_, "lt": operator.lt, "le": operator.le, "eq": operator.eq,
    "ne": operator.ne, "and": operator.and_, "or": operator.or_,
}  # fmt: skip

_LIMIT = 1 << 31
_MOST_PARTS = 256  # a shared part counts at each use, as a kernel would spell it out
_SAMPLED = 64  # positions on each side at which an expression is compared with its mask


def evaluated(expression: Expression, q: Any, k: Any, operators: Operators = OPERATORS) -> Any:
    """Evaluate an expression at positions ``q`` and ``k``.

    Args:
        expression: As :func:`expression_of` returns it.
        q, k: Arrays of positions that broadcast, or whatever the operators take.
        operators: A function for each name of ``OPERATORS``; numpy's by default.

    >>> evaluated(("le", "k", ("sub", "q", 2)), 5, 3)
    True
    """
    if isinstance(expression, tuple):
        name, *args = expression
        return operators[name](*(evaluated(x, q, k, operators) for x in args))
    return {"q": q, "k": k}[expression] if isinstance(expression, str) else expression


@lru_cache(maxsize=64)
def expression_of(
    mask: Mask, q_span: tuple[int, int], k_span: tuple[int, int]
) -> Expression | None:
    """Return a mask's rule as an expression, good for positions inside two spans ``[start, stop)``.

    All numbers in it fit into 32 bits there. The result is ``None`` if the rule is not made of
    operators on integers alone, has more than 256 operators and operands together, has documents
    (``cu_seqlens``), or has numbers that do not fit; and if a span is empty.

    >>> expression_of(Mask(causal=True), (0, 8), (0, 8))
    ('le', ('sub', 'k', 'q'), 0)
    """
    if mask.cu_seqlens is not None:
        return None
    try:
        q, k = (_Traced(name, a, b - 1) for name, (a, b) in (("q", q_span), ("k", k_span)))
        rule = mask.rule(q, k)
    except Exception:  # noqa: BLE001 - a rule may fail in any way on what is no array
        return None
    if not isinstance(rule, _Traced) or not rule.is_bool:
        return None
    # A rule may act differently on arrays than on what traced it: compare the two at some
    # positions.
    rows, columns = _sample_span(q_span)[:, None], _sample_span(k_span)
    with np.errstate(all="ignore"):
        same = evaluated(rule.expression, rows, columns) == mask.dense(rows[:, 0], columns)
    return rule.expression if np.all(same) else None


def _sample_span(span: tuple[int, int]) -> Ints:
    """Return positions of a span: its ends, and others at random."""
    positions = np.random.default_rng(0).integers(*span, _SAMPLED)
    positions[:2], positions[-2:] = span[0], span[1] - 1
    return positions


@dataclass(frozen=True, eq=False)
class _Traced:
    """An integer with bounds, or a truth value, with the expression that computes it.

    Operators on it make larger ones. The bounds ``low`` and ``high`` show that 32 bits suffice;
    ``size`` counts the operators and operands of the expression.
    """

    expression: Expression
    low: int
    high: int
    is_bool: bool = False
    size: int = 1

    __hash__ = None  # type: ignore[assignment]  # == makes an expression
    __array_ufunc__ = None

    def __post_init__(self) -> None:
        if not -_LIMIT <= self.low <= self.high < _LIMIT:
            raise OverflowError("does not fit in 32 bits")
        if self.size > _MOST_PARTS:
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
        dividend, multiples = self._made_nonnegative(by)
        name, number = ("shift", by.bit_length() - 1) if by & (by - 1) == 0 else ("floordiv", by)
        quotient = _of_two(
            name, (dividend, _number(number)), dividend.low // by, dividend.high // by
        )
        return quotient - multiples if multiples else quotient

    def __mod__(self, other: object) -> _Traced:
        by = _divisor(other)
        dividend, _ = self._made_nonnegative(by)
        name, number = ("bits", by - 1) if by & (by - 1) == 0 else ("mod", by)
        return _of_two(name, (dividend, _number(number)), 0, by - 1)

    def _made_nonnegative(self, by: int) -> tuple[_Traced, int]:
        """Add multiples of ``by`` until it cannot be negative; return the sum and how many."""
        number = _number(self)
        multiples = max(0, -(number.low // by))
        return (number + multiples * by if multiples else number), multiples

    def _joined(self, name: str, other: object) -> _Traced:
        """Combine two truth values, one of which may be a constant."""
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
        """Compare two integers; with ``turned`` the operands change places."""
        a, b = _number(self), _number(other)
        return _of_two(name, (b, a) if turned else (a, b), 0, 1, is_bool=True)

    __and__, __or__ = partialmethod(_joined, "and"), partialmethod(_joined, "or")
    __xor__ = partialmethod(_joined, "ne")
    __invert__ = partialmethod(_joined, "ne", True)
    __lt__, __le__ = partialmethod(_compared, "lt"), partialmethod(_compared, "le")
    __gt__ = partialmethod(_compared, "lt", turned=True)
    __ge__ = partialmethod(_compared, "le", turned=True)
    __eq__ = partialmethod(_compared, "eq")  # type: ignore[assignment]  # returns no bool
    __ne__ = partialmethod(_compared, "ne")  # type: ignore[assignment]  # returns no bool
    __radd__, __rmul__, __rand__, __ror__, __rxor__ = __add__, __mul__, __and__, __or__, __xor__


def _of_two(
    name: str, parts: tuple[_Traced, _Traced], low: int, high: int, *, is_bool: bool = False
) -> _Traced:
    """Return the operator ``name`` applied to two operands, with bounds of its result."""
    a, b = parts
    return _Traced((name, a.expression, b.expression), low, high, is_bool, 1 + a.size + b.size)


def _number(x: object) -> _Traced:
    """Return an integer operand as a traced number.

    Truth values are refused: numpy and the frameworks add them up differently.
    """
    if isinstance(x, _Traced) and not x.is_bool:
        return x
    if isinstance(x, int | np.integer) and not isinstance(x, bool):
        return _Traced(int(x), int(x), int(x))
    raise TypeError("is no integer")


def _divisor(x: object) -> int:
    """Return a divisor, which must be a constant above 0."""
    if isinstance(x, int | np.integer) and not isinstance(x, bool) and x > 0:
        return int(x)
    raise TypeError("is no number above 0")
