"""The shift of each row of a bias: subtracted before the softmax, and added back to ``lse``.

Additive masks hold numbers like ``-1e10`` or ``finfo.min``. If every key that a row sees has one,
float32 cannot hold ``-1e10 + log(n)``, and merges and the backward, which start from ``lse``, lose
the ``log(n)``. Softmax does not change when one number is subtracted from all scores of a row. So
the largest finite bias among the keys that a row sees is subtracted from that row, and added back
only to the ``lse`` that a call returns.
"""

from __future__ import annotations

from typing import cast

import jax.numpy as jnp
import numpy as np
from jax import lax

from ring_core.base.arguments import not_none
from ring_core.base.merge import UNSHIFTED_BIAS
from ring_jax.collectives import match_varying, permute, varying_axes
from ring_jax.kernels.rules import shown
from ring_jax.positions import local_positions
from ring_jax.rank_view import ranks_of
from ring_jax.records import Array, CallSpec, Inputs

_MAX_ELEMENTS = 1 << 22  # elements of a bias that are read at once, to bound temporaries


def with_bias_shift(call: CallSpec, x: Inputs) -> Inputs:
    """Return the inputs with ``bias_shift`` set, if their bias needs one.

    It needs none beside sinks, which are logits of the same softmax, nor if the bias is nothing
    but an array mask.
    """
    has_bias = x.bias is not None and x.bias.size > 0 and call.bias_grad
    return (
        x._replace(bias_shift=_largest_visible_bias(call, x)) if has_bias and x.sinks is None else x
    )


def _largest_visible_bias(call: CallSpec, x: Inputs) -> Array:
    """Return the largest finite bias among the keys that each row sees, 0 where there is none.

    It is 0, too, where that is within ``UNSHIFTED_BIAS`` of 0. The result is float32 (float64 for
    float64 calls) ``[B or 1, H or 1, T]``. A row of the bias covers the keys of all ranks, so the
    only message is a gather of segment ids, if there are any.
    """
    bias, k_ids = not_none(x.bias), _ids_of_all_keys(call, x)
    batch, heads, length, keys = bias.shape
    batch = batch if k_ids is None else len(k_ids)
    size = min(max(1, _MAX_ELEMENTS // (batch * heads * keys)), length)
    rank = ranks_of(call).rank()
    positions = local_positions(call.plan.q_layout, rank) + call.plan.q_offset

    def fill_rows(n: Array, shift: Array) -> Array:
        """Return the shifts with those of the ``n``-th piece of rows filled in."""
        # The last piece is moved back to lie inside; rows that it shares with the piece before
        # are computed twice, with the same result.
        start = jnp.minimum(n * size, length - size)
        part = lax.dynamic_slice_in_dim(bias, start, size, axis=2).astype(call.wide)
        visible = _visible_keys(call, lax.dynamic_slice_in_dim(positions, start, size), keys)
        if x.q_ids is not None and k_ids is not None:
            q_ids = lax.dynamic_slice_in_dim(x.q_ids, start, size, axis=1)[:, None, :, None]
            visible = visible & (q_ids == k_ids[:, None, None]) & (q_ids >= 0)
        # Hidden keys do not count: a 0 at one would be the largest where all others have -1e10.
        largest = jnp.where(visible & jnp.isfinite(part), part, -jnp.inf).max(axis=3)
        is_needed = (largest != -jnp.inf) & (jnp.abs(largest) > UNSHIFTED_BIAS)
        largest = jnp.where(is_needed, largest, 0.0)
        return lax.dynamic_update_slice_in_dim(shift, largest, start, axis=2)

    shift = match_varying(jnp.zeros((batch, heads, length), call.wide), varying_axes(x))
    return cast("Array", lax.fori_loop(0, -(-length // size), fill_rows, shift))


def _visible_keys(call: CallSpec, positions: Array, keys: int) -> Array:
    """Return which of all keys the mask shows to queries, bool ``[1, 1, n, S]``.

    ``positions`` are those of the ``n`` queries among the ``keys``, int32 ``[n]``.
    """
    mask, k_pos = call.plan.mask, np.arange(keys, dtype=np.int32)
    visible = shown(call.plan, positions[:, None], jnp.asarray(k_pos)[None])
    if mask.document_offsets is not None:
        number = np.searchsorted(mask.document_offsets, k_pos, side="right")
        documents = jnp.asarray(number.astype(np.int32))
        visible = visible & (documents[positions][:, None] == documents[None])
    return visible[None, None]


def _ids_of_all_keys(call: CallSpec, x: Inputs) -> Array | None:
    """Return the segment ids of all ranks' keys in natural order, int32 ``[B, S]``."""
    if x.k_ids is None:
        return None
    plan = call.plan
    # Gathered in the order of the ranks; columns of a bias lie in natural order.
    ids = ranks_of(call).gather(x.k_ids, 1)
    if plan.k_layout.name == "contiguous":
        return ids
    return permute(ids, plan.k_layout, 1, inverse=True)
