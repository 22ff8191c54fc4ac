"""Merge partial attention results: the specification that backends fuse and are tested against.

Attention over a set of keys is the pair ``(out, lse)`` with ``lse = log sum exp(logits)`` and
``out`` the softmax-weighted mean of the values. Two disjoint sets merge into the pair of their
union (Rabe and Staats, arXiv 2112.05682; Milakov and Gimelshein, arXiv 1805.02867)::

    lse = log(exp(lse_a) + exp(lse_b))
    out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b
"""

from __future__ import annotations

import numpy as np

from ring_core.base.arguments import Floats, check_floats

#: Largest size of a bias that is not taken off its row. Up to it ``lse`` loses no more digits than
#: beside scores of that size, and kernels that add a bias have one subtraction less to do.
UNSHIFTED_BIAS = 16.0


def merge(out_a: Floats, lse_a: Floats, out_b: Floats, lse_b: Floats) -> tuple[Floats, Floats]:
    """Merge the results of the same queries over two disjoint sets of keys.

    The result is that of attention over both sets. Merging is associative and commutative to
    rounding, with identity ``(0, -inf)``. An output whose ``lse`` is ``-inf`` is never read: it may
    be garbage.

    >>> import numpy as np
    >>> from ring_core import merge
    >>> out_a, lse_a = np.array([[1.0]]), np.log([3.0])  # softmax sums of 3 and 1: 3/4 and 1/4
    >>> out_b, lse_b = np.array([[5.0]]), np.log([1.0])
    >>> out, lse = merge(out_a, lse_a, out_b, lse_b)
    >>> print(out, np.exp(lse))
    [[2.]] [4.]

    Args:
        out_a, out_b: Partial outputs ``[..., T, D]``.
        lse_a, lse_b: Natural logarithms of their softmax denominators, ``[..., T]``.

    Returns:
        ``(out, lse)`` of the same shapes, new arrays of the dtype that the arguments promote to.

    Raises:
        ValueError: Not arrays of floats, or of shapes that do not fit.
    """
    check_floats("lse_a", lse_a)
    check_floats("lse_b", lse_b)
    if lse_a.shape != lse_b.shape:
        raise ValueError(
            f"lse_a and lse_b must have one shape, got {lse_a.shape} and {lse_b.shape}"
        )
    for name, out in (("out_a", out_a), ("out_b", out_b)):
        check_floats(name, out)
        if out.shape[:-1] != lse_a.shape:
            raise ValueError(
                f"{name} must have the shape of lse_a, {lse_a.shape}, and a last dimension, got "
                f"{out.shape}"
            )
    if out_a.shape != out_b.shape:
        raise ValueError(
            f"out_a and out_b must have one shape, got {out_a.shape} and {out_b.shape}"
        )
    # Relative to the larger: one of the two weights is 1, and nothing overflows.
    top = np.maximum(lse_a, lse_b)
    top = np.where(np.isneginf(top), 0, top)
    weight_a, weight_b = np.exp(lse_a - top), np.exp(lse_b - top)
    total = weight_a + weight_b
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = top + np.log(total)
        # A part without visible keys may hold NaN, and 0 * NaN is NaN: it is replaced, not
        # multiplied.
        parts = [
            np.where(np.isneginf(part_lse)[..., None], 0, (weight / total)[..., None] * part)
            for part, part_lse, weight in ((out_a, lse_a, weight_a), (out_b, lse_b, weight_b))
        ]
    return parts[0] + parts[1], lse


def finalize(out: Floats, lse: Floats, sinks: Floats | None = None) -> tuple[Floats, Floats]:
    """Let attention sinks take their share of the softmax: once, after the last merge.

    A sink is one more logit per head that takes softmax mass and yields no value::

        lse' = log(exp(lse) + exp(sink)),   out' = exp(lse - lse') * out

    >>> import numpy as np
    >>> from ring_core import finalize
    >>> out, lse = np.ones((1, 1, 1, 1)), np.zeros((1, 1, 1))  # one key of logit 0, value 1
    >>> finalize(out, lse, sinks=np.zeros(1))[0].item()  # the sink's logit is 0, too: half is left
    0.5

    Args:
        out: ``[B, T, H, D]``.
        lse: ``[B, H, T]``.
        sinks: Logits ``[H]``, or ``[H, n]`` for several per head; ``None`` changes nothing.

    Returns:
        ``(out, lse)`` of the same shapes; ``lse`` includes the sinks. A query that saw no key has
        zeros, and the sinks' ``lse``.

    Raises:
        ValueError: Not arrays of floats, or of shapes that do not fit.
    """
    check_floats("out", out)
    check_floats("lse", lse)
    if out.ndim != 4 or lse.shape != (out.shape[0], out.shape[2], out.shape[1]):
        raise ValueError(
            f"out must be [B, T, H, D] and lse [B, H, T], got shapes {out.shape} and {lse.shape}"
        )
    if sinks is None:
        return out, lse
    check_floats("sinks", sinks)
    if sinks.ndim not in (1, 2) or sinks.shape[0] != out.shape[2] or not sinks.size:
        raise ValueError(
            f"sinks must have shape [{out.shape[2]}] or [{out.shape[2]}, n], got {sinks.shape}"
        )
    folded = sinks if sinks.ndim == 1 else np.logaddexp.reduce(sinks, axis=-1)
    # Once, at the end: in each partial result the sink would be counted as often as there are
    # parts.
    with_sink = np.logaddexp(lse, folded[:, None])
    fully_masked = np.isneginf(lse)
    share = np.exp(np.where(fully_masked, 0, lse) - np.where(fully_masked, 0, with_sink))
    weight = np.swapaxes(np.where(fully_masked, 0, share), 1, 2)[..., None]
    return np.where(weight == 0, 0, weight * out), with_sink
