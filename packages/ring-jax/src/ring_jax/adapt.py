"""Helpers shared by the adapters to other libraries: bound options, masks, refused arguments."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ring_core import Layout, Mask, UnsupportedError
from ring_core.base.arguments import check_foreign_options
from ring_jax.attention import RingAttention
from ring_jax.context import ContextParallel
from ring_jax.positions import local_positions
from ring_jax.prepare import axis_size, int32_ids
from ring_jax.records import Array

Attention = Callable[..., Any]

#: Options, other than ``causal``, that compare positions of queries and keys.
BY_POSITION = ("window", "chunk_size", "cu_seqlens", "mask", "alibi_slopes")


@partial(jax.tree_util.register_dataclass, data_fields=["queries", "keys"], meta_fields=[])
@dataclass(frozen=True)
class Segments:
    """Segment ids, to be passed where a framework takes a ``mask``; a pytree.

    Attributes:
        queries: Integers ``[..., T]``, the leading dimensions being the model's batch: equal ids
            see each other, a negative id is padding, which sees nothing and is not seen. In the
            order of the queries: layout order, on global arrays or on this device's shard.
        keys: Integers ``[..., T_kv]``; ``None`` is ``queries``.
    """

    queries: Array
    keys: Array | None = None


@dataclass(frozen=True)
class BoundAttention:
    """An attention of this package with options bound to it by ``functools.partial``.

    Attributes:
        attention: The bound function, to be called with ``q, k, v`` and further options.
        options: The bound options.
        context: The ``ContextParallel`` that it is a method of; ``None`` inside ``shard_map``.
    """

    attention: Attention
    options: Mapping[str, Any]
    context: ContextParallel | None

    def __call__(self, q: Array, k: Array, v: Array, options: Mapping[str, Any]) -> Any:
        """Attend with the bound options and those of this call.

        Only ``causal`` may be in both, and the call's counts.

        Raises:
            ValueError: Another option is in both.
        """
        both = [name for name in options if name in self.options and name != "causal"]
        if both:
            raise ValueError(
                f"{', '.join(both)}: bound to the attention and passed to the call, too; keep one of "
                f"the two"
            )
        return self.attention(q, k, v, **options)

    def global_length(self, length: int) -> int:
        """Return the number of tokens on all devices, for an array of ``length`` tokens here."""
        return length if self.context is not None else length * axis_size(self.options["axis_name"])

    def positions(self, length: int) -> Array:
        """Return the global position of each token of an array, int32 ``[length]``."""
        if self.context is not None:
            return self.context.positions(length)
        axis, name = self.options["axis_name"], self.options.get("layout", "contiguous")
        layout = Layout(name, self.global_length(length), axis_size(axis))
        return local_positions(layout, jnp.int32(0) if axis is None else lax.axis_index(axis))


def bind(attention: Attention) -> BoundAttention:
    """Split an attention, maybe a ``functools.partial``, into its function and bound options.

    Raises:
        ValueError: It is not an attention of this package, or has an unknown option or
            ``return_lse`` bound.
    """
    bound = attention if isinstance(attention, partial) else partial(attention)
    function: Any = bound.func
    options = bound.keywords
    owner = getattr(function, "__self__", None)
    context = owner if isinstance(owner, ContextParallel) else None
    in_shard_map = isinstance(function, RingAttention) and "axis_name" in options
    if (context is None and not in_shard_map) or bound.args:
        raise ValueError(
            f"attention must be the attention of a ring_jax.ContextParallel, or "
            f"functools.partial(ring_jax.ring_attention, axis_name=...) inside jax.shard_map, with "
            f"options bound by name in functools.partial, got {attention!r}"
        )
    known = inspect.signature(function).parameters
    check_foreign_options(options)
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(f"no option {', '.join(unknown)}; known: {', '.join(known)}")
    if options.get("return_lse"):
        raise ValueError("return_lse must not be bound: a model takes one array from its attention")
    return BoundAttention(attention, options, context)


def dropout_options(rate: float, key: Array) -> dict[str, Any]:
    """Return the options of dropout with rate ``rate``, seeded by the bits of a JAX random key.

    The key may be typed or raw, and traced.
    """
    return {"dropout_p": rate, "dropout_seed": jax.random.bits(key, (2,), jnp.uint32)}


def flat(x: Array, num_kept: int) -> Array:
    """Flatten all dimensions but the last ``num_kept`` into one."""
    return x.reshape(math.prod(x.shape[:-num_kept]), *x.shape[-num_kept:])


def broadcast(name: str, x: Array, batch: tuple[int, ...]) -> Array:
    """Reshape a bias or mask to ``[B or 1, heads, queries, keys]``.

    Args:
        name: The argument's name, for the error.
        x: ``[*batch, heads, queries, keys]``; leading dimensions may be missing or 1.
        batch: The model's batch dimensions, which become one.

    Raises:
        ValueError: Its leading dimensions do not fit the batch.
    """
    x = x.reshape((1,) * (3 - x.ndim) + x.shape)
    x_batch, rest = x.shape[:-3], x.shape[-3:]
    if math.prod(x_batch) == 1:
        return x.reshape(1, *rest)
    if len(x_batch) > len(batch) or any(
        size not in (1, whole) for size, whole in zip(x_batch[::-1], batch[::-1], strict=False)
    ):
        raise ValueError(f"{name} of shape {x.shape} does not fit a batch of {list(batch)}")
    return flat(jnp.broadcast_to(x, (*batch, *rest)), 3)


def mask_options(
    bound: BoundAttention, mask: object, batch: tuple[int, ...], q_len: int, k_len: int
) -> dict[str, Any]:
    """Translate a framework's mask into the options of an attention.

    Args:
        bound: The attention that it is for.
        mask: ``None``, a :class:`Segments`, a :class:`ring_core.Mask`, or an array that is true or
            not 0 where a key is seen: ``[*batch or 1, 1, 1, k_len]``, in the order of the keys
            passed, or with a row for each query or head, ``[*batch or 1, heads or 1, q_len or 1,
            keys or 1]``, and columns for all keys in natural order.
        batch: Leading dimensions of queries and keys.
        q_len: Number of queries in the arrays passed: global, or this device's.
        k_len: Number of keys in them.

    Returns:
        ``mask``, ``segment_ids``, or nothing.

    Raises:
        ValueError: The array does not have such a shape.
    """
    if mask is None:
        return {}
    if isinstance(mask, Mask):
        return {"mask": mask}
    if isinstance(mask, Segments):
        return {"segment_ids": _segment_ids(mask)}
    shown = broadcast("mask", jnp.asarray(mask), batch)
    if shown.shape[1:3] != (1, 1):
        lengths = (q_len, bound.global_length(k_len))
        sizes = [
            length if size == 1 else size
            for size, length in zip(shown.shape[2:], lengths, strict=True)
        ]
        return {"mask": jnp.broadcast_to(shown != 0, (*shown.shape[:2], *sizes))}
    if shown.shape[3] != k_len:
        raise ValueError(f"mask must have a column for each of {k_len} keys, got {shown.shape}")
    return {"segment_ids": ids_of(None, shown[:, 0, 0] != 0, math.prod(batch), q_len, k_len)}


def is_array(mask: object) -> bool:
    """Return True for a mask that is an array, not ``None`` or an object of this package."""
    return mask is not None and not isinstance(mask, Segments | Mask)


def ids_of(
    q_shown: Array | None, k_shown: Array | None, batch: int, q_len: int, k_len: int
) -> tuple[Array, Array]:
    """Return segment ids of queries and keys, int32 ``[batch, length]``: 0, or -1 for padding.

    ``q_shown`` and ``k_shown`` are bool ``[B or 1, T]``, False for padding; ``None`` has none.
    """

    def ids(shown: Array | None, length: int) -> Array:
        number = jnp.int32(0) if shown is None else jnp.where(shown, 0, -1).astype(jnp.int32)
        return jnp.broadcast_to(number, (batch, length))

    return ids(q_shown, q_len), ids(k_shown, k_len)


def check_first_aligned(q_len: int, k_len: int, framework: str, **rules: bool) -> None:
    """Refuse rules over positions for a framework that aligns the first query and the first key.

    This package aligns the last ones, so that the two differ unless the lengths are equal.
    ``rules`` are the framework's arguments by name, true where one is set.

    Raises:
        UnsupportedError: The lengths differ and a rule is set.
    """
    names = [name for name, value in rules.items() if value]
    if names and q_len != k_len:
        raise UnsupportedError(
            f"{', '.join(names)}: with {q_len} queries and {k_len} keys {framework} puts the first "
            f"query at the first key, and this package the last query at the last key. Instead: bind "
            f"mask=ring_core.Mask(causal=True) to the attention, with window=... in it for a window, "
            f"for the latter; ring_core.Mask(predicate=...) for the former"
        )


def check_cache(options: Mapping[str, Any], q_len: int, k_len: int, *, hidden: bool) -> None:
    """Refuse bound rules over positions where an array hides some keys of a cache.

    The positions of the queries are not known then: with ``causal``, several queries would end at
    the last key of the cache, where a single one sees what the array shows. ``hidden`` says that
    there is such an array.

    Raises:
        UnsupportedError: A bound option compares positions, and the lengths differ.
    """
    names = [name for name in BY_POSITION if options.get(name) is not None]
    if options.get("causal") and q_len > 1:
        names.insert(0, "causal")
    if names and hidden and q_len != k_len:
        raise UnsupportedError(
            f"{', '.join(names)}: {q_len} queries meet {k_len} keys of which an array hides some, "
            f"so the positions of the queries are not known. Instead: decode with an attention that "
            f"has none of these bound"
        )


def _segment_ids(segments: Segments) -> Array | tuple[Array, Array]:
    """Return the option ``segment_ids``: int32 ``[B, T]``, or a pair of those."""
    sides = [segments.queries] if segments.keys is None else [segments.queries, segments.keys]
    flat_ids = [flat(int32_ids("Segments", ids), 1) for ids in sides]
    return flat_ids[0] if len(flat_ids) == 1 else (flat_ids[0], flat_ids[1])


def refuse(**arguments: tuple[object, str]) -> None:
    """Raise for arguments of a framework that cannot be honoured.

    Args:
        arguments: By name, the value that the user passed (``None`` if none, or if it can be
            honoured) and advice what to do instead.

    Raises:
        UnsupportedError: Some values are not ``None``; names each, with its advice.
    """
    refused = [
        f"{name}: {advice}" for name, (value, advice) in arguments.items() if value is not None
    ]
    if refused:
        raise UnsupportedError("; ".join(refused))


def precision_of(precision: object, dtype: DTypeLike) -> tuple[object, str]:
    """Return the pair that :func:`refuse` takes for a precision of matmuls.

    The default is honoured, and for float32 and float64 the highest, which is what runs.
    """
    exact = (lax.Precision.HIGHEST, "highest", "float32")
    honoured = [None, "default", lax.Precision.DEFAULT]
    honoured += exact if jnp.dtype(dtype) in (jnp.float32, jnp.float64) else ()
    sides = precision if isinstance(precision, tuple) and len(precision) == 2 else (precision,)
    return None if all(side in honoured for side in sides) else precision, (
        "products of float32 have the highest precision, and 16-bit ones are summed in float32; "
        "leave it out, and cast the inputs to bfloat16 for speed"
    )
