"""Pad head dims with zeros to the next size that the kernels are fast at.

The copy engine fetches rows of a power of two, and matrix units multiply such; the kernels for
Hopper support 64 and 128. Zeros change no score, and results have further columns only, which are
cropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp

from ring_core.triton.tile_configs import padded_head_dim
from ring_jax.records import (
    Array,
    BackwardInputs,
    CallSpec,
    Grads,
    KeyBlock,
    LaunchSpec,
    QueryBlock,
)

_MIN_PADDED = 32  # smaller head dims gain little from padding


class HeadDims(NamedTuple):
    """Head dim of Q and K, and head dim of V."""

    qk: int
    v: int

    @classmethod
    def of(cls, call: CallSpec, columns: KeyBlock) -> HeadDims:
        """Return the head dims of a call's keys and values."""
        return cls(call.head_dim, columns.kv.shape[3] - call.head_dim)

    @property
    def fast(self) -> HeadDims:
        """Head dims after zero padding to powers of two; small ones stay as they are."""
        return HeadDims(*(padded_head_dim(dim) if dim > _MIN_PADDED else dim for dim in self))

    def split(self, kv: Array) -> tuple[Array, Array]:
        """Split ``[..., D + Dv]`` into keys and values, or into their gradients."""
        return kv[..., : self.qk], kv[..., self.qk :]


def pad_operands(
    dims: HeadDims, target: HeadDims, spec: LaunchSpec, rows: QueryBlock, columns: KeyBlock
) -> tuple[LaunchSpec, QueryBlock, KeyBlock]:
    """Pad the operands of a launch from head dims ``dims`` to head dims ``target``.

    The spec's call gets the padded head dim, and keeps its scale.
    """
    return (
        replace(spec, call=replace(spec.call, head_dim=target.qk)),
        rows._replace(q=pad_dim(rows.q, target.qk)),
        columns._replace(kv=_pad_kv(dims, target, columns.kv)),
    )


def pad_grads(
    dims: HeadDims, target: HeadDims, upstream: BackwardInputs, into: Grads
) -> tuple[BackwardInputs, Grads]:
    """Pad the inputs and the accumulators of a backward from head dims ``dims`` to ``target``."""
    return (
        upstream._replace(dout=pad_dim(upstream.dout, target.v)),
        into._replace(dq=pad_dim(into.dq, target.qk), dkv=_pad_kv(dims, target, into.dkv)),
    )


def crop_grads(dims: HeadDims, target: HeadDims, grads: Grads) -> Grads:
    """Crop gradients at head dims ``target`` back to ``dims``, the reverse of :func:`pad_grads`."""
    dk, dv = target.split(grads.dkv)
    dkv = jnp.concatenate([dk[..., : dims.qk], dv[..., : dims.v]], axis=-1)
    return grads._replace(dq=grads.dq[..., : dims.qk], dkv=dkv)


def _pad_kv(dims: HeadDims, target: HeadDims, kv: Array) -> Array:
    """Pad keys and values that lie side by side, each to its own head dim."""
    k, v = dims.split(kv)
    return jnp.concatenate([pad_dim(k, target.qk), pad_dim(v, target.v)], axis=-1)


def pad_dim(x: Array, dim: int) -> Array:
    """Pad the last dimension with zeros to length ``dim``."""
    missing = dim - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
