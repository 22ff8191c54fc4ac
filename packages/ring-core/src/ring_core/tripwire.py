"""What is checked of a call while a job runs: how often, which tokens, how close is close enough.

A few rows of each checked call are computed once more, densely and in float64, by the mask's rule
over positions alone. No plan, strategy, transport or kernel takes part, so a fault in one of these
shows, whichever it is.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: The environment variable that switches checks on: ``1``, or ``every:100``.
VARIABLE = "RING_CHECK"

#: Query rows, and keys, of each rank that a checked call takes.
SAMPLES = 4

# As in the tests: twice the error of a plain implementation in the same dtype, a few units in the
# last place of the row's largest result, and where terms cancel so many of the terms themselves.
_ULP = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_FEW, _PER_TERM = 4, 16
# Weights that are rounded before they are multiplied make a sum wrong by numbers of random signs.
# Where a sum has few entries, those of the plain implementation may cancel by chance, and twice its
# error is no bound. So many units of the root of their squares are: seven standard deviations.
_PER_ROUNDING = 2
# What is smaller may be rounded to zero: numbers below the smallest normal one, of float16 below
# some of the smallest there are.
_LEAST = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-22, "bfloat16": 2.0**-126}

Kind = Literal["queries", "keys"]

# Dense bf16 TFLOP/s as makers publish them, by a word of the device's name: the first that fits.
# Of TPUs a chip's, of which a device may be half.
_PEAK_TFLOPS = {
    "B300": 2500.0, "B200": 2500.0, "H200": 989.5, "H100": 989.5, "H800": 989.5, "A100": 312.0,
    "A800": 312.0, "L40S": 362.0, "TPU v4": 275.0, "TPU v5 lite": 197.0, "TPU v5": 459.0,
    "TPU v6 lite": 918.0, "TPU7x": 2307.0,
}  # fmt: skip


@lru_cache(maxsize=16)
def every_of(setting: str | int | None) -> int:
    """Every which call is checked; 0 is none.

    Args:
        setting: A number of calls, or the value of ``RING_CHECK``: ``1``, ``every:100``; ``None``,
            nothing and ``0`` switch checks off.

    Raises:
        ValueError: Something else.
    """
    text = "0" if setting is None else str(setting).strip() or "0"
    number = text.removeprefix("every:")
    plain = text == number and isinstance(setting, str)
    if not number.isdecimal() or (plain and number not in ("0", "1")):
        raise ValueError(
            f"{VARIABLE} must be 1 (check every call), every:N (check each N-th) or 0, got "
            f"{setting!r}"
        )
    return int(number)


def sampled(
    kind: Kind, call: int, rank: int, length: int, count: int = SAMPLES
) -> npt.NDArray[np.int64]:
    """Local indices of the tokens of a rank that are checked, ascending ``[count]``.

    Drawn from the call's number, so that all ranks know them and other calls check others.

    Args:
        kind: What is taken.
        call: The call's number.
        rank: Whose.
        length: Tokens a rank.
        count: How many; the same may be taken twice.
    """
    seed = (call, rank, ("queries", "keys").index(kind))
    return np.sort(np.random.default_rng(seed).integers(length, size=count))


def result_shapes(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """Shapes of what a call returns and of its gradients, from those of its operands."""
    return {"out": (*q[:3], v[3]), "lse": (q[0], q[2], q[1]), "dq": q, "dk": k, "dv": v}


def peak_tflops(device: str) -> float | None:
    """Dense bf16 TFLOP/s that no kernel can exceed, by the device's name; ``None`` if unknown."""
    return next((peak for word, peak in _PEAK_TFLOPS.items() if word in device), None)


class SampledRows(NamedTuple):
    """A result of some rows, three times; float64 ``[rows, H, D]``."""

    got: Floats
    exact: Floats
    plain: Floats  # by a plain implementation in the call's dtype
    terms: Floats  # the size of the terms that add up to it, ``[rows]``
    rounded: Floats | float = 0.0  # root of the sum of squares of the terms with rounded weights

    def worst(self, dtype: str) -> Worst | None:
        """Where the result is farthest beyond its limit; ``None`` where it is within.

        Where the exact result is infinite, and the plain one too, a finite one is wrong; elsewhere
        what is not finite cannot be compared.
        """
        ulp, term_ulp = _ULP[dtype], _ULP["float64" if dtype == "float64" else "float32"]
        known = np.isfinite(self.exact) & np.isfinite(self.plain)
        exact = np.where(known, self.exact, 0)
        plain = np.abs(np.where(known, self.plain, 0) - exact).max(axis=(1, 2), keepdims=True)
        few = _FEW * ulp * np.abs(exact).max(axis=2, keepdims=True)
        limit = 2 * plain + few + _PER_TERM * term_ulp * self.terms[:, None, None] + _LEAST[dtype]
        limit = limit + _PER_ROUNDING * ulp * np.nan_to_num(self.rounded, posinf=0.0)
        with np.errstate(invalid="ignore"):
            error = np.nan_to_num(np.abs(self.got - exact), nan=np.inf)
        beyond = np.where(known & (error > limit), error - limit, 0)
        infinite = np.isinf(self.exact) & (self.plain == self.exact)
        beyond = np.where(infinite & np.isfinite(self.got), np.inf, beyond)
        at = np.unravel_index(int(beyond.argmax()), beyond.shape)
        if beyond[at] == 0:
            return None
        limit = np.broadcast_to(limit, error.shape)
        row, head, dim = map(int, at)
        return Worst(row, head, dim, *(float(x[at]) for x in (self.got, self.exact, limit)))


class Worst(NamedTuple):
    """The entry of a result that is farthest beyond its limit."""

    row: int
    head: int
    dim: int
    got: float
    exact: float
    limit: float

    def describe(self, tensor: str, batch: int, token: int, shape: tuple[int, ...]) -> str:
        """A line for an error's message, of the entry in ``[B, T, H, D]``, or ``[B, H, T]``."""
        at = (self.head, token) if tensor == "lse" else (token, self.head, self.dim)
        return (
            f"{tensor}{[batch, *at]} of {list(shape)} is {self.got!r}, and {self.exact!r} by the dense formula "
            f"in float64 (the error may be {self.limit:.3g})"
        )
