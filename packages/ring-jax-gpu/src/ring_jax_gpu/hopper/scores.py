"""Options that change scores in the kernels for Hopper: soft cap and ALiBi; see ``dropout``, too.

The kernels keep scores in units of their own: bare products of queries and keys, so that the scale
is part of the exponential. ALiBi's bias is what the products start from. With a soft cap,
``cap tanh(x) = cap - 2 cap r`` with ``r = 1 / (exp(2 x) + 1)``: scores are ``-r``, to which the
bias is added, and ``cap`` is part of ``lse`` alone.
"""


# The arguments and values of kernels have no types in Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ring_jax_gpu.hopper.common import LOG2E


class Options(NamedTuple):
    """The arrays of options: pointers, or ``None`` for options that a call does not have.

    Attributes:
        slopes: float32 ``[B or 1, H]``, ALiBi's.
        slopes_batch: Their stride over batch rows.
        q_at, k_at: float32 ``[T]`` and ``[S]``, positions, which are below 2**24.
        dropout: int32 ``[3 + H]``, see :func:`ring_jax_gpu.hopper.dropout.seed_of`.
        q_index: int32 ``[T]``, indices among the queries.
        k_groups: int32 ``[S / 4]``, indices of keys over 4.
    """

    slopes: Any
    slopes_batch: Any
    q_at: Any
    k_at: Any
    dropout: Any
    q_index: Any
    k_groups: Any


@gluon.jit
def unit_of(consts: gl.constexpr):
    """Return the factor from scores to exponents of 2."""
    return (consts.SCALE if consts.SOFTCAP is None else 2.0 * consts.SOFTCAP) * LOG2E


@gluon.jit
def offset_of_lse(consts: gl.constexpr):
    """Return what is added to scores in exponents of 2."""
    return 0.0 if consts.SOFTCAP is None else consts.SOFTCAP * LOG2E


@gluon.jit
def slope_of(options, flat, heads, consts: gl.constexpr):
    """Return minus the slope of a query head, numbered over all batch rows, in units of scores."""
    slope = 0.0
    if consts.ALIBI:
        row = flat // heads * options.slopes_batch
        slope = gl.load(options.slopes + row + flat % heads) * (-LOG2E / unit_of(consts))
    return slope


@gluon.jit
def positions_of(positions, tokens, length, consts: gl.constexpr):
    """Return the positions of tokens, for ALiBi."""
    at = tokens.to(gl.float32)
    if consts.ALIBI:
        at = gl.load(positions + tokens, mask=tokens < length, other=0.0)
    return at


@gluon.jit
def capped(products, consts: gl.constexpr):
    """Return ``-r`` of capped products; the derivative of ``tanh`` is ``4 r (1 - r)``."""
    grown = gl.exp2(products * (2.0 * LOG2E * consts.SCALE / consts.SOFTCAP))
    # The inverse of infinity is 0, as it should be.
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [-1.0 - grown], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def keep_rate(consts: gl.constexpr):
    """Return the probability to keep a weight."""
    return 1.0 if consts.DROPPED is None else 1.0 - consts.DROPPED / 4294967296.0
