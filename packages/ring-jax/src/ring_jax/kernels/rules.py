"""Evaluate masks on the device: as expressions, or by the tiles that a plan found."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ring_core import Plan
from ring_core.base.arguments import not_none
from ring_core.masks.expression import OPERATORS, Operators, evaluated
from ring_core.plan.tile_mask import TileLookup

_MANY_TILES = "the partial tiles of this predicate take more than 64 MiB"


def shown(plan: Plan, q_pos: Array, k_pos: Array) -> Array:
    """Return which queries see which keys by the mask's rule, booleans of the broadcast shape.

    Documents may count or not: callers compare them. JAX never calls the predicate: its numbers
    have 32 bits, the plan's have 64. One without an expression is looked up in the plan's tiles.

    Args:
        plan: The plan.
        q_pos: Positions of queries among the keys, int32; those of padding see anything.
        k_pos: Positions of keys, int32, which broadcast against ``q_pos``.
    """
    if plan.rule.expression is None and plan.blocks is not None:
        lookup = TileLookup(*map(jnp.asarray, not_none(plan.blocks.lookup)))
        return jnp.asarray(lookup.shown(q_pos - plan.q_offset, k_pos))
    return evaluated_rule(plan, q_pos, k_pos)


def evaluated_rule(plan: Plan, q_pos: Array, k_pos: Array) -> Array:
    """Return what the mask's rule shows as :func:`shown` does, of operators alone."""
    expression = plan.rule.expression
    # Without a predicate a rule has none only beyond positions of 2^30.
    visible = (
        plan.mask.rule(q_pos, k_pos) if expression is None
        else evaluated(expression, q_pos, k_pos, _OPERATORS)
    )  # fmt: skip
    return jnp.broadcast_to(
        jnp.asarray(visible, bool), jnp.broadcast_shapes(q_pos.shape, k_pos.shape)
    )


def predicate_refusal(plan: Plan, *, evaluates: bool, reads_tiles: bool) -> str | None:
    """Return why a kernel cannot compute a plan's predicate; ``None`` if it can, or there is none.

    Args:
        plan: The plan.
        evaluates: The kernel evaluates the expression of a predicate.
        reads_tiles: The kernel reads the tiles that the plan found.
    """
    blocks = plan.blocks
    if blocks is None or (evaluates and blocks.rule.expression is not None):
        return None
    if reads_tiles and blocks.tiles is not None:
        return None
    if not evaluates:
        return (
            f"{_MANY_TILES}. Instead: use kernel='xla', which evaluates a predicate of operators on "
            f"integers block by block"
        )
    many_tiles = f", and {_MANY_TILES}" if reads_tiles else ""
    return (
        f"it evaluates predicates in 32 bits, and this one {blocks.rule.reason}{many_tiles}. Instead: "
        f"write it with operators on integers, inside of 32 bits, such as 10 * j >= 6 * i for "
        f"j >= 0.6 * i"
    )


def _of_integers(operation: Any) -> Any:
    """Return a binary operation of ``lax`` for integers, one of which may be Python's."""
    return lambda x, y: operation(
        *jnp.broadcast_arrays(*map(partial(jnp.asarray, dtype=np.int32), (x, y)))
    )


#: ``floordiv``, ``mod`` and ``shift`` need no care for signs, which JAX's own operators take.
_OPERATORS: Operators = {
    **OPERATORS, "max": jnp.maximum, "floordiv": _of_integers(lax.div), "mod": _of_integers(lax.rem),
    "shift": _of_integers(lax.shift_right_arithmetic),
}  # fmt: skip
