"""Tolerances: at most twice the error of a plain implementation in the same dtype.

The plain implementation is a second, dense version of the formula that rounds where a framework
would round: inputs, probabilities and results to the dtype, sums in float32 (float64 for float64).
Like every backward that saves only ``lse``, its backward recomputes the scores, in another order of
operations. With scores of some hundreds the two differ by their rounding, and ``exp(scores - lse)``
cannot be more exact than that. In float64 the oracle rounds like this itself; so that the two do
not share their errors, all sums run in reverse order there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from cases import Case, round_to

from ring_core import philox
from ring_core.reference.item_kernel import masked_matmul

Arrays = dict[str, npt.NDArray[Any]]

# Ulps of the largest result that are always allowed, for plain sums that are exact by luck.
ULPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
FEW = 4

# Half precision is summed in float32. Where the terms cancel (a row that sees itself alone has no
# gradient), what is left is theirs: sums of some tens of numbers around one, not all zeros.
CANCELLED = {"float16": 16 * ULPS["float32"], "bfloat16": 16 * ULPS["float32"]}

# In other dtypes the same, where nothing but what is left is there: all exact results are zeros.
NOTHING = 2.0**-40


@np.errstate(all="ignore")
def plain(case: Case) -> Arrays:
    """Compute the formula in the case's dtype; results are named as in :attr:`Case.expected`."""
    wide, order = (np.float64, -1) if case.dtype == "float64" else (np.float32, 1)
    x: dict[str, Any] = {
        name: array.astype(wide) if array.dtype.kind == "f" else array
        for name, array in case.inputs.items()
    }
    results: dict[str, Any]
    q, k, v, dout = (x[name].swapaxes(1, 2)[..., ::order] for name in ("q", "k", "v", "dout"))
    group = case.heads[0] // case.heads[1]
    k, v = (y[:, :, ::order].repeat(group, axis=1) for y in (k, v))
    *masks, shift = _masks(case, x, wide)
    visible, keep, added = (y[..., ::order] if y.shape else y for y in masks)
    scale = wide(case.softmax_scale if case.softmax_scale is not None else case.dims[0] ** -0.5)
    s, _ = _scores(scale * (q @ k.swapaxes(-1, -2)), case, visible, added)
    sinks = x["sinks"] if "sinks" in x else np.zeros((case.heads[0], 0), wide)
    sinks = sinks.reshape(case.heads[0], 1, -1 if sinks.size else 0)
    logits = np.concatenate([s, np.broadcast_to(sinks, (*s.shape[:3], sinks.shape[-1]))], axis=-1)
    top = _finite(logits.max(axis=-1, keepdims=True))
    lse = (top + np.log(np.exp(logits - top).sum(axis=-1, keepdims=True)))[..., 0]
    safe = _finite(lse)[..., None]
    p = np.where(visible, np.exp(s - safe), 0).astype(wide)
    out = masked_matmul(_rounded(p * keep, case, wide), visible, v)
    again, slope = _scores((scale * q) @ k.swapaxes(-1, -2), case, visible, added)
    p = np.where(visible, np.exp(again - safe), 0).astype(wide)
    kept_weights = _rounded(p * keep, case, wide)
    dp = (dout @ v.swapaxes(-1, -2)) * keep
    delta = (dout * out).sum(-1) - x.get("dlse", wide(0))
    ds: Any = np.where(visible, p * (dp - delta[..., None]), 0).astype(wide)
    dx = _rounded(np.where(visible, ds * slope * scale, 0), case, wide)
    dq = masked_matmul(dx, visible, k)
    dk = masked_matmul(dx.swapaxes(-1, -2), visible.swapaxes(-1, -2), q)
    dv = masked_matmul(kept_weights.swapaxes(-1, -2), visible.swapaxes(-1, -2), dout)
    out, dq, dk, dv = (y[..., ::order] for y in (out, dq, dk, dv))
    dk, dv, ds = dk[:, :, ::order], dv[:, :, ::order], ds[..., ::order]
    dk, dv = (y.reshape(case.batch, case.heads[1], group, *y.shape[2:]).sum(2) for y in (dk, dv))
    sides = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    results = {name: y.swapaxes(1, 2) for name, y in sides.items()}
    if "sinks" in x:
        rows = sink_rows(case, results["out"], lse, wide)
        results["dsinks"] = rows.sum((0, 2)).reshape(x["sinks"].shape)
    if "bias" in x:
        for axis in (0, 1):
            ds = ds.sum(axis=axis, keepdims=True) if x["bias"].shape[axis] == 1 else ds
        results["dbias"] = ds
    results = {name: round_to(value, case.dtype) for name, value in results.items()}
    return results | {"lse": lse + shift}


def _finite(x: Any) -> Any:
    """Return numbers with 0 in the place of -inf."""
    return np.where(np.isneginf(x), 0, x)


def sink_rows(case: Case, out: Any, lse: Any, wide: Any) -> Any:
    """Return each row's contribution to the gradient of the sinks, ``[B, H, T_q, n]``."""
    x = {name: array.astype(wide) for name, array in case.inputs.items() if "ids" not in name}
    delta = (x["dout"] * out).sum(-1).swapaxes(1, 2) - x.get("dlse", wide(0))
    sinks = x["sinks"].reshape(case.heads[0], -1)
    return -(np.exp(sinks[None, :, None, :] - _finite(lse)[..., None]) * delta[..., None])


def _masks(case: Case, x: Arrays, wide: Any) -> tuple[Any, Any, Any, Any]:
    """Return ``(visible, dropout factor, added to logits, row shift)``.

    The first three are ``[B, H, T_q, T_kv]``. The last is what was subtracted from each row's bias,
    ``[B, H, T_q]``, or 0.
    """
    q_pos, k_pos = np.arange(case.seq_len) + case.keys - case.seq_len, np.arange(case.keys)
    shape = (case.batch, case.heads[0], case.seq_len, case.keys)
    visible = np.broadcast_to(case.mask.dense(q_pos, k_pos), shape).copy()
    added, shift = np.zeros((), wide), wide(0)
    if case.segments:
        visible &= (
            (x["q_ids"][:, :, None] == x["k_ids"][:, None]) & (x["q_ids"] >= 0)[:, :, None]
        )[:, None]
    if "shown" in x:
        visible &= x["shown"]
    if "bias" in x:
        visible &= ~np.isneginf(x["bias"])
        bias = x["bias"]
        if "sinks" not in x:
            shift = _row_shift(bias, visible)
            bias = bias - shift[..., None]
        added = added + bias
    if case.alibi is not None:
        slopes = np.atleast_2d(x["alibi_slopes"])[:, :, None, None]
        added = added - slopes * np.abs(q_pos[:, None] - k_pos).astype(wide)
    keep: Any = wide(1)
    if case.dropout_seed is not None:
        keep = philox.dropout_keep(
            case.dropout_p, case.dropout_seed, batch=np.arange(case.batch),
            heads=np.arange(case.heads[0]),
            queries=np.arange(case.seq_len), keys=k_pos,
        ).astype(wide) / wide(1 - case.dropout_p)  # fmt: skip
    return visible, keep, added, shift


def _row_shift(bias: Any, visible: Any) -> Any:
    """Return the largest finite bias that each row sees, ``[B, H, T_q]``; 0 if there is none.

    Softmax does not change if a row's scores are shifted. Without the shift ``lse`` would lose all
    its digits in a row whose biases are all -1e10.
    """
    is_seen = visible & np.isfinite(bias)
    top = np.where(is_seen, bias, -np.inf).max(axis=-1, initial=-np.inf)
    return np.where(is_seen.any(axis=-1), top, 0).astype(bias.dtype)


def _scores(s: Any, case: Case, visible: Any, added: Any) -> tuple[Any, Any]:
    """Return ``(masked scores, slope of the soft cap)`` of scaled products."""
    slope = s.dtype.type(1)
    if case.softcap is not None:
        cap = s.dtype.type(case.softcap)
        squashed = np.tanh(s / cap)
        s, slope = cap * squashed, 1 - squashed**2
    return np.where(visible, s + added, -np.inf).astype(s.dtype), slope


def _rounded(x: Any, case: Case, wide: Any) -> Any:
    return round_to(x, case.dtype).astype(wide) if case.dtype in ("bfloat16", "float16") else x


@dataclass(frozen=True)
class Finding:
    """Comparison of one result with the oracle's."""

    name: str
    bad: int  # entries that are not finite where they should be, or the reverse
    error: float
    bound: float


def findings(case: Case, results: Arrays) -> Iterator[Finding]:
    """Compare a backend's results, which must have the right shapes, with the oracle's."""
    baseline = plain(case)
    for name, expected in case.expected.items():
        dtype = "float32" if name == "lse" and case.dtype != "float64" else case.dtype
        bad, error, bound = compare(results[name], expected, baseline[name], dtype)
        if name == "dsinks":
            bound += 2 * rows_error(case, baseline)
        yield Finding(name, bad, error, bound)


def assert_close(case: Case, results: Arrays) -> None:
    """Assert that all results of a backend are as close to the oracle's as the rule above asks."""
    assert_shapes(case, results)
    failures = [
        f"{x.name}: {x.bad} entries not finite where they should be or the reverse; error {x.error:.3e}, allowed {x.bound:.3e}"
        for x in findings(case, results)
        if x.bad or x.error > x.bound
    ]
    assert not failures, f"{case.name}: " + "; ".join(failures)


def assert_shapes(case: Case, results: Arrays) -> None:
    """Assert that a backend returns exactly the oracle's results, with the oracle's shapes."""
    shapes = {name: x.shape for name, x in case.expected.items()}
    actual = {name: x.shape for name, x in results.items()}
    assert actual == shapes, f"{case.name}: shapes {actual}, expected {shapes}"


def rows_error(case: Case, baseline: Arrays) -> float:
    """Return the plain implementation's summed errors in rows of the sinks' gradient.

    The gradient is one number per head, a sum over all rows. In the plain implementation the
    errors of rows may cancel by luck, and in a backend's they may not.
    """
    wide = np.float64 if case.dtype == "float64" else np.float32
    with np.errstate(all="ignore"):
        exact = sink_rows(case, case.expected["out"], case.expected["lse"], np.float64)
        plain_rows = sink_rows(case, baseline["out"].astype(wide), baseline["lse"], wide)
        errors = np.abs(plain_rows - exact).sum((0, 2))
    return float(np.nan_to_num(errors).max(initial=0))


def compare(result: Any, expected: Any, baseline: Any, dtype: str) -> tuple[int, float, float]:
    """Return the number of entries that are nonfinite in one only, the error and its bound."""
    finite = np.isfinite(expected)
    special = np.where(np.isnan(expected), np.isnan(result), result == expected)
    bad = int(np.count_nonzero(~np.where(finite, np.isfinite(result), special)))
    usable = finite & np.isfinite(result) & np.isfinite(baseline)
    if not usable.any():
        return bad, 0.0, 0.0
    result, expected, baseline = result[usable], expected[usable], baseline[usable]
    error = float(np.abs(result - expected).max())
    plain_error = float(np.abs(baseline - expected).max())
    size = float(np.abs(expected).max())
    size = 1.0 if size < NOTHING else size
    return bad, error, 2 * plain_error + FEW * ULPS[dtype] * size + CANCELLED.get(dtype, 0.0)
