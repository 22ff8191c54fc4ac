"""Ring attention in models made of ``equinox.nn.MultiheadAttention``.

That module computes its attention itself and has no hook for another one. :func:`convert` replaces
every such module of a model by :class:`MultiheadAttention`, with the same parameters under the same
names::

    model = ring_jax.equinox.convert(model, partial(cp.attention, causal=True))

This module imports Equinox; ``import ring_jax`` does not import this module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from ring_core import Mask, UnsupportedError
from ring_jax.adapt import (
    Attention,
    Segments,
    bind,
    check_cache,
    dropout_options,
    is_array,
    mask_options,
    refuse,
)
from ring_jax.records import Array

Heads = tuple[Array, Array, Array]


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """``equinox.nn.MultiheadAttention`` over sequences split over devices.

    Parameters, their names, their order among the model's leaves (and so files written by
    ``eqx.tree_serialise_leaves``) and their initial values are those of Equinox's module.

    Args:
        attention: ``cp.attention`` of a :class:`ring_jax.ContextParallel`, for global arrays, or
            ``functools.partial(ring_jax.ring_attention, axis_name=...)``, inside ``shard_map``.
            Options such as ``causal`` or ``window`` are bound by ``functools.partial``.

    The other arguments are those of Equinox's module.

    Raises:
        ValueError: ``attention`` is something else, or has an unknown option or ``return_lse``
            bound.
    """

    attention: Attention = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: float = 0.0,
        inference: bool = False,
        dtype: Any = None,
        *,
        attention: Attention,
        key: Array,
    ) -> None:
        bind(attention)
        super().__init__(
            num_heads, query_size, key_size, value_size, output_size, qk_size, vo_size,
            use_query_bias, use_key_bias, use_value_bias, use_output_bias, dropout_p, inference,
            dtype, key=key,
        )  # fmt: skip
        self.attention = attention

    def __call__(
        self,
        query: Array,
        key_: Array,
        value: Array,
        mask: Array | Segments | Mask | None = None,
        *,
        key: Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[[Array, Array, Array], Heads] | None = None,
    ) -> Array:
        """Attend; without a batch, as in Equinox: ``jax.vmap`` brings one.

        Args:
            query: ``[T, query_size]``, in layout order: a global array, or this device's shard.
            key_: ``[T_kv, key_size]``.
            value: ``[T_kv, value_size]``.
            mask: A :class:`ring_jax.Segments` of ids ``[T]``, a :class:`ring_core.Mask`, or an
                array ``[T, T_kv]`` or ``[H, T, T_kv]``: rows in layout order, columns for all keys
                in natural order, at most 64 MiB per device.
            key: A random key for dropout, typed or raw; inside ``shard_map`` the same on all
                devices. Its bits are the seed.
            inference: True turns dropout off; ``None`` is ``self.dropout.inference``.
            deterministic: Refused, as Equinox deprecates it: the name is ``inference``.
            process_heads: A function of queries, keys and values ``[T, H, D]`` to apply before
                attention. It gets tokens in the order of the arrays; positions are
                ``cp.positions(T)``.

        Returns:
            ``[T, output_size]``.

        Raises:
            ValueError: An argument is malformed.
            UnsupportedError: An argument cannot be honoured.
        """
        refuse(
            deterministic=(deterministic, f"pass inference={deterministic!r}, as it is called now")
        )
        q, k, v = (
            jax.vmap(project)(x).reshape(x.shape[0], self.num_heads, -1)
            for project, x in (
                (self.query_proj, query), (self.key_proj, key_), (self.value_proj, value),
            )
        )  # fmt: skip
        if process_heads is not None:
            before = (q.shape, k.shape, v.shape)
            q, k, v = process_heads(q, k, v)
            if (q.shape, k.shape, v.shape) != before:
                raise ValueError("process_heads must not change the shape of the heads")
        bound, sizes = bind(self.attention), (q.shape[0], k.shape[0])
        check_cache(bound.options, *sizes, hidden=is_array(mask))
        options = mask_options(bound, mask, (), *sizes) | self._dropout(key, inference)
        out = bound(q[None], k[None], v[None], options)
        return jax.vmap(self.output_proj)(out.reshape(query.shape[0], -1))

    def _dropout(self, key: Array | None, inference: bool | None) -> dict[str, Any]:
        """Return the options of dropout, none if nothing is to be dropped."""
        rate: object = self.dropout.p
        if not isinstance(rate, int | float):
            raise ValueError(
                "dropout.p must be a Python number, known when the call is traced; compile with "
                "eqx.filter_jit"
            )
        if rate == 0 or (self.dropout.inference if inference is None else inference):
            return {}
        if key is None:
            raise ValueError(f"dropout of {rate} needs key, or inference=True")
        return dropout_options(rate, key)


def convert[Model](model: Model, attention: Attention) -> Model:
    """Return the model with every ``equinox.nn.MultiheadAttention`` replaced by ring attention.

    Args:
        model: Any pytree; its arrays are shared, not copied. Modules that were converted before
            get the new attention.
        attention: The attention to use, see :class:`MultiheadAttention`; a causal mask, which
            Equinox takes as an array, is better bound: ``functools.partial(cp.attention,
            causal=True)``.

    Raises:
        ValueError: There is no such module in the model, or ``attention`` is something else, or
            has an unknown option or ``return_lse`` bound.
        UnsupportedError: The model has a subclass of that module, which may compute anything.
    """
    bind(attention)
    converted = []

    def replace_module(part: Any) -> Any:
        if not isinstance(part, eqx.nn.MultiheadAttention):
            return part
        if type(part) not in (eqx.nn.MultiheadAttention, MultiheadAttention):
            raise UnsupportedError(
                f"{type(part).__name__} is a subclass of equinox.nn.MultiheadAttention and cannot "
                f"be converted; call ring_jax.ring_attention in it"
            )
        converted.append(part)
        return _with_attention(part, attention)

    model = jax.tree.map(
        replace_module, model, is_leaf=lambda part: isinstance(part, eqx.nn.MultiheadAttention)
    )
    if not converted:
        raise ValueError("there is no equinox.nn.MultiheadAttention in the model")
    return model


def _with_attention(part: eqx.nn.MultiheadAttention, attention: Attention) -> MultiheadAttention:
    """Copy a module's fields to a :class:`MultiheadAttention` without drawing new parameters."""
    new: MultiheadAttention = object.__new__(MultiheadAttention)
    for field in dataclasses.fields(eqx.nn.MultiheadAttention):
        object.__setattr__(new, field.name, getattr(part, field.name))
    object.__setattr__(new, "attention", attention)
    return new
