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
_MOST_PARTS = 16  # of a tile in the forward
_MOST_SHARERS = 4  # of a tile in the backward
_JOINING = 4  # blocks that take about as long as to begin a part and to leave it for another
_HALF = 64  # of a block of queries, what one group of warps takes
_STAGES = 2
_UNEVEN = {"EVEN_Q": False, "EVEN_K": False}
_KEY_HEADS_TOGETHER = 2  # which take turns in the backward, if there are as many
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
    split, own, each = 0, 0, 1
    if launch.is_full and facts["ITEMS"] == 1:
        tiles, length = batch * heads * across // 2, -(-_keys(arrays).shape[2] // _KEYS)
        split, own, each = shared_tiles(tiles, length, programs)
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
        **_sizes(arrays), "together": dict(launch.numbers)["together"], "split": split, "own": own,
        "each": each,
    }  # fmt: skip
    found = call(attend_fast, parameters, {"facts": hot}, warps=4, programs=programs)
    arrays = arrays | {"out": found["out"], "lse": found["lse"], "only": found["marks"]}
    many = batch * heads * across
    numbers = {"only_across": across, "only_many": many}
    return _rest(launch, arrays, numbers, -(-many // FLAGS_TOGETHER), _HALF, _HALF)


def shared_tiles(tiles: int, length: int, programs: int) -> tuple[int, int, int]:
    """How many of the last tiles programs share in the forward, and how.

    Tiles of the same ``length`` in blocks of keys take as many rounds as the program with most of
    them has. In a round that is not full, programs that have no tile help the others, if that makes
    it shorter.

    Returns:
        ``(split, own, each)``: so many tiles, each in so many parts, the first of ``own`` blocks
        and the others of equal shares of the rest.
    """
    split = tiles % programs
    best, took = (0, 0, 1), length
    for each in range(2, min(_MOST_PARTS, length) + 1 if split else 2):
        # Rounds of the other parts, which those without a tile draw.
        rounds = -(-split * (each - 1) // (programs - split))
        share = rounds / (each - 1)
        own = math.ceil((share * length + (rounds - 1) * _JOINING) / (1 + share))
        other = -(-(length - own) // (each - 1))
        takes = max(own + _JOINING, rounds * (other + _JOINING)) + each
        if takes < took and own < length:
            best, took = (split, own, each), takes
    return best


def _differentiate(launch: Launch, arrays: Arrays) -> Arrays:
    from ring_jax_gpu._hopper_backward import add_fast
    from ring_jax_gpu._hopper_common import Hot

    q, lse, facts = arrays["q"], arrays["lse"], dict(launch.facts)
    sizes = _sizes(arrays)
    many = sizes["batch"] * sizes["heads"] // sizes["group"]
    blocks = -(-sizes["k_len"] // _KEYS)
    split, own, helpers = 0, 0, 0
    if launch.is_full and facts["ITEMS"] == 1:
        length = sizes["group"] * -(-sizes["q_len"] // _HALF)
        split, own, helpers = helped_tiles(many * blocks, length, _processors())
    hot = Hot(
        D=q.shape[3], ITEMS=facts["ITEMS"], SCALE=facts["SCALE"], BLOCK=_HALF, STAGES=_STAGES,
        FRESH=facts["FRESH"], BESIDE=facts["BESIDE"], TURNS=False, SHARED=split > 0,
    )  # fmt: skip
    dv, parts = arrays.get("dv"), (split, 2, _KEYS, hot.D)
    parameters: dict[str, Parameter] = {
        "q": _tiles(q, hot.BLOCK), **_key_tiles(arrays, _KEYS),
        "dout": _tiles(arrays["dout"], hot.BLOCK),
        "mass": _numbers(jnp.where(lse == -jnp.inf, lse, lse * (-1.0 / hot.SCALE)), hot.BLOCK),
        "slant": _numbers(-arrays["delta"], hot.BLOCK),
        "dq": replace(_tiles(arrays["dq"], hot.BLOCK), changes=True),
        "items": Taken(arrays["items"]),
        "marks": Taken(jnp.zeros(split, jnp.int32), changes=True) if split else None,
        "parts": Taken(jnp.zeros(parts, jnp.float32), changes=True) if split else None,
        "dk": _result(arrays["dk"], facts["FRESH"], HEADS_BEHIND),
        "dv": None if dv is None else _result(dv, facts["FRESH"], HEADS_BEHIND),
        "flags": Made((many, blocks), "int32"),
        **sizes, "together": math.gcd(many, _KEY_HEADS_TOGETHER), "split": split, "own": own,
        "helpers": helpers,
    }  # fmt: skip
    programs = many * blocks + helpers
    found = call(add_fast, parameters, {"facts": hot}, warps=8, programs=programs)
    arrays = arrays | {"only": found.pop("flags")}
    arrays |= {name: x for name, x in found.items() if name in arrays}
    return _rest(launch, arrays, {"only_across": blocks}, many * blocks, _HALF, _KEYS)


def helped_tiles(tiles: int, length: int, programs: int) -> tuple[int, int, int]:
    """How many of the last tiles programs share in the backward.

    Tiles of the same ``length`` in blocks of queries take as many rounds as the program with most
    of them has. In a round that is not full, programs that have no tile help the others.

    Returns:
        ``(split, own, helpers)``: so many tiles, of each of which a program does the first ``own``
        blocks, and so many programs for the rest.
    """
    split = tiles % programs
    helpers = min(programs - split, split * (_MOST_SHARERS - 1))
    own = -(-split * (length + _JOINING) // max(split + helpers, 1))
    fits = split * length * helpers < 2**31  # the kernel counts in 32 bits
    return (split, own, helpers) if split > 0 and own < length and fits else (0, 0, 0)


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
