"""Decides if an error that exceeds its tolerance is more than bad luck.

The table's tolerance is twice the error of one run of the plain implementation. Among thousands of
small cases some have a plain error that is small by luck, while the backend's is not. Such a case
gets two more chances. First, the tolerance grows by the least that rounding costs: ``lse`` has the
call's precision, so probabilities ``exp(score - lse)`` are exact to a few units in the last place
times ``|lse|``, and so is every sum of terms with them, however much they cancel. Second, the
arrays are drawn again many times, and the largest error of all draws is compared with their
largest tolerance, as if they were one batch: luck does not last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from cases import Case
from tolerances import FEW, ULPS, _masks, _scores

Compared = dict[str, tuple[float, float]]  # error and tolerance of each result

DRAWS = 32
LUCK = 4  # an error of more than so many tolerances is not bad luck


class Verdict(NamedTuple):
    """Largest error over tolerance of an accepted case, and True if it took more draws.

    If it did, the tolerance includes the least that rounding costs.
    """

    ratio: float
    drawn_again: bool


def judge(case: Case, compare: Callable[[Case], Compared]) -> Verdict:
    """Accept the errors of a case.

    Raises:
        AssertionError: An error is beyond its tolerance, and not by bad luck.
    """
    first = compare(case)
    if _worst(first) <= 1:
        return Verdict(_worst(first), drawn_again=False)
    first = _with_rounding(case, first)
    _assert_within(case, first, allowed=LUCK)
    pooled = dict.fromkeys(first, (0.0, 0.0))
    for other in (replace(case, name=f"{case.name}-{n}") for n in range(DRAWS)):
        for name, (error, bound) in _with_rounding(other, compare(other)).items():
            pooled[name] = max(pooled[name][0], error), max(pooled[name][1], bound)
    _assert_within(case, pooled, allowed=1)
    return Verdict(_worst(first), drawn_again=True)


def _worst(compared: Compared) -> float:
    exceeded = [error / bound if bound else np.inf for error, bound in compared.values() if error]
    return float(max(exceeded, default=0.0))


def _assert_within(case: Case, compared: Compared, *, allowed: float) -> None:
    failures = [
        f"{name}: error {error:.3e}, allowed {bound:.3e}"
        for name, (error, bound) in compared.items()
        if error > allowed * bound
    ]
    assert not failures, f"{case.name}: {'; '.join(failures)}"


def _with_rounding(case: Case, compared: Compared) -> Compared:
    least = rounding(case)
    return {name: (error, bound + least[name]) for name, (error, bound) in compared.items()}


@np.errstate(all="ignore")
def rounding(case: Case) -> dict[str, float]:
    """Return the least rounding error of each result: ulps of ``|lse|`` times its terms' size."""
    x: dict[str, Any] = dict(case.inputs)
    group = case.heads[0] // case.heads[1]
    q, k, v, dout = (x[name].swapaxes(1, 2) for name in ("q", "k", "v", "dout"))
    k, v = (y.repeat(group, axis=1) for y in (k, v))
    visible, keep, added, shift = _masks(case, x, np.float64)
    scale = case.dims[0] ** -0.5 if case.softmax_scale is None else case.softmax_scale
    scores, _ = _scores(scale * (q @ k.swapaxes(-1, -2)), case, visible, added)
    lse = case.expected["lse"] - shift
    p = np.where(visible, np.exp(scores - np.where(np.isneginf(lse), 0, lse)[..., None]), 0)
    dp = np.abs(dout @ v.swapaxes(-1, -2)) * keep
    dlse = np.abs(x["dlse"]) if "dlse" in x else np.zeros(())
    delta = (p * dp).sum(axis=-1) + dlse
    ds = p * (dp + delta[..., None])
    # The slope of a soft cap, ``1 - tanh**2``, has an error of a few ulps of 1, even where small.
    dx = np.nan_to_num(ds * abs(scale), posinf=0.0)
    clean = {
        name: np.nan_to_num(np.abs(y), posinf=0.0)
        for name, y in zip("qkvd", (q, k, v, dout), strict=True)
    }
    kept = np.nan_to_num(p * keep)
    rows = np.nan_to_num(delta)
    terms = {
        "out": kept @ clean["v"], "dq": dx @ clean["k"],
        "lse": np.array(_size(case.expected["lse"]) / _size(lse)),
        "dk": _by_kv_head(dx.swapaxes(-1, -2) @ clean["q"], case),
        "dv": _by_kv_head(kept.swapaxes(-1, -2) @ clean["d"], case),
        "dbias": np.nan_to_num(ds).sum(axis=_summed(case), keepdims=True),
        "dsinks": rows.sum(axis=(0, 2)),
    }  # fmt: skip
    unit = ULPS["float64" if case.dtype == "float64" else "float32"]
    cost = FEW * unit * _size(lse)
    return {name: cost * float(term.max(initial=0)) for name, term in terms.items()}


def _size(x: Any) -> float:
    """Return the largest finite magnitude, at least 1."""
    return max(1.0, float(np.abs(x[np.isfinite(x)]).max(initial=0)))


def _by_kv_head(x: Any, case: Case) -> Any:
    return x.reshape(case.batch, case.heads[1], -1, *x.shape[2:]).sum(axis=2)


def _summed(case: Case) -> tuple[int, ...]:
    """Return the dimensions that the bias broadcasts over."""
    shape = case.inputs["bias"].shape if case.bias else (0, 0)
    return tuple(axis for axis in (0, 1) if shape[axis] == 1)
