"""Functions of shards as jitted functions of global arrays, cached by their static arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, cast

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ring_core import UnsupportedError
from ring_jax.autodiff import attend
from ring_jax.collectives import AnyMesh, Axes, free, is_explicit, names_of, spread
from ring_jax.kernels.plugins import AbsentKernel
from ring_jax.kernels.xla import XlaKernel
from ring_jax.prepare import prepared
from ring_jax.records import Array, CallSpec, Inputs

_IN_VMAP = (
    "ContextParallel.attention cannot run under jax.vmap(spmd_axis_name=...) along an axis of its mesh. "
    "Instead: use the batch dimension of q, k and v, with batch_axis=...; or call "
    "ring_jax.ring_attention here, inside jax.shard_map"
)
#: Parts of the errors that JAX raises under such a vmap, which differ by mesh, strategy and kernel.
_VMAP_ERRORS = (
    "should be of type `Manual`", "requires varying manual axes to match", "unbound axis name",
    "to be a subset of mesh.axis_names", "ManualAxisType(",
)  # fmt: skip


def attend_global(
    call: CallSpec, inputs: Inputs, mesh: AnyMesh, batch: Axes, heads: Axes
) -> tuple[Array, Array]:
    """Return ``(out, lse)`` of a checked call on global arrays, resharded where they lie otherwise.

    Raises:
        UnsupportedError: This is inside ``jax.vmap(spmd_axis_name=...)`` along an axis of the mesh.
    """
    tokens = cast("str", call.axis_name)
    specs = _specs_of(inputs, batch, tokens, heads)
    # The compiler can shard kernels in plain XLA itself, so axes that the call does not name are
    # left to it; it would replicate the arrays of any other kernel.
    manual = frozenset(mesh.axis_names)
    only_xla = all(isinstance(kernel, XlaKernel | AbsentKernel) for kernel in call.kernels)
    if only_xla and not is_explicit(mesh):
        named = names_of(batch, tokens, heads)
        manual = frozenset(name for name in manual if name in named or mesh.shape[name] == 1)

    def as_input(x: Array, spec: PartitionSpec) -> Array:
        """Reshard an array, leaving batch and heads to axes that are not manual."""
        is_free = len(manual) < len(mesh.axis_names) and x.ndim == 4
        return spread(x, mesh, free(spec, x, (0, 2)) if is_free else spec)

    run = global_attention(call, mesh, batch, heads, specs, manual)
    try:
        return run(jax.tree.map(as_input, inputs, specs))
    # There is no public way to ask for the axes of a vmap.
    except (ValueError, NameError, AssertionError) as error:
        if any(text in str(error) for text in _VMAP_ERRORS):
            raise UnsupportedError(_IN_VMAP) from error
        raise


def _specs_of(x: Inputs, batch: Axes, tokens: str, heads: Axes) -> Inputs:
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
