"""Calls of the kernels for Hopper, whose warps have roles, and of one for what these leave."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ring_jax_gpu._call import Arrays, Launch, arguments_of, kernel_of
from ring_jax_gpu._compiled import HEADS_BEHIND, Made, Parameter, Taken, Tiles, call

_QUERIES, _KEYS = 128, 128  # a block of the forward, of the backward
_HALF = 64  # of a block of queries, what one group of warps takes
_STAGES = 2
_UNEVEN = {"EVEN_Q": False, "EVEN_K": False}
_KEY_HEADS_TOGETHER = 4  # which take turns in the backward, if there are as many
_CHANGED = {"attend": ("out", "lse"), "add_to_keys": ("dq", "dk")}
_DEFAULT_PROCESSORS = 132  # of an H100 or H200


def run(launch: Launch, arrays: Arrays) -> Arrays:
    """Run a launch; returns what it changed."""
    return (_attend if launch.kernel == "attend" else _differentiate)(launch, arrays)


def _attend(launch: Launch, arrays: Arrays) -> Arrays:
    from ring_jax_gpu._hopper import Hot, attend_fast

    q, kv, facts = arrays["q"], arrays["kv"], dict(launch.facts)
    batch, heads, q_len, dim = q.shape
    blocks = -(-q_len // _QUERIES)
    tiles = batch * heads * blocks
    hot = Hot(
        D=dim, ITEMS=facts["ITEMS"], SCALE=facts["SCALE"], BLOCK=128, STAGES=_STAGES,
        FRESH=facts["FRESH"], TURNS=True,
    )  # fmt: skip
    rows, (keys, values) = _tiles(q, _HALF), _key_tiles(kv, hot.BLOCK)
    parameters: dict[str, Parameter] = {
        "q": rows, "k": keys, "v": values, "items": Taken(arrays["items"]),
        "out": _result(arrays["out"], facts["FRESH"], HEADS_BEHIND),
        "lse": _result(arrays["lse"], facts["FRESH"]),
        "flags": Made((batch * heads, 2 * blocks), "int32"),
        # All heads take turns: the rounds of programs even out what is sorted by length.
        **_sizes(q, kv, together=batch * heads),
    }  # fmt: skip
    programs = min(tiles, _processors())
    found = call(attend_fast, parameters, {"facts": hot}, warps=4, programs=programs)
    many = batch * heads * -(-q_len // _HALF)
    return _rest(launch, arrays | found, many, 2 * blocks, BLOCK_Q=_HALF, BLOCK_K=_HALF)


def _differentiate(launch: Launch, arrays: Arrays) -> Arrays:
    from ring_jax_gpu._hopper import Hot
    from ring_jax_gpu._hopper_backward import add_fast

    q, kv, lse, facts = arrays["q"], arrays["kv"], arrays["lse"], dict(launch.facts)
    batch, kv_heads, k_len, _ = kv.shape
    blocks = -(-k_len // _KEYS)
    hot = Hot(
        D=q.shape[3], ITEMS=facts["ITEMS"], SCALE=facts["SCALE"], BLOCK=64, STAGES=_STAGES,
        FRESH=facts["FRESH"], TURNS=False,
    )  # fmt: skip
    keys, values = _key_tiles(kv, _KEYS)
    parameters: dict[str, Parameter] = {
        "q": _tiles(q, hot.BLOCK), "k": keys, "v": values,
        "dout": _tiles(arrays["dout"], hot.BLOCK),
        "mass": _numbers(jnp.where(lse == -jnp.inf, lse, lse * (-1.0 / hot.SCALE)), hot.BLOCK),
        "slant": _numbers(-arrays["delta"], hot.BLOCK),
        "dq": replace(_tiles(arrays["dq"], hot.BLOCK), changes=True),
        "items": Taken(arrays["items"]), "dkv": _result(arrays["dk"], facts["FRESH"], HEADS_BEHIND),
        "flags": Made((batch * kv_heads, blocks), "int32"),
        **_sizes(q, kv, together=math.gcd(batch * kv_heads, _KEY_HEADS_TOGETHER)),
    }  # fmt: skip
    programs = batch * kv_heads * blocks
    found = call(add_fast, parameters, {"facts": hot}, warps=8, programs=programs)
    found["dk"] = found.pop("dkv")
    return _rest(launch, arrays | found, programs, blocks, BLOCK_Q=_HALF, BLOCK_K=_KEYS)


def _rest(launch: Launch, arrays: Arrays, programs: int, across: int, **sizes: int) -> Arrays:
    """Do the blocks that flags name, in plain Triton; returns what the launch changed."""
    kernel = kernel_of(launch)
    strides, steps = _heads_behind(launch, arrays)
    numbers = dict(launch.numbers) | strides | {"only_across": across}
    facts = dict(launch.facts) | steps | sizes | _UNEVEN
    rest = replace(launch, facts=tuple(facts.items()), numbers=tuple(numbers.items()))
    arrays = {"only" if name == "flags" else name: x for name, x in arrays.items()}
    known = arguments_of(kernel, rest, arrays, has_copy_engine=False)
    constants = {name: known.pop(name) for name in ("facts", "careful")}
    parameters: dict[str, Parameter] = {}
    for name, x in known.items():
        if hasattr(x, "shape"):
            layout = HEADS_BEHIND if x.ndim == 4 else None
            parameters[name] = Taken(x, changes=name in _CHANGED[launch.kernel], layout=layout)
        else:
            parameters[name] = x
    return call(kernel, parameters, constants, warps=4, programs=programs)


def _heads_behind(launch: Launch, arrays: Arrays) -> tuple[dict[str, int], dict[str, int]]:
    """Strides and steps of arrays ``[B, H, T, D]`` that lie in memory as ``[B, T, H, D]``."""
    strides: dict[str, int] = {}
    steps: dict[str, int] = {}
    (_, heads, q_len, dim), (_, kv_heads, k_len, both) = arrays["q"].shape, arrays["kv"].shape
    queries, keys = (q_len, heads), (k_len, kv_heads)
    shapes = {
        "q": (*queries, dim), "out": (*queries, both - dim), "dq": (*queries, dim),
        **dict.fromkeys(("k", "v", "dk", "dv"), (*keys, both)),
    }  # fmt: skip
    for name, (length, many, row) in shapes.items():
        steps[f"{name.upper()}_STEP"] = many * row
        if f"{name}_batch" in dict(launch.numbers):
            strides |= {f"{name}_batch": length * many * row, f"{name}_head": row}
    return strides, steps


def _sizes(q: Any, kv: Any, *, together: int) -> dict[str, int]:
    (batch, heads, q_len, _), (_, kv_heads, k_len, _) = q.shape, kv.shape
    return {
        "q_len": q_len, "k_len": k_len, "batch": batch, "heads": heads, "group": heads // kv_heads,
        "together": together,
    }  # fmt: skip


def _tiles(x: Any, length: int) -> Taken:
    """``[B, H, T, D]`` as ``[B * T, H * D]``, which it is in memory."""
    batch, heads, tokens, dim = x.shape
    return Taken(x, Tiles((batch * tokens, heads * dim), (length, dim)), layout=HEADS_BEHIND)


def _key_tiles(kv: Any, length: int) -> tuple[Taken, Taken]:
    """Keys and values, which lie side by side."""
    batch, heads, tokens, both = kv.shape
    tiles = Tiles((batch * tokens, heads * both), (length, both // 2))
    return Taken(kv, tiles, layout=HEADS_BEHIND), Taken(kv, tiles, layout=HEADS_BEHIND)


def _numbers(x: Any, length: int) -> Taken:
    """``[B, H, T]`` in blocks, which begin at multiples of 16 bytes as the copy engine wants."""
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % length)))
    return Taken(padded, Tiles((padded.size,), (length,)))


def _result(x: Any, is_fresh: bool, layout: tuple[int, ...] | None = None) -> Parameter:
    if is_fresh:
        return Made(x.shape, x.dtype.name, layout)
    return Taken(x, changes=True, layout=layout)


def _processors() -> int:
    device = jax.local_devices(backend="cuda")[0]
    return int(getattr(device, "core_count", None) or _DEFAULT_PROCESSORS)
