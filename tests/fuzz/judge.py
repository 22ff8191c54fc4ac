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

    def with_rounding(case: Case) -> Compared:
        least = rounding(case)
        return {x: (error, bound + least[x]) for x, (error, bound) in compare(case).items()}

    if (worst := _worst(case, compare(case), np.inf)) <= 1:
        return Verdict(worst, drawn_again=False)
    worst = _worst(case, with_rounding(case), LUCK)
    pooled: Compared = {}
    for n in range(DRAWS):
        for x, (error, bound) in with_rounding(replace(case, name=f"{case.name}-{n}")).items():
            before = pooled.get(x, (0.0, 0.0))
            pooled[x] = max(before[0], error), max(before[1], bound)
    _worst(case, pooled, 1)
    return Verdict(worst, drawn_again=True)


def _worst(case: Case, compared: Compared, allowed: float) -> float:
    """Return the largest error over its tolerance; assert that it is at most ``allowed``."""
    ratios = {
        x: error / bound if bound else np.inf for x, (error, bound) in compared.items() if error
    }
    failures = [
        f"{x}: error {compared[x][0]:.3e}, allowed {compared[x][1]:.3e}"
        for x, ratio in ratios.items()
        if ratio > allowed
    ]
    assert not failures, f"{case.name}: {'; '.join(failures)}"
    return float(max(ratios.values(), default=0.0))


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
    q, k, v, dout = (np.nan_to_num(np.abs(y), posinf=0.0) for y in (q, k, v, dout))
    kept = np.nan_to_num(p * keep)
    dk, dv = (
        y.reshape(case.batch, case.heads[1], group, *y.shape[2:]).sum(axis=2)
        for y in (dx.swapaxes(-1, -2) @ q, kept.swapaxes(-1, -2) @ dout)
    )
    shared = tuple(axis for axis in (0, 1) if case.bias and case.inputs["bias"].shape[axis] == 1)
    terms = {
        "out": kept @ v, "dq": dx @ k, "dk": dk, "dv": dv,
        "lse": np.array(_size(case.expected["lse"]) / _size(lse)),
        "dbias": np.nan_to_num(ds).sum(axis=shared, keepdims=True),
        "dsinks": np.nan_to_num(delta).sum(axis=(0, 2)),
    }  # fmt: skip
    unit = ULPS["float64" if case.dtype == "float64" else "float32"]
    cost = FEW * unit * _size(lse)
    return {name: cost * float(term.max(initial=0)) for name, term in terms.items()}


def _size(x: Any) -> float:
    """Return the largest finite magnitude, at least 1."""
    return max(1.0, float(np.abs(x[np.isfinite(x)]).max(initial=0)))
