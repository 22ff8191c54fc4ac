"""Tiny models of Flax NNX, Flax Linen and Equinox, with a choice of attention and of layer loop.

Each is a library's own modules and transformations: blocks of norm and attention, one after another
(``plain``), each with ``remat``, or as one ``scan`` with ``remat`` over stacked layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import lax

from ring_jax.equinox import convert
from ring_jax.flax import make_attention_fn

LAYERS, HEADS, WIDTH, DIM = 2, 4, 12, 32

Array = jax.Array


class Library(NamedTuple):
    """Functional form of a library's model: parameters are a pytree of arrays.

    ``apply(parameters, attention, layers, x, mask)`` runs it: ``attention`` is this package's, or
    ``None`` for the library's own; ``x`` is ``[B, T, width]``; ``mask`` is what that attention
    takes. ``stack`` turns parameters of single layers into those of stacked layers.
    """

    init: Callable[[], Any]
    apply: Callable[[Any, Any, str, Array, Any], Array]
    stack: Callable[[Any], Any]


def stack(layers: Any) -> Any:
    """Stack the arrays of several trees along a new first dimension."""
    return jax.tree.map(lambda *arrays: np.stack(arrays), *layers)


class NnxBlock(nnx.Module):
    """Transformer layer in NNX: norm and attention."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, DIM, num_kv_heads=2, use_bias=False, decode=False, rngs=rngs
        )

    def __call__(self, x: Array, mask: Any) -> Array:
        out: Array = x + self.attention(self.norm(x), mask=mask)
        return out


def nnx_blocks(layers: str) -> Any:
    if layers != "scan":
        rngs = nnx.Rngs(0)
        return nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
    return nnx.split_rngs(splits=LAYERS)(nnx.vmap(NnxBlock))(nnx.Rngs(0))


def nnx_apply(state: Any, attention: Any, layers: str, x: Array, mask: Any) -> Array:
    blocks: Any = nnx.merge(nnx.graphdef(nnx.eval_shape(partial(nnx_blocks, layers))), state)
    for _, module in nnx.iter_graph(blocks):
        if attention is not None and isinstance(module, nnx.MultiHeadAttention):
            module.attention_fn = make_attention_fn(attention)

    def call(block: Any, x: Array) -> Any:
        return block(x, mask)

    if layers != "plain":
        call = nnx.remat(call)
    if layers == "scan":
        scan: Any = nnx.scan(
            lambda x, block: call(block, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        out: Array = scan(x, blocks)
        return out
    for block in blocks:
        x = call(block, x)
    return x


class LinenBlock(linen.Module):
    """Transformer layer in Linen: norm and attention."""

    attention: Any

    @linen.compact
    def __call__(self, x: Array, mask: Any) -> tuple[Array, None]:
        make = partial(linen.MultiHeadDotProductAttention, HEADS, qkv_features=DIM, use_bias=False)
        ring = self.attention is not None
        layer = make(attention_fn=make_attention_fn(self.attention)) if ring else make()
        return x + layer(linen.RMSNorm()(x), mask=mask), None


class LinenModel(linen.Module):
    """Model of Linen layers, in sequence or scanned."""

    attention: Any
    layers: str

    @linen.compact
    def __call__(self, x: Array, mask: Any) -> Array:
        block = LinenBlock if self.layers == "plain" else linen.remat(LinenBlock)
        if self.layers == "scan":
            block = linen.scan(
                block, variable_axes={"params": 0}, split_rngs={"params": True},
                in_axes=linen.broadcast, length=LAYERS,
            )  # fmt: skip
            return block(self.attention, name="layers")(x, mask)[0]
        for number in range(LAYERS):
            x, _ = block(self.attention, name=f"layer{number}")(x, mask)
        return x


class EquinoxBlock(eqx.Module):
    """Transformer layer in Equinox: norm and attention."""

    norm: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention

    def __init__(self, key: Array) -> None:
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(
            HEADS, WIDTH, qk_size=DIM // HEADS, vo_size=DIM // HEADS, key=key
        )

    def __call__(self, x: Array, mask: Any) -> Array:
        y = jax.vmap(self.norm)(x)
        return x + self.attention(y, y, y, mask)


def equinox_blocks(layers: str) -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return eqx.filter_vmap(EquinoxBlock)(keys) if layers == "scan" else [*map(EquinoxBlock, keys)]


def equinox_apply(arrays: Any, attention: Any, layers: str, x: Array, mask: Any) -> Array:
    shapes = eqx.filter_eval_shape(equinox_blocks, layers)
    static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))[1]
    blocks = eqx.combine(arrays, static)
    if attention is not None:
        blocks = convert(blocks, attention)

    def row(x: Array, mask: Any) -> Array:
        def call(block: Any, x: Array) -> Any:
            return block(x, mask) if layers == "plain" else eqx.filter_checkpoint(block)(x, mask)

        if layers != "scan":
            for block in blocks:
                x = call(block, x)
            return x
        changing, fixed = eqx.partition(blocks, eqx.is_array)
        return lax.scan(lambda x, layer: (call(eqx.combine(layer, fixed), x), None), x, changing)[0]

    return jax.vmap(row)(x, mask)


def linen_init() -> Any:
    return LinenModel(None, "plain").init(jax.random.key(0), jnp.zeros((1, 1, WIDTH)), None)


def linen_apply(params: Any, attention: Any, layers: str, x: Array, mask: Any) -> Any:
    out: Any = LinenModel(attention, layers).apply(params, x, mask)
    return out


def linen_stack(params: Any) -> Any:
    return {"params": {"layers": stack(params["params"].values())}}


LIBRARIES = {
    "nnx": Library(
        lambda: nnx.state(nnx_blocks("plain"), nnx.Param), nnx_apply, lambda x: stack(x.values())
    ),
    "linen": Library(linen_init, linen_apply, linen_stack),
    "equinox": Library(
        lambda: eqx.filter(equinox_blocks("plain"), eqx.is_array), equinox_apply, stack
    ),
}
