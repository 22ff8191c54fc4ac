"""What XLA may run beside what: barriers and data dependencies it cannot undo."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax


def overlap[*Ts](*values: *Ts) -> tuple[*Ts]:
    """Tie arrays that arrive during a kernel to that kernel's results.

    The compiler can then neither hoist all transfers above the first kernel nor sink them below the
    last, as XLA otherwise does on some TPUs.
    """
    return cast("tuple[*Ts]", lax.optimization_barrier(values))


def order_after[M](moved: M, results: Any) -> M:
    """On TPUs the same arrays, one element of which seems to depend on the results of a kernel.

    XLA can be told to remove barriers there (``xla_tpu_aggressive_opt_barrier_removal``); this tie
    stays. For GPUs barriers last until all is scheduled, and a tie would only copy the arrays.
    """
    return cast(
        "M",
        lax.platform_dependent(moved, results, tpu=_order_after, default=lambda moved, _: moved),
    )


def _order_after[M](moved: M, results: Any) -> M:
    never = _opaque_false(results)
    if never is None:
        return moved

    def order(x: jax.Array) -> jax.Array:
        if x.size == 0:
            return x
        at = (0,) * x.ndim
        first = lax.slice(x, at, (1,) * x.ndim)
        return lax.dynamic_update_slice(x, jnp.where(never, jnp.zeros_like(first), first), at)

    return cast("M", jax.tree.map(order, moved))


def reload_after[A](arrays: A, results: Any) -> A:
    """The same arrays, all elements of which seem to depend on the results of a kernel.

    For what is read once, later: nothing is written, and no copy of the arrays is kept until then.
    """
    never = _opaque_false(results)
    if never is None:
        return arrays
    return cast("A", jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), arrays))


def _opaque_false(results: Any) -> jax.Array | None:
    """A condition on results that never holds, though the compiler cannot know that."""
    corners = [x[(0,) * x.ndim] for x in jax.tree.leaves(results) if x.size > 0]
    if not corners:
        return None
    return jnp.stack([jnp.isnan(x) & (x == jnp.inf) for x in corners]).any()
