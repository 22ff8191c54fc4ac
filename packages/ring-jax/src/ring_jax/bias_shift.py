"""The shift of each row of a bias: taken off before the softmax, and added back to ``lse``.

Additive masks hold numbers like ``-1e10`` or ``finfo.min``. Where all that a row sees has one,
float32 cannot hold ``-1e10 + log(n)``, and merges and the backward, which start from ``lse``, lose
the ``log(n)``. Softmax stays the same when each row's scores are lowered by one number. So each row
of the bias is lowered by its largest finite number, and only the ``lse`` that a call returns has it
added back.
"""

from __future__ import annotations

from typing import cast

import jax.numpy as jnp
import numpy as np
from jax import lax

from ring_core.base.arguments import not_none
from ring_jax.collectives import Ranks, match_varying, permute, varying_axes
from ring_jax.rank_view import local_positions
from ring_jax.records import Array, Inputs, Static

_MOST = 1 << 22  # numbers of a bias that are looked at together, which bounds temporaries


def with_bias_shift(static: Static, x: Inputs) -> Inputs:
    """Return the inputs of a call with the shift of their bias.

    There is none beside sinks, which are logits of the same softmax, nor where a mask that is an
    array is all there is.
    """
    has_bias = x.bias is not None and x.bias.size > 0 and static.bias_grad
    return x._replace(bias_shift=_largest(static, x)) if has_bias and x.sinks is None else x


def unshifted(lse: Array, shift: Array | None) -> Array:
    """Return ``lse`` of the scores as the caller knows them; ``-inf`` stays."""
    return lse if shift is None else lse + shift


def _largest(static: Static, x: Inputs) -> Array:
    """Return the largest finite bias of the keys that each row sees; 0 where there is none.

    Float32 (float64 for float64 calls) ``[B or 1, H or 1, T]``. A row of the bias holds all ranks'
    keys, and nothing is asked of others but their segment ids.
    """
    bias, k_ids = not_none(x.bias), _ids_of_all_keys(static, x)
    batch, heads, length, keys = bias.shape
    batch = batch if k_ids is None else len(k_ids)
    size = min(max(1, _MOST // (batch * heads * keys)), length)
    rank = Ranks(static.axis_name, static.plan.cp_size).rank()
    positions = local_positions(static.plan.q_layout, rank) + static.plan.q_offset

    def of_rows(n: Array, shift: Array) -> Array:
        start = jnp.minimum(n * size, length - size)  # the last rows are looked at twice
        some = lax.dynamic_slice_in_dim(bias, start, size, axis=2).astype(static.wide)
        seen = _seen(static, lax.dynamic_slice_in_dim(positions, start, size), keys)
        if x.q_ids is not None and k_ids is not None:
            q_ids = lax.dynamic_slice_in_dim(x.q_ids, start, size, axis=1)[:, None, :, None]
            seen = seen & (q_ids == k_ids[:, None, None]) & (q_ids >= 0)
        largest = jnp.where(seen & jnp.isfinite(some), some, -jnp.inf).max(axis=3)
        largest = jnp.where(largest == -jnp.inf, 0.0, largest)
        return lax.dynamic_update_slice_in_dim(shift, largest, start, axis=2)

    shift = match_varying(jnp.zeros((batch, heads, length), static.wide), varying_axes(x))
    return cast("Array", lax.fori_loop(0, -(-length // size), of_rows, shift))


def _seen(static: Static, positions: Array, keys: int) -> Array:
    """Return which of all keys queries at some positions see, bool ``[1, 1, n or 1, S or 1]``."""
    mask, k_pos = static.plan.mask, np.arange(keys, dtype=np.int32)
    seen = jnp.asarray(mask.rule(positions[:, None], jnp.asarray(k_pos)[None]))
    if mask.document_offsets is not None:
        number = np.searchsorted(mask.document_offsets, k_pos, side="right")
        documents = jnp.asarray(number.astype(np.int32))
        seen = seen & (documents[positions][:, None] == documents[None])
    return jnp.atleast_2d(seen)[None, None]


def _ids_of_all_keys(static: Static, x: Inputs) -> Array | None:
    """Return the segment ids of all ranks' keys in natural order, int32 ``[B, S]``."""
    if x.k_ids is None:
        return None
    plan = static.plan
    ids = Ranks(static.axis_name, plan.cp_size).gather(x.k_ids, 1)
    if plan.k_layout.name == "contiguous":
        return ids
    return permute(ids, plan.k_layout, 1, inverse=True)
