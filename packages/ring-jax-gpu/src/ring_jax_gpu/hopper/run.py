"""Calls of the kernels for Hopper, whose warps have roles, and of one for what these leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ring_core.triton.tile_sizes import FLAGS_TOGETHER
from ring_jax_gpu.hopper.ffi import HEADS_BEHIND, Made, Parameter, Taken, Tiles, call
from ring_jax_gpu.hopper.stream_k import (
    KEYS,
    KEYS_A_BLOCK,
    QUERIES,
    QUERIES_A_BLOCK,
    Helped,
    Shares,
    of_keys,
    of_queries,
)
from ring_jax_gpu.launch import ONLY_HOPPER, Arrays, Launch, arguments_of, kernel_of

_HALF = 64  # of a block of queries, what one group of warps takes
_STAGES = 2
_UNEVEN = {"EVEN_Q": False, "EVEN_K": False}
_KEY_HEADS_TOGETHER, _TILES_TOGETHER = 2, 128  # which take turns in the backward, at least
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
    from ring_jax_gpu.hopper.common import Hot
    from ring_jax_gpu.hopper.forward import attend_fast

    q, facts, programs = arrays["q"], dict(launch.facts), _processors()
    batch, heads, q_len, dim = q.shape
    across = 2 * -(-q_len // QUERIES)  # flags of a head
    shares = {x.q_rank: of_queries(x, batch * heads, programs) for x in launch.rectangles}
    split = max((x.split for x in shares.values()), default=0)
    parts = max((x.split * x.each for x in shares.values()), default=0)
    hot = Hot(
        D=dim, ITEMS=facts["ITEMS"], SCALE=facts["SCALE"], BLOCK=KEYS_A_BLOCK, STAGES=_STAGES,
        FRESH=facts["FRESH"], BESIDE=facts["BESIDE"], TURNS=True, SHARED=split > 0,
    )  # fmt: skip
    before = arrays.get("before")
    marks = jnp.zeros(batch * heads * across + 1 + 2 * split, jnp.int32)
    parameters: dict[str, Parameter] = {
        "q": _tiles(q, _HALF), **_key_tiles(arrays, hot.BLOCK), "items": Taken(arrays["items"]),
        "shares": _looked_up(shares, arrays) if split else None,
        "marks": Taken(marks, changes=True),
        "before": None if before is None else Taken(before, layout=HEADS_BEHIND),
        "lse": _result(arrays["lse"], facts["FRESH"]),
        "out": _result(arrays["out"], facts["FRESH"] or before is not None, HEADS_BEHIND),
        "parts": Made((parts, 2, _HALF, dim), "float32") if split else None,
        "sums": Made((parts, 2, 2, _HALF), "float32") if split else None,
        **_sizes(arrays), "together": dict(launch.numbers)["together"],
    }  # fmt: skip
    found = call(attend_fast, parameters, {"facts": hot}, warps=4, programs=programs)
    arrays = arrays | {"out": found["out"], "lse": found["lse"], "only": found["marks"]}
    many = batch * heads * across
    numbers = {"only_across": across, "only_many": many}
    return _rest(launch, arrays, numbers, -(-many // FLAGS_TOGETHER), _HALF, _HALF)


def _differentiate(launch: Launch, arrays: Arrays) -> Arrays:
    from ring_jax_gpu.hopper.backward import add_fast
    from ring_jax_gpu.hopper.common import Hot

    q, lse, facts = arrays["q"], arrays["lse"], dict(launch.facts)
    sizes = _sizes(arrays)
    many = sizes["batch"] * sizes["heads"] // sizes["group"]
    blocks = -(-sizes["k_len"] // KEYS)
    shares = {x.q_rank: of_keys(x, many, sizes["group"], _processors()) for x in launch.rectangles}
    split = max((x.split for x in shares.values()), default=0)
    helpers = max((x.helpers for x in shares.values()), default=0)
    hot = Hot(
        D=q.shape[3], ITEMS=facts["ITEMS"], SCALE=facts["SCALE"], BLOCK=QUERIES_A_BLOCK, STAGES=_STAGES,
        FRESH=facts["FRESH"], BESIDE=facts["BESIDE"], TURNS=False, SHARED=split > 0,
    )  # fmt: skip
    dv, parts = arrays.get("dv"), (split, 2, KEYS, hot.D)
    parameters: dict[str, Parameter] = {
        "q": _tiles(q, hot.BLOCK), **_key_tiles(arrays, KEYS),
        "dout": _tiles(arrays["dout"], hot.BLOCK),
        "mass": _numbers(jnp.where(lse == -jnp.inf, lse, lse * (-1.0 / hot.SCALE)), hot.BLOCK),
        "slant": _numbers(-arrays["delta"], hot.BLOCK),
        "dq": replace(_tiles(arrays["dq"], hot.BLOCK), changes=True),
        "items": Taken(arrays["items"]),
        "shares": _looked_up(shares, arrays) if split else None,
        "marks": Taken(jnp.zeros(split, jnp.int32), changes=True) if split else None,
        "parts": Taken(jnp.zeros(parts, jnp.float32), changes=True) if split else None,
        "dk": _result(arrays["dk"], facts["FRESH"], HEADS_BEHIND),
        "dv": None if dv is None else _result(dv, facts["FRESH"], HEADS_BEHIND),
        "flags": Made((many, blocks), "int32"),
        **sizes, "together": _key_heads_together(many, blocks),
    }  # fmt: skip
    programs = many * blocks + helpers
    found = call(add_fast, parameters, {"facts": hot}, warps=8, programs=programs)
    arrays = arrays | {"only": found.pop("flags")}
    arrays |= {name: x for name, x in found.items() if name in arrays}
    return _rest(launch, arrays, {"only_across": blocks}, many * blocks, _HALF, KEYS)


def _key_heads_together(many: int, blocks: int) -> int:
    """How many take turns in the backward: few, but enough that programs meet at few queries."""
    wanted = max(_KEY_HEADS_TOGETHER, _TILES_TOGETHER // blocks)
    return next(n for n in range(min(wanted, many), many + 1) if many % n == 0)


def _looked_up(shares: Mapping[int, Shares | Helped], arrays: Arrays) -> Taken:
    """A rank's row; zeros for one that computes nothing now."""
    (width,) = {len(x) for x in shares.values()}
    table = np.zeros((max(shares) + 1, width), np.int32)
    for rank, row in shares.items():
        table[rank] = row
    return Taken(jnp.asarray(table)[arrays[ONLY_HOPPER]])


def _rest(
    launch: Launch, arrays: Arrays, flags: dict[str, int], programs: int, block_q: int, block_k: int
) -> Arrays:
    """Do the blocks that ``only`` names, in plain Triton; returns what the launch changed."""
    kernel = kernel_of(launch)
    arrays = {name: x for name, x in arrays.items() if name != ONLY_HOPPER}
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
