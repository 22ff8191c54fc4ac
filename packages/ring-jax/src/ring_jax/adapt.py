"""What the adapters share: an attention with options bound to it, masks, and what is refused."""

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
from ring_jax.kernels import kernel_names
from ring_jax.prepare import axis_size
from ring_jax.rank_view import local_positions
from ring_jax.records import Array

Attention = Callable[..., Any]

BY_POSITION = ("window", "chunk_size", "cu_seqlens", "mask", "alibi_slopes")


@partial(jax.tree_util.register_dataclass, data_fields=["queries", "keys"], meta_fields=[])
@dataclass(frozen=True)
class Segments:
    """Which tokens see each other, passed where a framework takes a ``mask``; a pytree.

    Attributes:
        queries: Integers ``[..., T]``, the leading dimensions being the model's batch: equal ids
            see each other, a negative id is padding, which sees nothing and is not seen. In the
            order of the queries: layout order, on global arrays or on this device's shard.
        keys: Integers ``[..., T_kv]``; ``None`` is ``queries``.
    """

    queries: Array
    keys: Array | None = None


@dataclass(frozen=True)
class Bound:
    """An attention of this package and the options bound to it.

    Attributes:
        attention: What to call with ``q, k, v`` and further options.
        options: Those that are bound.
        context: Whose attention it is, where arrays are global; ``None`` inside ``shard_map``.
        kernels: What ``kernel=`` may name.
    """

    attention: Attention
    options: Mapping[str, Any]
    context: ContextParallel | None
    kernels: tuple[str, ...]

    def __call__(self, q: Array, k: Array, v: Array, given: Mapping[str, Any]) -> Any:
        """Attend with the bound options and those a call has given; ``causal`` may be both.

        Raises:
            ValueError: An option is bound and given.
        """
        both = [name for name in given if name in self.options and name != "causal"]
        if both:
            raise ValueError(
                f"{', '.join(both)}: bound to the attention, and the call says it too; keep one"
            )
        return self.attention(q, k, v, **given)

    def keys(self, length: int) -> int:
        """How many keys there are where an array has ``length``: on all devices."""
        return length if self.context is not None else length * axis_size(self.options["axis_name"])

    def positions(self, length: int) -> Array:
        """Global position of each of the tokens of an array, int32 ``[length]``."""
        if self.context is not None:
            return self.context.positions(length)
        axis, name = self.options["axis_name"], self.options.get("layout", "contiguous")
        layout = Layout(name, self.keys(length), axis_size(axis))
        return local_positions(layout, jnp.int32(0) if axis is None else lax.axis_index(axis))


def bind(attention: Attention) -> Bound:
    """Take an attention apart.

    Raises:
        ValueError: It is none of this package, has an unknown option bound, or ``return_lse``.
    """
    whole = attention if isinstance(attention, partial) else partial(attention)
    function: Any = whole.func
    options = whole.keywords
    owner = getattr(function, "__self__", None)
    context = owner if isinstance(owner, ContextParallel) else None
    in_shard_map = isinstance(function, RingAttention) and "axis_name" in options
    if (context is None and not in_shard_map) or whole.args:
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
    kernels = function.kernels if context is None else context.kernels
    return Bound(attention, options, context, kernel_names(kernels))


def dropout_options(rate: float, key: Array) -> dict[str, Any]:
    """Dropout by a random key, typed or raw, which may be traced: its bits are the seed."""
    return {"dropout_p": rate, "dropout_seed": jax.random.bits(key, (2,), jnp.uint32)}


def flat(x: Array, kept: int) -> Array:
    """All dimensions but the last ``kept`` as one."""
    return x.reshape(math.prod(x.shape[:-kept]), *x.shape[-kept:])


def broadcast(name: str, x: Array, batch: tuple[int, ...]) -> Array:
    """A bias or mask, as far as it goes of ``[*batch, heads, queries, keys]``, as four dimensions.

    Raises:
        ValueError: Its leading dimensions do not fit the batch.
    """
    x = x.reshape((1,) * (3 - x.ndim) + x.shape)
    x_batch, rest = x.shape[:-3], x.shape[-3:]
    if math.prod(x_batch) == 1:
        return x.reshape(1, *rest)
    if len(x_batch) > len(batch) or any(
        size not in (1, wanted) for size, wanted in zip(x_batch[::-1], batch[::-1], strict=False)
    ):
        raise ValueError(f"{name} of shape {x.shape} does not fit a batch of {list(batch)}")
    return flat(jnp.broadcast_to(x, (*batch, *rest)), 3)


def mask_options(
    bound: Bound, mask: object, batch: tuple[int, ...], q_len: int, k_len: int
) -> dict[str, Any]:
    """What a mask means: a rule, segments, which keys are padding, or what each query sees.

    Args:
        bound: The attention that it is for.
        mask: ``None``, a :class:`Segments`, a :class:`ring_core.Mask`, or an array that is true or
            not 0 where a key is seen: ``[*batch or 1, 1, 1, k_len]``, keys as at hand, or with a
            row for each query or head, ``[*batch or 1, heads or 1, q_len or 1, keys or 1]``, and
            columns for all keys in natural order.
        batch: Leading dimensions of queries and keys.
        q_len: How many queries the arrays at hand have.
        k_len: How many keys.

    Raises:
        ValueError: It does not fit.
    """
    if mask is None:
        return {}
    if isinstance(mask, Mask):
        return {"mask": mask}
    if isinstance(mask, Segments):
        return {"segment_ids": _ids_of(mask)}
    shown = broadcast("mask", jnp.asarray(mask), batch)
    if shown.shape[1:3] != (1, 1):
        full = [(q_len, 1), (bound.keys(k_len), 1)]
        sizes = [
            wanted if size == short else size
            for size, (wanted, short) in zip(shown.shape[2:], full, strict=True)
        ]
        return {"mask": jnp.broadcast_to(shown != 0, (*shown.shape[:2], *sizes))}
    if shown.shape[3] != k_len:
        raise ValueError(f"mask must have a column for each of {k_len} keys, got {shown.shape}")
    return {"segment_ids": ids_of(None, shown[:, 0, 0] != 0, math.prod(batch), q_len, k_len)}


def is_array(mask: object) -> bool:
    """Whether a mask is none of ours."""
    return mask is not None and not isinstance(mask, Segments | Mask)


def ids_of(
    q_shown: Array | None, k_shown: Array | None, batch: int, q_len: int, k_len: int
) -> tuple[Array, Array]:
    """Segment ids of queries and keys: 0, and -1 where ``[B or 1, T]`` does not show a token."""

    def ids(shown: Array | None, length: int) -> Array:
        one = jnp.int32(0) if shown is None else jnp.where(shown, 0, -1).astype(jnp.int32)
        return jnp.broadcast_to(one, (batch, length))

    return ids(q_shown, q_len), ids(k_shown, k_len)


def check_first_aligned(q_len: int, k_len: int, framework: str, **rules: bool) -> None:
    """Where a framework pairs the first query with the first key, lengths have to be equal here.

    Raises:
        UnsupportedError: They are not, and a rule was given.
    """
    given = [name for name, value in rules.items() if value]
    if given and q_len != k_len:
        raise UnsupportedError(
            f"{', '.join(given)}: of {q_len} queries and {k_len} keys {framework} takes the first "
            f"two to be at one position, and this package the last two; bind "
            f"mask=ring_core.Mask(causal=True) to the attention for the latter, with window=... in it "
            f"for a window, and ring_core.Mask(predicate=...) for the former"
        )


def check_cache(options: Mapping[str, Any], q_len: int, k_len: int, *, hidden: bool) -> None:
    """Where an array hides the end of a cache, the queries' positions are not known.

    Raises:
        UnsupportedError: A bound option compares positions.
    """
    given = [name for name in BY_POSITION if options.get(name) is not None]
    if given and hidden and q_len != k_len:
        raise UnsupportedError(
            f"{', '.join(given)}: {q_len} queries meet {k_len} keys of which an array hides some, "
            f"so that positions are not known; decode with an attention that has none of these bound"
        )


def _ids_of(segments: Segments) -> Array | tuple[Array, Array]:
    given = [segments.queries] if segments.keys is None else [segments.queries, segments.keys]
    for ids in given:
        if not jnp.issubdtype(jnp.result_type(ids), jnp.integer):
            raise ValueError(f"Segments must be integers, got {jnp.result_type(ids)}")
    flat_ids = [flat(jnp.asarray(ids, jnp.int32), 1) for ids in given]
    return flat_ids[0] if len(flat_ids) == 1 else (flat_ids[0], flat_ids[1])


def refuse(**arguments: tuple[object, str]) -> None:
    """Raise for what was given: each argument is its value, ``None`` if not given, and advice.

    Raises:
        UnsupportedError: Naming every argument that was given and what to do instead.
    """
    given = [
        f"{name}: {advice}" for name, (value, advice) in arguments.items() if value is not None
    ]
    if given:
        raise UnsupportedError("; ".join(given))


def precision_of(precision: object, dtype: DTypeLike) -> tuple[object, str]:
    """What :func:`refuse` takes of a precision of matmuls: the default, and what runs anyway."""
    exact = (lax.Precision.HIGHEST, "highest", "float32")
    taken = [None, "default", lax.Precision.DEFAULT]
    taken += exact if jnp.dtype(dtype) in (jnp.float32, jnp.float64) else ()
    sides = precision if isinstance(precision, tuple) and len(precision) == 2 else (precision,)
    return None if all(side in taken for side in sides) else precision, (
        "products of float32 have the highest precision, and 16-bit ones are summed in float32; "
        "leave it out, and cast the inputs to bfloat16 for speed"
    )
