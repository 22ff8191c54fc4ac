"""Over which mesh axes arrays vary, inside ``shard_map``."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def match_varying(arrays: Any, axes: frozenset[Any]) -> Any:
    """Mark arrays as varying over mesh axes.

    A replicated array that meets varying ones is copied in spirit to every device; the transpose of
    this mark sums its gradient over the devices, once.
    """

    def mark(x: jax.Array) -> jax.Array:
        missing = axes - _varies_over(x)
        return lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(mark, arrays)


def varying_axes(arrays: Any) -> frozenset[Any]:
    """The mesh axes over which any of the arrays varies."""
    return frozenset().union(*(_varies_over(x) for x in jax.tree.leaves(arrays)))


def _varies_over(x: jax.Array) -> frozenset[Any]:
    kind: Any = jax.typeof(x)
    axes: frozenset[Any] = kind.mat.varying if hasattr(kind, "mat") else kind.vma  # jax < 0.12
    return axes
