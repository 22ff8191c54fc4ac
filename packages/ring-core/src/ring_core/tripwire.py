"""Check attention calls while a job runs: how often, which tokens, how close is close enough.

A few rows of each checked call are computed once more, densely and in float64, by the mask's rule
over positions alone. No plan, strategy, transport or kernel takes part, so a fault in one of these
shows, whichever it is.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Float64s = npt.NDArray[np.float64]

#: The environment variable that switches checks on: ``1``, or ``every:100``.
VARIABLE = "RING_CHECK"

#: Number of query rows, and of keys, of each rank that are recomputed in a checked call.
SAMPLES = 4

# As in the tests: twice the error of a plain implementation in the same dtype, a few units in the
# last place of the row's largest result, and where terms cancel so many of the terms themselves.
_ULP = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_FEW, _PER_TERM = 4, 16
# Weights that are rounded before they are multiplied make a sum wrong by numbers of random signs.
# Where a sum has few entries, those of the plain implementation may cancel by chance, and twice its
# error is no bound. So many units of the root of their squares are: seven standard deviations.
_PER_ROUNDING = 2
# Smaller numbers may be rounded to zero: those below the smallest normal number, in float16 those
# below a few of the smallest subnormal numbers.
_LEAST = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-22, "bfloat16": 2.0**-126}

Kind = Literal["queries", "keys"]

# Dense bf16 TFLOP/s as makers publish them, by a word of the device's name: the first that fits.
# Of TPUs a chip's, of which a device may be half.
_PEAK_TFLOPS = {
    "B300": 2500.0, "B200": 2500.0, "H200": 989.5, "H100": 989.5, "H800": 989.5, "A100": 312.0,
    "A800": 312.0, "L40S": 362.0, "TPU v4": 275.0, "TPU v5 lite": 197.0, "TPU v5": 459.0,
    "TPU v6 lite": 918.0, "TPU7x": 2307.0,
}  # fmt: skip

#: Compute capabilities of the GPUs in that table, in lower case as a command line names them.
CAPABILITIES = {
    "b300": (10, 3), "b200": (10, 0), "h200": (9, 0), "h100": (9, 0), "h800": (9, 0),
    "a100": (8, 0), "a800": (8, 0), "l40s": (8, 9),
}  # fmt: skip


@lru_cache(maxsize=16)
def every_of(setting: str | int | None, variable: str = VARIABLE) -> int:
    """Return ``n`` where every ``n``-th call is to be checked; 0 checks none.

    >>> every_of("every:100"), every_of("1"), every_of(None)
    (100, 1, 0)

    Args:
        setting: A number of calls, or the value of ``RING_CHECK``: ``1``, ``every:100``; ``None``,
            an empty text and ``0`` switch checks off.
        variable: Name of the variable, for messages.

    Raises:
        ValueError: It is anything else.
    """
    text = "0" if setting is None else str(setting).strip() or "0"
    number = text.removeprefix("every:")
    plain = text == number and isinstance(setting, str)
    if not number.isdecimal() or (plain and number not in ("0", "1")):
        raise ValueError(
            f"{variable} must be 1 (check every call), every:N (check each N-th) or 0, got "
            f"{setting!r}"
        )
    return int(number)


def sampled(
    kind: Kind, call: int, rank: int, length: int, count: int = SAMPLES
) -> npt.NDArray[np.int64]:
    """Draw the tokens of a rank that are checked: ascending local indices, int64 ``[count]``.

    The random numbers follow from the arguments, so all ranks know each other's, and other calls
    check other tokens.

    Args:
        kind: ``queries`` or ``keys``.
        call: Number of the call.
        rank: The rank that holds the tokens.
        length: Number of tokens per rank.
        count: Number of tokens to draw; one may be drawn twice.
    """
    seed = (call, rank, ("queries", "keys").index(kind))
    return np.sort(np.random.default_rng(seed).integers(length, size=count))


def result_shapes(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a call's ``out``, ``lse`` and gradients, from those of Q, K and V."""
    return {"out": (*q[:3], v[3]), "lse": (q[0], q[2], q[1]), "dq": q, "dk": k, "dv": v}


def peak_tflops(device: str) -> float | None:
    """Return the dense bf16 TFLOP/s that a device cannot exceed; ``None`` if its name is unknown.

    A checked call that was faster has left out work.

    >>> peak_tflops("NVIDIA H200")
    989.5
    """
    return next((peak for word, peak in _PEAK_TFLOPS.items() if word in device), None)


class SampledRows(NamedTuple):
    """A result (``out``, or a gradient) of some rows, computed in three ways.

    Attributes:
        got: The call's, as float64 ``[rows, H, D]``, as the next two are.
        exact: That of dense attention in float64.
        plain: That of a plain implementation in the call's dtype.
        terms: Size of the terms that add up to the result, ``[rows]``.
        rounded: Root of the sum of squares of the terms whose weights are rounded.
    """

    got: Float64s
    exact: Float64s
    plain: Float64s
    terms: Float64s
    rounded: Float64s | float = 0.0

    def worst(self, dtype: str) -> Worst | None:
        """Return the entry that exceeds its error limit most; ``None`` if no entry does.

        Where the exact and the plain result are the same infinity, a finite one is wrong; other
        entries without finite values to compare with are left out.

        Args:
            dtype: The call's dtype, by which errors are judged.
        """
        ulp, term_ulp = _ULP[dtype], _ULP["float64" if dtype == "float64" else "float32"]
        is_finite = np.isfinite(self.exact) & np.isfinite(self.plain)
        exact = np.where(is_finite, self.exact, 0)
        plain = np.abs(np.where(is_finite, self.plain, 0) - exact).max(axis=(1, 2), keepdims=True)
        rounding = _FEW * ulp * np.abs(exact).max(axis=2, keepdims=True)
        limit = (
            2 * plain + rounding + _PER_TERM * term_ulp * self.terms[:, None, None] + _LEAST[dtype]
        )
        limit = limit + _PER_ROUNDING * ulp * np.nan_to_num(self.rounded, posinf=0.0)
        with np.errstate(invalid="ignore"):
            error = np.nan_to_num(np.abs(self.got - exact), nan=np.inf)
        beyond = np.where(is_finite & (error > limit), error - limit, 0)
        infinite = np.isinf(self.exact) & (self.plain == self.exact)
        beyond = np.where(infinite & np.isfinite(self.got), np.inf, beyond)
        entry = np.unravel_index(int(beyond.argmax()), beyond.shape)
        if beyond[entry] == 0:
            return None
        limit = np.broadcast_to(limit, error.shape)
        row, head, dim = map(int, entry)
        return Worst(row, head, dim, *(float(x[entry]) for x in (self.got, self.exact, limit)))


class Worst(NamedTuple):
    """The entry of a result that exceeds its error limit most.

    Attributes:
        row: Index into the sampled rows.
        head, dim: Head, and element of the head dim.
        got, exact: The call's value, and that of dense attention in float64.
        limit: The largest error that would have been accepted.
    """

    row: int
    head: int
    dim: int
    got: float
    exact: float
    limit: float

    def describe(self, tensor: str, batch: int, token: int, shape: tuple[int, ...]) -> str:
        """Return a line for an error's message.

        Args:
            tensor: Name of the result, as in :func:`result_shapes`.
            batch, token: The row's batch row and local index.
            shape: The result's shape: ``[B, T, H, D]``, of ``lse`` ``[B, H, T]``.
        """
        entry = (self.head, token) if tensor == "lse" else (token, self.head, self.dim)
        return (
            f"{tensor}{[batch, *entry]} of {list(shape)} is {self.got!r}, and {self.exact!r} by the dense formula "
            f"in float64 (the error may be {self.limit:.3g})"
        )
