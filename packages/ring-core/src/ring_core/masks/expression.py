"""Trace a rule of masks into an expression over positions, whose numbers fit into 32 bits.

Plans evaluate masks by numpy, in 64 bits; devices count in 32, and round fractions differently. So
kernels evaluate no function of a user's, but its expression, and only where no number in it can
leave 32 bits and no fraction enters. The rule is called once with objects that record the operators
applied to them, with bounds. Something they cannot record, such as a table that is looked up, or an
``if``, leaves the mask without an expression; kernels then read what the plan found.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partialmethod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

#: ``"q"``, ``"k"``, a number, or an operator's name and its arguments.
Expression = str | int | tuple[Any, ...]
Operators = Mapping[str, Callable[..., Any]]

#: Operators of expressions. ``floordiv`` and ``mod`` have operands >= 0 and constant divisors > 0,
#: so that rounding down and rounding towards 0 agree; ``shift`` is to the right.
OPERATORS: Operators = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "max": np.maximum,
    "floordiv": operator.floordiv, "mod": operator.mod, "shift": operator.rshift,
    "bits": operator.and_, "lt": operator.lt, "le": operator.le, "eq": operator.eq,
    "ne": operator.ne, "and": operator.and_, "or": operator.or_, "either bits": operator.or_,
    "other bits": operator.xor,
}  # fmt: skip

_LIMIT = 1 << 31
_MOST_PARTS = 256  # a shared part counts at each use, as a kernel would spell it out
_SAMPLED = 64  # positions on each side at which an expression is compared with its mask


class TracedRule(NamedTuple):
    """A mask's rule without documents as an expression, or why it has none.

    Attributes:
        expression: Good for the positions that it was traced for; ``None`` if there is none.
        reason: Why there is none, as in "the predicate" ``reason``.
        size: Its operators and operands, a shared part counted at each use.
    """

    expression: Expression | None
    reason: str = ""
    size: int = 1

    @property
    def short(self) -> Expression | None:
        """The expression, if a kernel may be compiled for it.

        It has at most 256 operators and operands, and no operator on the bits of two positions.
        """
        is_short = isinstance(self.expression, tuple) and self.size <= _MOST_PARTS
        return self.expression if is_short and _is_plain(self.expression) else None


def evaluated(expression: Expression, q: Any, k: Any, operators: Operators = OPERATORS) -> Any:
    """Evaluate an expression at positions ``q`` and ``k``.

    Args:
        expression: As :func:`traced` returns it.
        q, k: Arrays of positions that broadcast, or whatever the operators take.
        operators: A function for each name of ``OPERATORS``; numpy's by default.

    >>> evaluated(("le", "k", ("sub", "q", 2)), 5, 3)
    True
    """
    results: dict[int, Any] = {}  # parts that are shared are evaluated once

    def value_of(part: Expression) -> Any:
        if not isinstance(part, tuple):
            return {"q": q, "k": k}[part] if isinstance(part, str) else part
        if id(part) not in results:
            name, *args = part
            results[id(part)] = operators[name](*map(value_of, args))
        return results[id(part)]

    return value_of(expression)


def traced(
    rule: Callable[[Any, Any], Any], q_span: tuple[int, int], k_span: tuple[int, int]
) -> TracedRule:
    """Return a rule over positions as an expression, for positions inside ``[start, stop)``.

    It has one if it is made of operators on integers alone, all of whose results fit into 32 bits.

    >>> traced(lambda i, j: j - i <= 0, (0, 8), (0, 8)).expression
    ('le', ('sub', 'k', 'q'), 0)
    >>> traced(lambda i, j: j >= 0.6 * i, (0, 8), (0, 8)).reason
    'computes with fractions, which devices round differently'
    """
    try:
        q, k = (_Traced(name, a, b - 1) for name, (a, b) in (("q", q_span), ("k", k_span)))
        result: Any = rule(q, k)
        if isinstance(result, bool | np.bool_):
            return TracedRule(int(result))
        size, expression = result.size if result.is_bool else 0, result.expression
    except _NoExpressionError as error:
        return TracedRule(None, str(error))
    except Exception as error:  # noqa: BLE001 - a rule may fail in any way on what is no array
        return TracedRule(None, f"is not made of operators on integers alone ({error})")
    # A rule may act differently on arrays than on what traced it: compare the two at some
    # positions.
    rows, columns = _sample_span(q_span)[:, None], _sample_span(k_span)
    with np.errstate(all="ignore"):
        same = evaluated(expression, rows, columns) == rule(rows, columns)
    if not size or not np.all(same):
        return TracedRule(None, "does not act on arrays as on single numbers")
    return TracedRule(expression, size=size)


def _is_plain(expression: Expression | None) -> bool:
    """Return True if an expression has no operators on the bits of two numbers."""
    if not isinstance(expression, tuple):
        return True
    name, *args = expression
    is_plain = not name.endswith(" bits") and (name != "bits" or isinstance(args[1], int))
    return is_plain and all(map(_is_plain, args))


def _sample_span(span: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Return positions of a span: its ends, and others at random."""
    positions = np.random.default_rng(0).integers(*span, _SAMPLED)
    positions[:2], positions[-2:] = span[0], span[1] - 1
    return positions


class _NoExpressionError(Exception):
    """A rule has no expression; the message completes "the predicate"."""


_FRACTIONS = "computes with fractions, which devices round differently"


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
        if self.low > self.high:
            raise TypeError("there are no positions")
        if not -_LIMIT <= self.low <= self.high < _LIMIT:
            most = self.low if -self.low > self.high else self.high
            raise _NoExpressionError(f"computes numbers up to {most}, beyond 32 bits")

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

    def __truediv__(self, _: object) -> _Traced:
        raise _NoExpressionError(_FRACTIONS)

    def __mul__(self, other: object) -> _Traced:
        a, b = _number(self), _number(other)
        ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        return _of_two("mul", (a, b), min(ends), max(ends))

    def __pow__(self, other: object) -> _Traced:
        result = self
        for _ in range(_constant(other, least=1) - 1):
            result *= self
        return result

    def __abs__(self) -> _Traced:
        other = -self
        return _of_two(
            "max", (self, other), max(self.low, other.low, 0), max(self.high, other.high)
        )

    def __lshift__(self, other: object) -> _Traced:
        return self * (1 << min(_constant(other, least=0), 64))

    def __rshift__(self, other: object) -> _Traced:
        return self // (1 << min(_constant(other, least=0), 64))

    def __floordiv__(self, other: object) -> _Traced:
        by = _constant(other, least=1)
        dividend, multiples = self._made_nonnegative(by)
        name, number = ("shift", by.bit_length() - 1) if by & (by - 1) == 0 else ("floordiv", by)
        quotient = _of_two(
            name, (dividend, _number(number)), dividend.low // by, dividend.high // by
        )
        return quotient - multiples if multiples else quotient

    def __mod__(self, other: object) -> _Traced:
        by = _constant(other, least=1)
        dividend, _ = self._made_nonnegative(by)
        name, number = ("bits", by - 1) if by & (by - 1) == 0 else ("mod", by)
        return _of_two(name, (dividend, _number(number)), 0, by - 1)

    def _made_nonnegative(self, by: int) -> tuple[_Traced, int]:
        """Add multiples of ``by`` until it cannot be negative; return the sum and how many."""
        number = _number(self)
        multiples = max(0, -(number.low // by))
        return (number + multiples * by if multiples else number), multiples

    def _joined(self, name: str, other: object) -> _Traced:
        """Combine two truth values, one of which may be a constant, or the bits of two integers."""
        if not self.is_bool:
            return self._joined_bits(name, _number(other))
        constant = other if isinstance(other, bool | np.bool_) else None
        if isinstance(other, _Traced) and other.is_bool:
            constant = bool(other.expression) if isinstance(other.expression, int) else None
        elif constant is None:
            raise TypeError("a truth value meets a number")
        if constant is None and isinstance(other, _Traced):
            return _of_two(name, (self, other), 0, 1, is_bool=True)
        if (name, bool(constant)) in (("and", True), ("or", False), ("ne", False)):
            return self
        if name == "ne":
            return _of_two(name, (self, _number(1)), 0, 1, is_bool=True)
        return _Traced(int(name == "or"), 0, 1, is_bool=True)

    def _joined_bits(self, name: str, other: _Traced) -> _Traced:
        """Combine the bits of two integers."""
        # Of results only the sign is looked at: with n bits they are in [-2^n, 2^n).
        least, bits = -1, max(x.bit_length() for x in (self.low, self.high, other.low, other.high))
        if self.low >= 0 and other.low >= 0:
            least = 0
        name = {"and": "bits", "or": "either bits", "ne": "other bits"}[name]
        return _of_two(name, (self, other), least << bits, (1 << bits) - 1)

    def __invert__(self) -> _Traced:
        return self._joined("ne", True) if self.is_bool else -1 - self

    def _compared(self, name: str, other: object, *, turned: bool = False) -> _Traced:
        """Compare two integers; with ``turned`` the operands change places."""
        a, b = _number(self), _number(other)
        return _of_two(name, (b, a) if turned else (a, b), 0, 1, is_bool=True)

    __and__, __or__ = partialmethod(_joined, "and"), partialmethod(_joined, "or")
    __xor__ = partialmethod(_joined, "ne")
    __rtruediv__ = __truediv__
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
    if isinstance(x, float | np.floating):
        raise _NoExpressionError(_FRACTIONS)
    what = "truth values are counted" if isinstance(x, _Traced) else f"meets a {type(x).__name__}"
    raise TypeError(what)


def _constant(x: object, *, least: int) -> int:
    """Return a divisor, or a number of bits, which must be a constant that is large enough."""
    if isinstance(x, int | np.integer) and not isinstance(x, bool) and x >= least:
        return int(x)
    if isinstance(x, float | np.floating):
        raise _NoExpressionError(_FRACTIONS)
    raise TypeError("a divisor or a shift is no constant above 0")
