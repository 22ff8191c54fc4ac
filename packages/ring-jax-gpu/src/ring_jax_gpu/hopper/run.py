"""Run the warp-specialised kernels for Hopper, and plain Triton on the blocks that they leave out.

They leave out blocks whose results have NaN, which may come from keys that nobody sees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ring_core.triton.tile_configs import FLAGS_TOGETHER
from ring_jax_gpu.hopper.ffi import (
    BTHD,
    Call,
    InArray,
    OutArray,
    Parameter,
    TileDescriptor,
    call,
    compile_together,
)
from ring_jax_gpu.hopper.stream_k import (
    KEYS,
    KEYS_A_BLOCK,
    QUERIES,
    QUERIES_A_BLOCK,
    StreamK,
    StreamKBackward,
    backward_schedule,
    forward_schedule,
)
from ring_jax_gpu.launch import (
    CELLS,
    ITEM_NUMBER,
    SEGMENT_CELLS,
    Arrays,
    Launch,
    arguments_of,
    arrays_of,
    kernel_of,
)

_HALF = 64  # queries of a block of 128 that one group of warps computes
_STAGES = 2
_NOT_MULTIPLES = {"Q_IS_MULTIPLE": False, "K_IS_MULTIPLE": False}
_KEY_HEADS_PER_SWIZZLE, _TILES_PER_SWIZZLE = 2, 128  # least sizes of a swizzle in the backward
_CHANGED = {"fwd": ("out", "lse"), "bwd_dkv": ("dq", "dk", "dv")}
# Arrays whose shape gives the strides of a parameter, by the parameter's name.
_ROWS = {
    "q": ("q",), "k": ("kv", "k"), "v": ("kv", "v"), "out": ("out", "dout"), "dq": ("dq",),
    "dk": ("dk",), "dv": ("dv", "dk"),
}  # fmt: skip
_DEFAULT_PROCESSORS = 132  # SMs of an H100 or H200


def run(launch: Launch, arrays: Arrays) -> Arrays:
    """Run a launch on Hopper; return the arrays that it changed, by name."""
    steps = partial(_fwd if launch.kernel == "fwd" else _bwd, launch)
    compile_together(steps, arrays)
    return steps(arrays, call)


def _fwd(launch: Launch, arrays: Arrays, call: Call) -> Arrays:
    """Run the forward, then plain Triton on the halves of blocks that it left out."""
    from ring_jax_gpu.hopper import common, forward

    q, consts, programs = arrays["q"], dict(launch.consts), _processors()
    batch, heads, q_len, dim = q.shape
    flags_per_head = 2 * -(-q_len // QUERIES)
    num_flags = batch * heads * flags_per_head
    stream_k = {
        n: forward_schedule(x, batch * heads, programs)
        for n, x in enumerate(launch.rectangles)
        if not x.is_empty
    }
    # One program serves all ranks: memory is for the rank whose item splits the most tiles.
    split = max((x.split for x in stream_k.values()), default=0)
    parts = max((x.split * x.each for x in stream_k.values()), default=0)
    hopper_consts = common.HopperConstexprs(
        D=dim, ITEMS=consts["ITEMS"], SCALE=consts["SCALE"], BLOCK=KEYS_A_BLOCK, STAGES=_STAGES,
        OVERWRITE=consts["OVERWRITE"], KV_PACKED=consts["KV_PACKED"], PINGPONG=consts["SOFTCAP"] is None, STREAM_K=split > 0,
        SOFTCAP=consts["SOFTCAP"], ALIBI="slopes" in arrays,
        DROPPED=consts["DROPPED"],
    )  # fmt: skip
    before = arrays.get("before")
    parameters: dict[str, Parameter] = {
        "q": _tiles(q, _HALF, dim), **_key_tiles(arrays, hopper_consts.BLOCK, dim),
        "k_at": _key_positions(arrays, hopper_consts.BLOCK),
        "items": InArray(arrays["items"]), **_cells(launch, arrays), **_slopes(launch, arrays),
        "stream_k": _row_of_item(launch, stream_k, arrays) if split else None,
        "marks": InArray(jnp.zeros(num_flags + 1 + 2 * split, jnp.int32), changed=True),
        "before": None if before is None else InArray(before, layout=BTHD),
        "lse": _result(arrays["lse"], consts["OVERWRITE"]),
        "out": _result(arrays["out"], consts["OVERWRITE"] or before is not None, BTHD),
        "parts": OutArray((parts, 2, _HALF, dim), "float32") if split else None,
        "sums": OutArray((parts, 2, 2, _HALF), "float32") if split else None, **_sizes(arrays),
        "heads_per_swizzle": dict(launch.numbers)["heads_per_swizzle"],
    }  # fmt: skip
    results = call(
        forward.fwd_hopper, parameters, {"consts": hopper_consts}, warps=4, programs=programs
    )
    # Plain Triton reads the flags, which come first among the marks, and merges or overwrites the
    # flagged rows alone, from the same accumulated result: rows left out have not been written.
    arrays = arrays | {"out": results["out"], "lse": results["lse"], "only": results["marks"]}
    flags = {"only_per_head": flags_per_head, "only_many": num_flags}
    return _run_left_out(launch, arrays, flags, -(-num_flags // FLAGS_TOGETHER), _HALF, call)


def _bwd(launch: Launch, arrays: Arrays, call: Call) -> Arrays:
    """Run the backward, then plain Triton on the blocks of keys that it left out."""
    from ring_jax_gpu.hopper import backward, common

    q, lse, consts = arrays["q"], arrays["lse"], dict(launch.consts)
    sizes, dim = _sizes(arrays), q.shape[3]
    heads, blocks = sizes["batch"] * sizes["heads"] // sizes["group"], -(-sizes["k_len"] // KEYS)
    stream_k = {
        n: backward_schedule(x, heads, sizes["group"], _processors())
        for n, x in enumerate(launch.rectangles)
        if not x.is_empty
    }
    split = max((x.split for x in stream_k.values()), default=0)
    # As many programs are launched as the busiest rank needs; elsewhere the last ones find no work.
    helpers = max((x.helpers for x in stream_k.values()), default=0)
    hopper_consts = common.HopperConstexprs(
        D=dim, ITEMS=consts["ITEMS"], SCALE=consts["SCALE"], BLOCK=QUERIES_A_BLOCK,
        STAGES=_STAGES, OVERWRITE=consts["OVERWRITE"], KV_PACKED=consts["KV_PACKED"], PINGPONG=False,
        STREAM_K=split > 0, SOFTCAP=consts["SOFTCAP"], ALIBI="slopes" in arrays,
        DROPPED=consts["DROPPED"],
    )  # fmt: skip
    dv, parts = arrays.get("dv"), (split, 2, KEYS, dim)
    parameters: dict[str, Parameter] = {
        "q": _row_pairs(q, hopper_consts.BLOCK, dim), **_key_tiles(arrays, KEYS, dim),
        "dout": _row_pairs(arrays["dout"], hopper_consts.BLOCK, dim),
        "neg_lse": _row_tiles(_negative_lse(lse, consts), hopper_consts.BLOCK),
        "neg_delta": _row_tiles(-arrays["delta"], hopper_consts.BLOCK),
        "dq": replace(_tiles(arrays["dq"], hopper_consts.BLOCK, dim), changed=True),
        "items": InArray(arrays["items"]), **_cells(launch, arrays), **_slopes(launch, arrays),
        "k_at": _key_positions(arrays), **_dropout(arrays),
        "stream_k": _row_of_item(launch, stream_k, arrays) if split else None,
        "marks": InArray(jnp.zeros(split, jnp.int32), changed=True) if split else None,
        "parts": InArray(jnp.zeros(parts, jnp.float32), changed=True) if split else None,
        "dk": _result(arrays["dk"], consts["OVERWRITE"], BTHD),
        "dv": None if dv is None else _result(dv, consts["OVERWRITE"], BTHD),
        "flags": OutArray((heads, blocks), "int32"), **sizes,
        "heads_per_swizzle": _key_heads_per_swizzle(heads, blocks),
    }  # fmt: skip
    results = call(
        backward.bwd_hopper, parameters, {"consts": hopper_consts}, warps=8,
        programs=heads * blocks + helpers,
    )  # fmt: skip
    arrays = arrays | {"only": results.pop("flags")}
    arrays |= {name: x for name, x in results.items() if name in arrays}
    return _run_left_out(launch, arrays, {"only_per_head": blocks}, heads * blocks, KEYS, call)


def _key_heads_per_swizzle(heads: int, blocks: int) -> int:
    """Return the K/V heads of a swizzle in the backward, a divisor of ``heads``.

    They are few, so that programs that run at once read the same Q and dO from the L2 cache, but
    enough that few of them add to dQ of the same queries. ``heads`` counts the K/V heads of all
    batch rows, ``blocks`` the blocks of keys of each head.
    """
    least = max(_KEY_HEADS_PER_SWIZZLE, _TILES_PER_SWIZZLE // blocks)
    return next(n for n in range(min(least, heads), heads + 1) if heads % n == 0)


def _row_of_item(
    launch: Launch, stream_k: Mapping[int, StreamK | StreamKBackward], arrays: Arrays
) -> InArray:
    """Return the schedule of this rank's item, int32; zeros if it is empty."""
    (width,) = {len(x) for x in stream_k.values()}
    # All ranks' schedules are constants of the program; a rank looks its own one up.
    table = np.zeros((len(launch.rectangles), width), np.int32)
    table[list(stream_k)] = list(stream_k.values())
    return InArray(jnp.asarray(table)[arrays[ITEM_NUMBER]])


def _negative_lse(lse: Any, consts: Mapping[str, Any]) -> Any:
    """Return what the backward adds to scores: minus ``lse`` in its units, ``-inf`` stays."""
    cap = consts["SOFTCAP"]
    negative = lse * (-1.0 / consts["SCALE"]) if cap is None else (cap - lse) * math.log2(math.e)
    return jnp.where(lse == -jnp.inf, lse, negative)


def _slopes(launch: Launch, arrays: Arrays) -> dict[str, Parameter]:
    """Pass ALiBi's slopes and the positions of queries."""
    if "slopes" not in arrays:
        return {"slopes": None, "slopes_batch": 0, "q_at": None}
    return {
        "slopes": InArray(arrays["slopes"]), "slopes_batch": dict(launch.numbers)["slopes_batch"],
        "q_at": InArray(arrays["q_at"].astype(jnp.float32)),
    }  # fmt: skip


def _key_positions(arrays: Arrays, length: int | None = None) -> Parameter:
    """Pass the positions of keys for ALiBi, for fetches of ``[length]``, or as a pointer."""
    if "slopes" not in arrays:
        return None
    positions = arrays["k_at"].astype(jnp.float32)
    if length is None:
        return InArray(positions)
    padded = jnp.pad(positions, (0, -positions.size % length))
    return InArray(padded, TileDescriptor((padded.size,), (length,), (1,)))


def _dropout(arrays: Arrays) -> dict[str, Parameter]:
    """Pass dropout's seed, the indices of queries, and those of groups of four keys."""
    if "dropout" not in arrays:
        return dict.fromkeys(("dropout", "q_index", "k_groups"))
    parts = {"dropout": arrays["dropout"], "q_index": arrays["q_index"]}
    return {
        name: InArray(x) for name, x in (parts | {"k_groups": arrays["k_at"][::4] >> 2}).items()
    }


def _cells(launch: Launch, arrays: Arrays) -> dict[str, Parameter]:
    """Pass the documents of the kernel's outer tokens; ``None`` if items are within documents.

    Those of segment ids differ between batch rows.
    """
    cells = arrays.get(SEGMENT_CELLS, arrays.get(CELLS[launch.kernel]))
    stride = 0 if cells is None or cells.ndim == 2 else cells.shape[1] * cells.shape[2]
    return {"cells": None if cells is None else InArray(cells), "cells_batch": stride}


def _run_left_out(
    launch: Launch, arrays: Arrays, flags: dict[str, int], programs: int, block_k: int, call: Call
) -> Arrays:
    """Run the blocks that the flags ``only`` name in plain Triton; return what that changed."""
    kernel, arrays = kernel_of(launch), arrays_of(launch, arrays, ())
    strides, steps = _bthd_strides(launch, arrays)
    consts = dict(launch.consts) | steps | {"BLOCK_Q": _HALF, "BLOCK_K": block_k} | _NOT_MULTIPLES
    left_out = replace(
        launch,
        consts=tuple(consts.items()),
        numbers=tuple((dict(launch.numbers) | strides | flags).items()),
    )
    arguments = arguments_of(kernel, left_out, arrays, has_tma=False)
    constants = {name: arguments.pop(name) for name in ("consts", "nan_safe")}
    parameters: dict[str, Parameter] = dict(arguments)
    for name, x in arguments.items():
        if hasattr(x, "shape"):
            layout = BTHD if x.ndim == 4 else None
            parameters[name] = InArray(x, changed=name in _CHANGED[launch.kernel], layout=layout)
    return call(kernel, parameters, constants, warps=4, programs=programs)


def _bthd_strides(launch: Launch, arrays: Arrays) -> tuple[dict[str, int], dict[str, int]]:
    """Return the strides of arrays ``[B, H, T, D]`` that lie in memory as ``[B, T, H, D]``.

    Returns:
        Strides over batch rows and heads, which are arguments; and over tokens, which are
        constants.
    """
    strides: dict[str, int] = {}
    steps: dict[str, int] = {}
    for name, candidates in _ROWS.items():
        x = next((arrays[array] for array in candidates if array in arrays), None)
        if x is not None:
            _, heads, length, row = x.shape
            steps[f"{name.upper()}_STEP"] = heads * row
            if f"{name}_batch" in dict(launch.numbers):
                strides |= {f"{name}_batch": length * heads * row, f"{name}_head": row}
    return strides, steps


def _sizes(arrays: Arrays) -> dict[str, int]:
    """Return the lengths and numbers of heads that both kernels take."""
    (batch, heads, q_len, _), (_, kv_heads, k_len, _) = arrays["q"].shape, _keys(arrays).shape
    return {
        "q_len": q_len, "k_len": k_len, "batch": batch, "heads": heads, "group": heads // kv_heads,
    }  # fmt: skip


def _keys(arrays: Arrays, name: str = "k") -> Any:
    """Return the array that holds the keys, or with ``name="v"`` the values."""
    return arrays["kv"] if "kv" in arrays else arrays[name]


def _tiles(x: Any, length: int, dim: int) -> InArray:
    """Pass ``[B, H, T, D]``, in memory ``[B * T, H * D]``, for fetches of ``[length, dim]``."""
    batch, heads, tokens, row = x.shape
    tiles = TileDescriptor((batch * tokens, heads * row), (length, dim), (heads * row, 1))
    return InArray(x, tiles, layout=BTHD)


def _row_pairs(x: Any, length: int, dim: int) -> InArray:
    """Pass ``[B, H, T, D]`` for fetches of ``[2, length / 2, dim]``: even tokens, then odd ones."""
    x = jnp.pad(x, ((0, 0), (0, 0), (0, x.shape[2] % 2), (0, 0)))
    batch, heads, tokens, row = x.shape
    width = heads * row
    tiles = TileDescriptor(
        (2, batch * tokens // 2, width), (2, length // 2, dim), (width, 2 * width, 1)
    )
    return InArray(x, tiles, layout=BTHD)


def _key_tiles(arrays: Arrays, length: int, dim: int) -> dict[str, Parameter]:
    """Pass keys and values for fetches of ``[length, dim]``."""
    return {name: _tiles(_keys(arrays, name), length, dim) for name in ("k", "v")}


def _row_tiles(x: Any, length: int) -> InArray:
    """Pass ``[B, H, T]`` for fetches of ``[length]``, in which even tokens come before odd ones.

    Heads are padded to whole blocks, as the copy engine needs addresses in multiples of 16 bytes.
    """
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % length)))
    ordered = padded.reshape(-1, length // 2, 2).swapaxes(1, 2).reshape(padded.shape)
    return InArray(ordered, TileDescriptor((padded.size,), (length,), (1,)))


def _result(x: Any, overwrite: bool, layout: tuple[int, ...] | None = None) -> Parameter:
    """Pass an accumulator: as new memory if it may be overwritten, else to be updated."""
    if overwrite:
        return OutArray(x.shape, x.dtype.name, layout)
    return InArray(x, changed=True, layout=layout)


def _processors() -> int:
    """Return the number of SMs of the first GPU."""
    (device, *_) = jax.local_devices(backend="cuda")
    return int(getattr(device, "core_count", None) or _DEFAULT_PROCESSORS)
