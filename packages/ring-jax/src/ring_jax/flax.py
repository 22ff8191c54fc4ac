"""Ring attention for the modules of Flax, NNX and Linen; Flax itself is not imported.

``nnx.MultiHeadAttention`` and ``nn.MultiHeadDotProductAttention`` take any function as their
``attention_fn``; :func:`make_attention_fn` makes one of an attention of this package::

    cp = ring_jax.ContextParallel(mesh, axis_name="cp")
    layer = nnx.MultiHeadAttention(..., attention_fn=make_attention_fn(cp.attention))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ring_core import Mask, checks
from ring_jax.adapt import (
    Attention,
    BoundAttention,
    Segments,
    bind,
    broadcast,
    check_cache,
    check_first_aligned,
    dropout_options,
    flat,
    is_array,
    mask_options,
    precision_of,
    refuse,
)
from ring_jax.records import Array

#: Advice where Flax lets a user replace the matmuls.
EINSUM = "matmuls are the kernel's own; quantise queries, keys and values instead"


def make_attention_fn(attention: Attention) -> Callable[..., Array]:
    """Make an ``attention_fn`` for Flax out of an attention of this package.

    The function takes all arguments of ``nnx.dot_product_attention`` and of Linen's, under their
    names and with their defaults. Tokens are in layout order, on global arrays or, inside
    ``jax.shard_map``, on this device's shard.

    * ``query``, ``key``, ``value``: ``[batch..., T, H, D]`` and ``[batch..., T_kv, K, D]``, with
      any number of batch dimensions and ``H % K == 0``.
    * ``bias``: Added to the scores, ``[batch... or 1, H or 1, T, T_kv]``: rows in layout order,
      columns for all keys in natural order.
    * ``mask``: A :class:`ring_jax.Segments`, a :class:`ring_core.Mask`, an array ``[batch..., 1, 1,
      T_kv]`` that says which keys are no padding, or one with rows, ``[batch... or 1, H or 1, T,
      T_kv]``: in layout order, columns for all keys in natural order, at most 64 MiB per device.
    * ``is_causal``: ``causal``; refused with other numbers of keys than queries, whose first ones
      Flax aligns.
    * ``dropout_rate``, ``dropout_rng``: Dropout, unless ``deterministic``. The seed is made of the
      bits of the key, which may be traced; inside ``shard_map`` it has to be the same everywhere.
    * ``broadcast_dropout``: Refused where something drops: every row and head drops its own.
    * ``dtype``: The dtype that queries, keys and values are cast to; by default the one that all
      of them promote to. ``promote_dtype((q, k, v), dtype=dtype)``, if given, casts in its place.
    * ``force_fp32_for_softmax``: True or false, the softmax runs in float32 (float64 for float64).
    * ``precision``: Refused if neither the default nor, for float32 and float64, the highest,
      which runs.
    * ``module``: Refused: attention weights are never formed (``sow_weights``).
    * ``input_positions``: Refused: rotate before, by ``cp.positions(T)``.
    * ``einsum_dot_general``, ``qk_attn_weights_einsum``, ``attn_weights_value_einsum``: Refused.

    Args:
        attention: ``cp.attention`` of a :class:`ring_jax.ContextParallel`, for global arrays, or
            ``functools.partial(ring_jax.ring_attention, axis_name=...)``, inside ``shard_map``.
            Options that Flax has no name for, such as ``window`` or ``kernel``, are bound by
            ``functools.partial``; an option that is bound and given by a call is a ``ValueError``,
            but for ``causal``, which holds where either sets it. Arrays that are bound, such as
            ``sinks``, get a gradient only if the function is made where it is taken.

    Raises:
        ValueError: ``attention`` is something else, or has an unknown option or ``return_lse``
            bound.

    The function returns ``[batch..., T, H, Dv]`` and raises ``ValueError`` where an argument is
    malformed and :class:`ring_core.UnsupportedError` where it cannot be honoured. A query that sees
    nothing gets zeros, where Flax averages all values.
    """
    bound = bind(attention)

    def attend(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | Segments | Mask | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: lax.PrecisionLike = None,
        module: object = None,
        *,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: object = None,
        qk_attn_weights_einsum: object = None,
        attn_weights_value_einsum: object = None,
        input_positions: Array | None = None,
    ) -> Array:
        has_dropout = not deterministic and dropout_rate > 0
        _check_shapes(query, key, value)
        refuse(
            broadcast_dropout=(
                True if has_dropout and broadcast_dropout else None,
                "every batch row and head drops elements of its own; pass False",
            ),
            precision=precision_of(precision, query.dtype),
            module=(module, "attention weights are never formed; leave sow_weights false"),
            einsum_dot_general=(einsum_dot_general, EINSUM),
            qk_attn_weights_einsum=(qk_attn_weights_einsum, EINSUM),
            attn_weights_value_einsum=(attn_weights_value_einsum, EINSUM),
            input_positions=(
                input_positions, "rotate queries and keys before, by ContextParallel.positions"
            ),
        )  # fmt: skip
        checks.check_flag("is_causal", is_causal)
        checks.check_flag("force_fp32_for_softmax", force_fp32_for_softmax)
        q, k, v = _in_one_dtype((query, key, value), dtype, promote_dtype)
        options = _options(bound, (q, k, v), mask, bias, is_causal=is_causal)
        if has_dropout:
            if dropout_rng is None:
                raise ValueError(f"{dropout_rate=} needs dropout_rng, or deterministic=True")
            options |= dropout_options(dropout_rate, dropout_rng)
        out: Array = bound(flat(q, 3), flat(k, 3), flat(v, 3), options)
        return out.reshape(*q.shape[:-3], *out.shape[1:])

    return attend


def _check_shapes(q: Array, k: Array, v: Array) -> None:
    """Refuse arrays that are not ``[batch..., T, heads, head_dim]`` with one batch."""
    shapes = [x.shape for x in (q, k, v)]
    if min(map(len, shapes)) < 3 or len({shape[:-3] for shape in shapes}) > 1:
        raise ValueError(
            f"query, key and value must be [batch..., sequence, heads, head_dim] and share batch "
            f"dimensions, got shapes {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )


def _options(
    bound: BoundAttention, qkv: tuple[Array, Array, Array], mask: Array | Segments | Mask | None,
    bias: Array | None, *, is_causal: bool,
) -> dict[str, Any]:  # fmt: skip
    """Translate Flax's mask, bias and ``is_causal`` into options of the attention."""
    q, k, _ = qkv
    batch, q_len, k_len = q.shape[:-3], q.shape[-3], k.shape[-3]
    check_first_aligned(q_len, k_len, "Flax", is_causal=is_causal)
    check_cache(bound.options, q_len, k_len, hidden=is_array(mask))
    options = mask_options(bound, mask, batch, q_len, k_len)
    more = {
        "causal": is_causal or None,
        "bias": None if bias is None else broadcast("bias", bias, batch),
    }
    return options | {name: option for name, option in more.items() if option is not None}


def _in_one_dtype(
    arrays: tuple[Array, Array, Array],
    dtype: DTypeLike | None,
    promote_dtype: Callable[..., Any] | None,
) -> tuple[Array, Array, Array]:
    """Cast queries, keys and values to one dtype, as Flax does."""
    if promote_dtype is not None:
        q, k, v = promote_dtype(arrays, dtype=dtype)
    else:
        common = jnp.result_type(*arrays) if dtype is None else dtype
        q, k, v = (jnp.asarray(x, common) for x in arrays)
    return q, k, v
