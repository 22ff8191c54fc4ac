"""Functions of shards as jitted functions of global arrays, cached by their static arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ring_jax.autodiff import attend
from ring_jax.collectives import AnyMesh, Axes
from ring_jax.prepare import prepared
from ring_jax.records import Array, CallSpec, Inputs


def specs_of(x: Inputs, batch: Axes, tokens: str, heads: Axes) -> Inputs:
    """Return the partition spec of each input, given the axes of batch, tokens and heads."""
    q, rows = PartitionSpec(batch, tokens, heads, None), PartitionSpec(batch, tokens)

    def by_rows(x: Array | None) -> PartitionSpec | None:
        if x is None:
            return None
        pairs = zip(x.shape[:2], (batch, heads), strict=True)
        return PartitionSpec(*(None if size == 1 else axis for size, axis in pairs), tokens, None)

    by_batch = x.slopes is not None and x.slopes.ndim == 2
    specs = (
        q, q, q, rows, rows, PartitionSpec(heads), by_rows(x.bias),
        PartitionSpec(*[batch] * by_batch, heads), PartitionSpec(), None, by_rows(x.mask), None,
    )  # fmt: skip
    return Inputs._make(
        None if array is None else spec for array, spec in zip(x, specs, strict=True)
    )


@lru_cache(maxsize=128)
def global_attention(
    call: CallSpec,
    mesh: AnyMesh,
    batch_axis: Axes,
    head_axis: Axes,
    specs: Inputs,
    manual: frozenset[str],
) -> Callable[[Inputs], tuple[Array, Array]]:
    """Return a checked call as one jitted function of global arrays."""

    def local(x: Inputs) -> tuple[Array, Array]:
        batch, heads = (  # global indices of this device's first batch row and query head
            0 if axis is None else lax.axis_index(axis) * x.q.shape[dim]
            for axis, dim in ((batch_axis, 0), (head_axis, 2))
        )
        return attend(call, prepared(call, x, (batch, heads)))

    rows = PartitionSpec(batch_axis, head_axis, call.axis_name)
    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(specs,), out_specs=(specs.q, rows), axis_names=manual
        )
    )


@lru_cache(maxsize=128)
def global_movement(
    function: Callable[..., Any], options: tuple[tuple[str, Any], ...], mesh: AnyMesh,
    spec: PartitionSpec, out: Any, manual: frozenset[str],
) -> Callable[[Array], Any]:  # fmt: skip
    """Return a function of shards as one jitted function of a global array."""
    run = partial(function, **dict(options))
    shards = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=out, axis_names=manual)
    return jax.jit(shards, inline=True)
