"""Head dims that the kernels are slow at: zeros are added up to the next that they are fast at.

The copy engine fetches rows of a power of two, as matrix units multiply them; the kernels for
Hopper have 64 and 128. Zeros change no score, and no column of a result but those that are dropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp

from ring_core.triton.tile_configs import padded
from ring_jax.records import (
    Array,
    BackwardInputs,
    Grads,
    KeyBlock,
    QueryBlock,
    Static,
)

_LEAST = 32  # below there is little to gain


class HeadDims(NamedTuple):
    """Head dims of Q and K, and of V."""

    qk: int
    v: int

    @classmethod
    def of(cls, static: Static, columns: KeyBlock) -> HeadDims:
        """A call's."""
        return cls(static.head_dim, columns.kv.shape[3] - static.head_dim)

    @property
    def fast(self) -> HeadDims:
        """Those to compute at."""
        return HeadDims(*(padded(dim) if dim > _LEAST else dim for dim in self))

    def apart(self, both: Array) -> tuple[Array, Array]:
        """Keys and values, or gradients of theirs, that lie side by side."""
        return both[..., : self.qk], both[..., self.qk :]


def wide_step(
    now: HeadDims, then: HeadDims, static: Static, rows: QueryBlock, columns: KeyBlock
) -> tuple[Static, QueryBlock, KeyBlock]:
    """A step of a call at other head dims."""
    return (
        replace(static, head_dim=then.qk),
        rows._replace(q=wide(rows.q, then.qk)),
        columns._replace(kv=_side_by_side(now, then, columns.kv)),
    )


def wide_grads(
    now: HeadDims, then: HeadDims, upstream: BackwardInputs, into: Grads
) -> tuple[BackwardInputs, Grads]:
    """What a backward starts from, and where it adds its part, at other head dims."""
    return (
        upstream._replace(dout=wide(upstream.dout, then.v)),
        into._replace(dq=wide(into.dq, then.qk), dkv=_side_by_side(now, then, into.dkv)),
    )


def narrow_grads(now: HeadDims, then: HeadDims, found: Grads) -> Grads:
    """Gradients without what was added."""
    dk, dv = then.apart(found.dkv)
    dkv = jnp.concatenate([dk[..., : now.qk], dv[..., : now.v]], axis=-1)
    return found._replace(dq=found.dq[..., : now.qk], dkv=dkv)


def _side_by_side(now: HeadDims, then: HeadDims, both: Array) -> Array:
    k, v = now.apart(both)
    return jnp.concatenate([wide(k, then.qk), wide(v, then.v)], axis=-1)


def wide(x: Array, dim: int) -> Array:
    """Zeros behind the last dimension, up to so many."""
    more = dim - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) if more else x
