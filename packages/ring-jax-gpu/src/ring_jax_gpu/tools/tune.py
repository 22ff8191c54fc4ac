"""Which blocks are fastest on the GPU at hand: rows of the table are tried out, one by one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from ring_core import KernelConfig
from ring_core.triton.tile_configs import Row, Table
from ring_jax.attention import RingAttention
from ring_jax.records import Array
from ring_jax_gpu.kernel import TritonKernel

Seconds = Callable[[Row], float]  # of a call; infinite where a row cannot be had
Say = Callable[[str], None]

SIZES, WARPS, STAGES = (32, 64, 128), (4, 8), (1, 2, 3, 4)
HEADS, KV_HEADS = 16, 4
_LIMIT = 0.02  # of the norm of a result


def tuned(row: Row, seconds: Seconds) -> tuple[Row, float]:
    """The fastest of rows for the same calls, and how many times as fast as ``row`` it is.

    First sizes and warps are tried, then stages. The least of many times is partly luck, so the
    winner and ``row`` are timed once more, and ``row`` stays unless it is slower again.
    """
    others = [replace(row, q=q, k=k, warps=warps) for q, k, warps in product(SIZES, SIZES, WARPS)]
    best = _fastest([row, *others], seconds)
    best = _fastest([best, *(replace(best, stages=stages) for stages in STAGES)], seconds)
    ratio = 1.0 if best == row else seconds(row) / seconds(best)
    return (best, ratio) if ratio > 1.0 else (row, 1.0)


def _fastest(rows: Iterable[Row], seconds: Seconds) -> Row:
    took = {row: seconds(row) for row in dict.fromkeys(rows)}
    return min(took, key=lambda row: took[row])


def timer(table: Table, row: Row, tokens: int, rounds: int, say: Say) -> Seconds:
    """What a call takes with another row in the place of ``row``.

    A causal call of ``tokens`` tokens; with per-score inputs, that is dropout. Its results are
    compared with those of the table as it is: what is off by more than a fiftieth of their norm
    counts as refused.

    Args:
        table: The table.
        row: The row of it that is tuned.
        tokens: How long sequences are.
        rounds: Of which the median counts.
        say: Told about each row that was tried.
    """
    known = [np.asarray(x, np.float32) for x in _call(table, row, tokens)()]

    def seconds(new: Row) -> float:
        try:
            run = _call(tuple(new if x == row else x for x in table), row, tokens)
            found = [np.asarray(x, np.float32) for x in run()]
        except Exception as error:  # noqa: BLE001  # whatever it is, this one cannot be had
            say(f"{_described(new)}: {str(error).strip().splitlines()[0][:90]}")
            return math.inf
        distance = max(_distance(x, y) for x, y in zip(found, known, strict=True))
        if not distance <= _LIMIT:
            say(f"{_described(new)}: wrong by {distance:.3g} of the norm")
            return math.inf
        took = _seconds(run, rounds)
        say(f"{_described(new)}: {took * 1e3:.3f} ms")
        return took

    return seconds


def _call(table: Table, row: Row, tokens: int) -> Callable[[], tuple[Array, ...]]:
    """A compiled call of the kernel that a row is for: the forward, or a backward."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(1, tokens, heads, row.head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, dout = (
        jax.random.normal(key, shape).astype("bfloat16" if row.itemsize == 2 else "float32")
        for key, shape in zip(keys[:4], shapes, strict=True)
    )
    shape = (1, 1, tokens, tokens)
    bias = jax.random.normal(keys[4], shape) if row.kernel == "bwd_dbias" else None
    options: dict[str, Any] = {"dropout_p": 0.1, "dropout_seed": 0} if row.per_score_inputs else {}
    fused = True if row.kernel == "bwd_fused" else None
    attention = RingAttention((TritonKernel(rounds=True, blocks=table, roles=False),))

    def attend(q: Array, k: Array, v: Array, bias: Array | None) -> Array:
        return cast(
            "Array",
            attention(
                q,
                k,
                v,
                axis_name=None,
                causal=True,
                bias=bias,
                kernel=KernelConfig("triton", fused_backward=fused),
                **options,
            ),
        )

    if row.kernel == "fwd":
        forward = jax.jit(attend)
        return lambda: (forward(q, k, v, bias),)
    _, pull = jax.jit(partial(jax.vjp, attend))(q, k, v, bias)
    backward = jax.jit(lambda pull, dout: tuple(jax.tree.leaves(pull(dout))))
    return partial(backward, pull, dout)


def _seconds(run: Callable[[], Any], rounds: int) -> float:
    took = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(4)])
        took.append((time.perf_counter() - start) / 4)
    return sorted(took)[rounds // 2]


def _distance(found: Any, known: Any) -> float:
    return float(np.linalg.norm(found - known) / max(float(np.linalg.norm(known)), 1e-30))


def _described(row: Row) -> str:
    return f"{row.q} x {row.k}, {row.warps} warps, {row.stages} stages"


def name_of(row: Row) -> str:
    """What a row is for."""
    per_score_inputs = ", per-score inputs" if row.per_score_inputs else ""
    return f"{row.kernel}, {row.itemsize} bytes, head dims up to {row.head_dim}{per_score_inputs}"


def device() -> str:
    """The GPU that is tuned for.

    Raises:
        ValueError: There is none.
    """
    if jax.default_backend() != "gpu":
        raise ValueError(
            f"tune times kernels on an NVIDIA GPU, and jax runs on {jax.default_backend()} here. "
            "Install ring-jax-gpu[cuda13] on a machine with one"
        )
    return cast("str", jnp.zeros(1).devices().pop().device_kind)
