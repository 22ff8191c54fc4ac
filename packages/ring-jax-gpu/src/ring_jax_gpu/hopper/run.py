"""Calls of the kernels for Hopper, which are warp-specialised, and of one for what these leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ring_core.triton.tile_configs import FLAGS_TOGETHER
from ring_jax_gpu.hopper.ffi import HEADS_BEHIND, InArray, OutArray, Parameter, Tiles, call
from ring_jax_gpu.hopper.stream_k import (
    KEYS,
    KEYS_A_BLOCK,
    QUERIES,
    QUERIES_A_BLOCK,
    StreamK,
    StreamKBackward,
    of_keys,
    of_queries,
)
from ring_jax_gpu.launch import RANK_OPERAND, Arrays, Launch, arguments_of, kernel_of

_HALF = 64  # of a block of queries, what one group of warps takes
_STAGES = 2
_NOT_MULTIPLES = {"Q_IS_MULTIPLE": False, "K_IS_MULTIPLE": False}
_KEY_HEADS_PER_SWIZZLE, _TILES_PER_SWIZZLE = 2, 128  # of a swizzle in the backward, at least
_CHANGED = {"fwd": ("out", "lse"), "bwd_dkv": ("dq", "dk", "dv")}
# Arrays that say how the rows of a parameter lie, by its name in strides and steps.
_ROWS = {
    "q": ("q",), "k": ("kv", "k"), "v": ("kv", "v"), "out": ("out", "dout"), "dq": ("dq",),
    "dk": ("dk",), "dv": ("dv", "dk"),
}  # fmt: skip
_DEFAULT_PROCESSORS = 132  # of an H100 or H200


def run(launch: Launch, arrays: Arrays) -> Arrays:
    """Run a launch; returns what it changed."""
    return (_fwd if launch.kernel == "fwd" else _bwd)(launch, arrays)


def _fwd(launch: Launch, arrays: Arrays) -> Arrays:
    from ring_jax_gpu.hopper import common, forward

    q, consts, programs = arrays["q"], dict(launch.consts), _processors()
    batch, heads, q_len, dim = q.shape
    flags_per_head = 2 * -(-q_len // QUERIES)  # flags of a head
    many = batch * heads * flags_per_head
    stream_k = {x.q_rank: of_queries(x, batch * heads, programs) for x in launch.rectangles}
    split = max((x.split for x in stream_k.values()), default=0)
    parts = max((x.split * x.each for x in stream_k.values()), default=0)
    hopper_consts = common.HopperConstexprs(
        D=dim, ITEMS=consts["ITEMS"], SCALE=consts["SCALE"], BLOCK=KEYS_A_BLOCK, STAGES=_STAGES,
        FRESH=consts["FRESH"], KV_PACKED=consts["KV_PACKED"], PINGPONG=True, STREAM_K=split > 0,
    )  # fmt: skip
    before = arrays.get("before")
    parameters: dict[str, Parameter] = {
        "q": _tiles(q, _HALF, dim), **_key_tiles(arrays, hopper_consts.BLOCK, dim),
        "items": InArray(arrays["items"]),
        "stream_k": _row_of_rank(stream_k, arrays) if split else None,
        "marks": InArray(jnp.zeros(many + 1 + 2 * split, jnp.int32), changed=True),
        "before": None if before is None else InArray(before, layout=HEADS_BEHIND),
        "lse": _result(arrays["lse"], consts["FRESH"]),
        "out": _result(arrays["out"], consts["FRESH"] or before is not None, HEADS_BEHIND),
        "parts": OutArray((parts, 2, _HALF, dim), "float32") if split else None,
        "sums": OutArray((parts, 2, 2, _HALF), "float32") if split else None, **_sizes(arrays),
        "heads_per_swizzle": dict(launch.numbers)["heads_per_swizzle"],
    }  # fmt: skip
    found = call(
        forward.fwd_hopper, parameters, {"consts": hopper_consts}, warps=4, programs=programs
    )
    arrays = arrays | {"out": found["out"], "lse": found["lse"], "only": found["marks"]}
    return _rest(
        launch,
        arrays,
        {"only_per_head": flags_per_head, "only_many": many},
        -(-many // FLAGS_TOGETHER),
        _HALF,
    )


def _bwd(launch: Launch, arrays: Arrays) -> Arrays:
    from ring_jax_gpu.hopper import backward, common

    q, lse, consts = arrays["q"], arrays["lse"], dict(launch.consts)
    sizes, dim = _sizes(arrays), q.shape[3]
    many, blocks = sizes["batch"] * sizes["heads"] // sizes["group"], -(-sizes["k_len"] // KEYS)
    stream_k = {
        x.q_rank: of_keys(x, many, sizes["group"], _processors()) for x in launch.rectangles
    }
    split = max((x.split for x in stream_k.values()), default=0)
    helpers = max((x.helpers for x in stream_k.values()), default=0)
    hopper_consts = common.HopperConstexprs(
        D=dim, ITEMS=consts["ITEMS"], SCALE=consts["SCALE"], BLOCK=QUERIES_A_BLOCK,
        STAGES=_STAGES, FRESH=consts["FRESH"], KV_PACKED=consts["KV_PACKED"], PINGPONG=False,
        STREAM_K=split > 0,
    )  # fmt: skip
    dv, parts = arrays.get("dv"), (split, 2, KEYS, dim)
    parameters: dict[str, Parameter] = {
        "q": _tiles(q, hopper_consts.BLOCK, dim), **_key_tiles(arrays, KEYS, dim),
        "dout": _tiles(arrays["dout"], hopper_consts.BLOCK, dim),
        "neg_lse": _numbers(
            jnp.where(lse == -jnp.inf, lse, lse * (-1.0 / hopper_consts.SCALE)),
            hopper_consts.BLOCK,
        ),
        "neg_delta": _numbers(-arrays["delta"], hopper_consts.BLOCK),
        "dq": replace(_tiles(arrays["dq"], hopper_consts.BLOCK, dim), changed=True),
        "items": InArray(arrays["items"]),
        "stream_k": _row_of_rank(stream_k, arrays) if split else None,
        "marks": InArray(jnp.zeros(split, jnp.int32), changed=True) if split else None,
        "parts": InArray(jnp.zeros(parts, jnp.float32), changed=True) if split else None,
        "dk": _result(arrays["dk"], consts["FRESH"], HEADS_BEHIND),
        "dv": None if dv is None else _result(dv, consts["FRESH"], HEADS_BEHIND),
        "flags": OutArray((many, blocks), "int32"), **sizes,
        "heads_per_swizzle": _key_heads_per_swizzle(many, blocks),
    }  # fmt: skip
    found = call(
        backward.bwd_hopper, parameters, {"consts": hopper_consts}, warps=8,
        programs=many * blocks + helpers,
    )  # fmt: skip
    arrays = arrays | {"only": found.pop("flags")}
    arrays |= {name: x for name, x in found.items() if name in arrays}
    return _rest(launch, arrays, {"only_per_head": blocks}, many * blocks, KEYS)


def _key_heads_per_swizzle(many: int, blocks: int) -> int:
    """Heads of a swizzle in the backward: few, but enough that programs meet at few queries."""
    wanted = max(_KEY_HEADS_PER_SWIZZLE, _TILES_PER_SWIZZLE // blocks)
    return next(n for n in range(min(wanted, many), many + 1) if many % n == 0)


def _row_of_rank(stream_k: Mapping[int, StreamK | StreamKBackward], arrays: Arrays) -> InArray:
    """A rank's row; zeros for one that computes nothing now."""
    (width,) = {len(x) for x in stream_k.values()}
    table = np.zeros((max(stream_k) + 1, width), np.int32)
    table[list(stream_k)] = list(stream_k.values())
    return InArray(jnp.asarray(table)[arrays[RANK_OPERAND]])


def _rest(
    launch: Launch, arrays: Arrays, flags: dict[str, int], programs: int, block_k: int
) -> Arrays:
    """Do the blocks that ``only`` names, in plain Triton; returns what the launch changed."""
    kernel = kernel_of(launch)
    arrays = {name: x for name, x in arrays.items() if name != RANK_OPERAND}
    strides, steps = _heads_behind(launch, arrays)
    consts = dict(launch.consts) | steps | {"BLOCK_Q": _HALF, "BLOCK_K": block_k} | _NOT_MULTIPLES
    rest = replace(
        launch,
        consts=tuple(consts.items()),
        numbers=tuple((dict(launch.numbers) | strides | flags).items()),
    )
    known = arguments_of(kernel, rest, arrays, has_tma=False)
    constants = {name: known.pop(name) for name in ("consts", "nan_safe")}
    parameters: dict[str, Parameter] = dict(known)
    for name, x in known.items():
        if hasattr(x, "shape"):
            layout = HEADS_BEHIND if x.ndim == 4 else None
            parameters[name] = InArray(x, changed=name in _CHANGED[launch.kernel], layout=layout)
    return call(kernel, parameters, constants, warps=4, programs=programs)


def _heads_behind(launch: Launch, arrays: Arrays) -> tuple[dict[str, int], dict[str, int]]:
    """Strides and steps of arrays ``[B, H, T, D]`` that lie in memory as ``[B, T, H, D]``."""
    strides: dict[str, int] = {}
    steps: dict[str, int] = {}
    for name, of in _ROWS.items():
        x = next((arrays[one] for one in of if one in arrays), None)
        if x is not None:
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


def _keys(arrays: Arrays, name: str = "k") -> Any:
    """The keys, or the values, maybe with the others beside them."""
    return arrays["kv"] if "kv" in arrays else arrays[name]


def _tiles(x: Any, length: int, dim: int) -> InArray:
    """``[B, H, T, D]`` as ``[B * T, H * D]``, which it is in memory."""
    batch, heads, tokens, row = x.shape
    return InArray(x, Tiles((batch * tokens, heads * row), (length, dim)), layout=HEADS_BEHIND)


def _key_tiles(arrays: Arrays, length: int, dim: int) -> dict[str, Parameter]:
    return {name: _tiles(_keys(arrays, name), length, dim) for name in ("k", "v")}


def _numbers(x: Any, length: int) -> InArray:
    """``[B, H, T]`` in blocks, which begin at multiples of 16 bytes as the copy engine wants."""
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % length)))
    return InArray(padded, Tiles((padded.size,), (length,)))


def _result(x: Any, is_fresh: bool, layout: tuple[int, ...] | None = None) -> Parameter:
    if is_fresh:
        return OutArray(x.shape, x.dtype.name, layout)
    return InArray(x, changed=True, layout=layout)


def _processors() -> int:
    (device, *_) = jax.local_devices(backend="cuda")
    return int(getattr(device, "core_count", None) or _DEFAULT_PROCESSORS)
