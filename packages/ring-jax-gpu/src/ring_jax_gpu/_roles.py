"""Calls of the kernels for Hopper, whose warps have roles, and of one for what these leave."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ring_core.triton.blocks import FLAGS_TOGETHER
from ring_jax_gpu._call import Arrays, Launch, arguments_of, kernel_of
from ring_jax_gpu._compiled import HEADS_BEHIND, Made, Parameter, Taken, Tiles, call

_QUERIES, _KEYS = 128, 128  # of a block
_MOST_PARTS, _SHORTEST = 16, 4  # parts of a tile, blocks of keys in a part
_HALF = 64  # of a block of queries, what one group of warps takes
_STAGES = 2
_UNEVEN = {"EVEN_Q": False, "EVEN_K": False}
_KEY_HEADS_TOGETHER = 4  # which take turns in the backward, if there are as many
_CHANGED = {"attend": ("out", "lse"), "add_to_keys": ("dq", "dk", "dv")}
# Arrays that say how the rows of a parameter lie, by its name in strides and steps.
_ROWS = {
    "q": ("q",), "k": ("kv", "k"), "v": ("kv", "v"), "out": ("out", "dout"), "dq": ("dq",),
    "dk": ("dk",), "dv": ("dv", "dk"),
}  # fmt: skip
_DEFAULT_PROCESSORS = 132  # of an H100 or H200


def run(launch: Launch, arrays: Arrays) -> Arrays:
    """Run a launch; returns what it changed."""
    return (_attend if launch.kernel == "attend" else _differentiate)(launch, arrays)


def _attend(launch: Launch, arrays: Arrays) -> Arrays:
    from ring_jax_gpu._hopper import attend_fast
    from ring_jax_gpu._hopper_common import Hot

    q, facts, programs = arrays["q"], dict(launch.facts), _processors()
    batch, heads, q_len, dim = q.shape
    across = 2 * -(-q_len // _QUERIES)  # flags of a head
    split, each = 0, 1
    if launch.is_full and facts["ITEMS"] == 1:
        tiles, length = batch * heads * across // 2, -(-_keys(arrays).shape[2] // _KEYS)
        split, each = shared_tiles(tiles, length, programs)
    hot = Hot(
        D=dim, ITEMS=facts["ITEMS"], SCALE=facts["SCALE"], BLOCK=_KEYS, STAGES=_STAGES,
        FRESH=facts["FRESH"], BESIDE=facts["BESIDE"], TURNS=True, SHARED=split > 0,
    )  # fmt: skip
    before = arrays.get("before")
    marks = jnp.zeros(batch * heads * across + 1 + 2 * split, jnp.int32)
    parameters: dict[str, Parameter] = {
        "q": _tiles(q, _HALF), **_key_tiles(arrays, hot.BLOCK), "items": Taken(arrays["items"]),
        "marks": Taken(marks, changes=True),
        "before": None if before is None else Taken(before, layout=HEADS_BEHIND),
        "lse": _result(arrays["lse"], facts["FRESH"]),
        "out": _result(arrays["out"], facts["FRESH"] or before is not None, HEADS_BEHIND),
        "parts": Made((split * each, 2, _HALF, dim), "float32") if split else None,
        "sums": Made((split * each, 2, 2, _HALF), "float32") if split else None,
        **_sizes(arrays), "split": split, "each": each,
    }  # fmt: skip
    found = call(attend_fast, parameters, {"facts": hot}, warps=4, programs=programs)
    arrays = arrays | {"out": found["out"], "lse": found["lse"], "only": found["marks"]}
    many = batch * heads * across
    numbers = {"only_across": across, "only_many": many}
    return _rest(launch, arrays, numbers, -(-many // FLAGS_TOGETHER), _HALF, _HALF)


def shared_tiles(tiles: int, length: int, programs: int) -> tuple[int, int]:
    """How many of the last tiles programs share, and in how many parts each.

    Tiles of the same ``length`` in blocks of keys take as many rounds as the program with most of
    them has. Those of a round that is not full are cut, if that makes it shorter.
    """
    left = tiles % programs
    if left == 0:
        return 0, 1
    wanted = programs // left
    if wanted == 1:  # two rounds of thirds
        wanted = 3 if 3 * left <= 2 * programs and length >= 3 * _SHORTEST else 1
    each = min(wanted, length // _SHORTEST, _MOST_PARTS)
    return (left, each) if each > 1 else (0, 1)


def _differentiate(launch: Launch, arrays: Arrays) -> Arrays:
    from ring_jax_gpu._hopper_backward import add_fast
    from ring_jax_gpu._hopper_common import Hot

    q, lse, facts = arrays["q"], arrays["lse"], dict(launch.facts)
    sizes = _sizes(arrays)
    many = sizes["batch"] * sizes["heads"] // sizes["group"]
    blocks = -(-sizes["k_len"] // _KEYS)
    hot = Hot(
        D=q.shape[3], ITEMS=facts["ITEMS"], SCALE=facts["SCALE"], BLOCK=64, STAGES=_STAGES,
        FRESH=facts["FRESH"], BESIDE=facts["BESIDE"], TURNS=False, SHARED=False,
    )  # fmt: skip
    dv = arrays.get("dv")
    parameters: dict[str, Parameter] = {
        "q": _tiles(q, hot.BLOCK), **_key_tiles(arrays, _KEYS),
        "dout": _tiles(arrays["dout"], hot.BLOCK),
        "mass": _numbers(jnp.where(lse == -jnp.inf, lse, lse * (-1.0 / hot.SCALE)), hot.BLOCK),
        "slant": _numbers(-arrays["delta"], hot.BLOCK),
        "dq": replace(_tiles(arrays["dq"], hot.BLOCK), changes=True),
        "items": Taken(arrays["items"]), "dk": _result(arrays["dk"], facts["FRESH"], HEADS_BEHIND),
        "dv": None if dv is None else _result(dv, facts["FRESH"], HEADS_BEHIND),
        "flags": Made((many, blocks), "int32"),
        **sizes, "together": math.gcd(many, _KEY_HEADS_TOGETHER),
    }  # fmt: skip
    programs = many * blocks
    found = call(add_fast, parameters, {"facts": hot}, warps=8, programs=programs)
    flags = found.pop("flags")
    arrays = arrays | found | {"only": flags}
    return _rest(launch, arrays, {"only_across": blocks}, programs, _HALF, _KEYS)


def _rest(
    launch: Launch, arrays: Arrays, flags: dict[str, int], programs: int, block_q: int, block_k: int
) -> Arrays:
    """Do the blocks that ``only`` names, in plain Triton; returns what the launch changed."""
    kernel = kernel_of(launch)
    strides, steps = _heads_behind(launch, arrays)
    facts = dict(launch.facts) | steps | {"BLOCK_Q": block_q, "BLOCK_K": block_k} | _UNEVEN
    rest = replace(
        launch,
        facts=tuple(facts.items()),
        numbers=tuple((dict(launch.numbers) | strides | flags).items()),
    )
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
    for name, of in _ROWS.items():
        x = next((arrays[one] for one in of if one in arrays), None)
        if x is None:
            continue
        _, many, length, row = x.shape
        steps[f"{name.upper()}_STEP"] = many * row
        if f"{name}_batch" in dict(launch.numbers):
            strides |= {f"{name}_batch": length * many * row, f"{name}_head": row}
    return strides, steps


def _sizes(arrays: Arrays) -> dict[str, int]:
    (batch, heads, q_len, _), (_, kv_heads, k_len, _) = arrays["q"].shape, _keys(arrays).shape
    return {
        "q_len": q_len, "k_len": k_len, "batch": batch, "heads": heads, "group": heads // kv_heads,
    }  # fmt: skip


def _keys(arrays: Arrays) -> Any:
    """The keys, maybe with their values beside them."""
    return arrays["kv"] if "kv" in arrays else arrays["k"]


def _tiles(x: Any, length: int) -> Taken:
    """``[B, H, T, D]`` as ``[B * T, H * D]``, which it is in memory."""
    batch, heads, tokens, dim = x.shape
    return Taken(x, Tiles((batch * tokens, heads * dim), (length, dim)), layout=HEADS_BEHIND)


def _key_tiles(arrays: Arrays, length: int) -> dict[str, Parameter]:
    """Keys and values, which may lie side by side."""
    dim = arrays["q"].shape[3]
    found: dict[str, Parameter] = {}
    for name in ("k", "v"):
        x = arrays["kv"] if "kv" in arrays else arrays[name]
        batch, heads, tokens, row = x.shape
        tiles = Tiles((batch * tokens, heads * row), (length, dim))
        found[name] = Taken(x, tiles, layout=HEADS_BEHIND)
    return found


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
