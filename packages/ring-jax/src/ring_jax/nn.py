"""Ring attention with the signature of ``jax.nn.dot_product_attention``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ring_core import KernelConfig, Mask, checks
from ring_core.base.arguments import is_integer
from ring_jax.adapt import (
    Attention,
    BoundAttention,
    Segments,
    bind,
    broadcast,
    check_cache,
    check_first_aligned,
    flat,
    ids_of,
    is_array,
    mask_options,
)
from ring_jax.prepare import int32_counts
from ring_jax.records import Array


def make_dot_product_attention(attention: Attention) -> Callable[..., Any]:
    """Make a ``jax.nn.dot_product_attention`` for sequences split over devices.

    The function has the signature and the meaning of JAX's. Tokens are in layout order, on global
    arrays or, inside ``jax.shard_map``, on this device's shard.

    * ``query``, ``key``, ``value``: ``[B, T, N, H]`` and ``[B, S, K, H]`` with ``N % K == 0``, or
      all without ``B``; the head dim of ``value`` may differ.
    * ``bias``: ``[B or 1, N or 1, T, S]``, or without leading dimensions: rows in layout order,
      columns for all keys in natural order.
    * ``mask``: Boolean ``[B or 1, N or 1, T or 1, S or 1]``, or without leading dimensions: rows in
      layout order, columns for all keys in natural order, at most 64 MiB per device; with
      ``[B or 1, 1, 1, S]``, padding, columns are as the keys lie. Or a :class:`ring_jax.Segments`
      or :class:`ring_core.Mask`.
    * ``scale``: ``softmax_scale``.
    * ``is_causal``: ``causal``.
    * ``query_seq_lengths``, ``key_value_seq_lengths``: Integers ``[B]``, of the whole sequences;
      tokens behind, in natural order, are padding. They may stand beside an array as ``mask``, of
      which both have to show a key, but not beside a ``Segments`` or a ``Mask``.
    * ``local_window_size``: ``(left, right)`` or both in one, the keys seen on each side besides
      the query's own position.
    * ``implementation``: A kernel of this package, or a :class:`ring_core.KernelConfig`; ``None``
      is the one that is bound to ``attention``, or ``auto``.
    * ``return_residual``: Returns the log-sum-exp too, ``[B, T, N]``, in the dtype of ``key`` and
      without a gradient; ``return_lse`` of the attention itself has float32 and a gradient.

    ``is_causal`` and ``local_window_size`` are refused with other numbers of keys than queries,
    whose first ones JAX aligns, and this package the last. A fully masked query gets zeros and
    a residual of ``-inf``, where JAX's XLA implementation averages all values.

    Args:
        attention: ``cp.attention`` of a :class:`ring_jax.ContextParallel`, for global arrays, or
            ``functools.partial(ring_jax.ring_attention, axis_name=...)``, inside ``shard_map``.
            Other options are bound by ``functools.partial``; one that is bound and given by a call
            is a ``ValueError``, but for ``causal``, which holds where either sets it.

    Raises:
        ValueError: ``attention`` is something else, or has an unknown option or ``return_lse``
            bound.

    The function raises ``ValueError`` where an argument is malformed and
    :class:`ring_core.UnsupportedError` where it cannot be honoured.
    """
    bound = bind(attention)

    def dot_product_attention(
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        bias: ArrayLike | None = None,
        mask: ArrayLike | Segments | Mask | None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        query_seq_lengths: ArrayLike | None = None,
        key_value_seq_lengths: ArrayLike | None = None,
        local_window_size: int | tuple[int, int] | None = None,
        implementation: str | KernelConfig | None = None,
        return_residual: bool = False,
    ) -> Array | tuple[Array, Array]:
        q, k, v = (jnp.asarray(x) for x in (query, key, value))
        batch = q.shape[:-3]
        if any(x.ndim not in (3, 4) or x.shape[:-3] != batch for x in (q, k, v)):
            raise ValueError(
                f"query, key and value must be [batch, sequence, heads, head_dim], or all without "
                f"batch, got shapes {q.shape}, {k.shape} and {v.shape}"
            )
        checks.check_flag("is_causal", is_causal)
        checks.check_flag("return_residual", return_residual)
        check_first_aligned(
            q.shape[-3], k.shape[-3], "JAX", is_causal=is_causal,
            local_window_size=local_window_size is not None,
        )  # fmt: skip
        window = local_window_size
        translated = {
            "causal": is_causal or None,
            "window": (window, window) if is_integer(window) else window,
            "softmax_scale": scale, "kernel": implementation,
            "bias": None if bias is None else broadcast("bias", jnp.asarray(bias), batch),
            "return_lse": return_residual or None,
        }  # fmt: skip
        options = {name: option for name, option in translated.items() if option is not None}
        q, k, v = (flat(x, 3) for x in (q, k, v))
        options |= _mask_and_length_options(
            bound, mask, (query_seq_lengths, key_value_seq_lengths), batch, (q.shape[1], k.shape[1])
        )
        result: Any = bound(q, k, v, options)
        out: Array = result[0] if return_residual else result
        out = out.reshape(*batch, *out.shape[1:])
        if not return_residual:
            return out
        residual: Array = lax.stop_gradient(result[1].swapaxes(1, 2)).astype(k.dtype)
        return out, residual.reshape(*batch, *residual.shape[1:])

    return dot_product_attention


def _mask_and_length_options(
    bound: BoundAttention,
    mask: Any,
    lengths: tuple[ArrayLike | None, ArrayLike | None],
    batch: tuple[int, ...],
    sizes: tuple[int, int],
) -> dict[str, Any]:
    """Translate a mask and the sequence lengths into options of the attention.

    Args:
        bound: The attention.
        mask: The argument ``mask``.
        lengths: The lengths of queries and of keys, integers ``[B]``, or ``None``.
        batch: ``(B,)``, or ``()`` for arrays without a batch.
        sizes: Numbers of queries and of keys in the arrays passed.

    Raises:
        ValueError: The mask is not boolean, or it is a ``Segments`` or a ``Mask`` and there are
            lengths, too.
    """
    if is_array(mask) and jnp.result_type(mask) != jnp.bool_:
        raise ValueError(f"mask must be boolean, got {jnp.result_type(mask)}")
    options = mask_options(bound, mask, batch, *sizes)
    has_lengths = any(length is not None for length in lengths)
    check_cache(bound.options, *sizes, hidden=is_array(mask) or has_lengths)
    if not has_lengths:
        return options
    if options and not is_array(mask):
        raise ValueError("mask and sequence lengths both say what is hidden; keep one")
    rows = batch[0] if batch else 1
    names = ("query_seq_lengths", "key_value_seq_lengths")
    q_shown, k_shown = (
        None if length is None else bound.positions(size)[None] < _lengths(name, length, rows)
        for name, length, size in zip(names, lengths, sizes, strict=True)
    )
    if "segment_ids" in options:
        _, ids = options["segment_ids"]
        k_shown = ids == 0 if k_shown is None else k_shown & (ids == 0)
    return options | {"segment_ids": ids_of(q_shown, k_shown, rows, *sizes)}


def _lengths(name: str, lengths: ArrayLike, rows: int) -> Array:
    """Check sequence lengths, integers ``[B]``, and return them as int32 ``[B, 1]``."""
    array = int32_counts(lengths)
    if array.shape != (rows,) or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers [{rows}], got {array.dtype} {array.shape}")
    return array[:, None]
