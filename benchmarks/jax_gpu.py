"""Triton kernels beside cuDNN's attention in JAX, on one GPU: ``python benchmarks/jax_gpu.py``.

Batch 1, 32 query heads, 8 key heads, head dim 128, bfloat16. First the root mean square errors of
out, dQ, dK and dV at 2,048 tokens against float32 attention: where ours is more than 1.1 times
cuDNN's, no times are printed. A time is the median of three rounds of whole calls.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ring_jax_gpu

HEADS, KV_HEADS, DIM = 32, 8, 128
GATE_LENGTH = 2048
Attend = Callable[..., Any]


def ours(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
    """The kernels of ``ring_jax_gpu`` on one device."""
    return ring_jax_gpu.ring_attention(q, k, v, axis_name=None, causal=causal, kernel="triton")


def cudnn(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
    """What JAX brings."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def exact(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
    """The definition, in float32."""
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") * DIM**-0.5
    visible = jnp.tril(jnp.ones(scores.shape[2:], bool)) if causal else True
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", weights, v, precision="highest")


METHODS: dict[str, Attend] = {"triton": ours, "cudnn": cudnn}


def inputs(length: int, seed: int) -> list[Any]:
    """Random q, k, v and dout."""
    keys = jax.random.split(jax.random.key(seed), 4)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    shapes = [(1, length, h, DIM) for h in heads]
    return [
        jax.random.normal(key, shape, "float32").astype("bfloat16")
        for key, shape in zip(keys, shapes, strict=True)
    ]


def both(attend: Attend, q: Any, k: Any, v: Any, dout: Any) -> Any:
    """``(out, dq, dk, dv)``."""
    out, pull = jax.vjp(attend, q, k, v)
    return (out, *pull(dout.astype(out.dtype)))


def errors() -> dict[str, list[float]]:
    """Root mean square errors of out, dq, dk and dv, causal."""
    *qkv, dout = inputs(GATE_LENGTH, seed=2)
    wide = [x.astype("float32") for x in qkv]
    expected = jax.jit(partial(both, partial(exact, causal=True)))(*wide, dout)
    found = {}
    for name, attend in METHODS.items():
        results = jax.jit(partial(both, partial(attend, causal=True)))(*qkv, dout)
        found[name] = [
            float(np.sqrt(np.mean(np.square(np.asarray(x, np.float32) - np.asarray(y)))))
            for x, y in zip(results, expected, strict=True)
        ]
    return found


def seconds(run: Callable[[], Any], target: float = 0.25) -> float:
    """Median over three rounds of calls."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    once = time.perf_counter() - start
    calls = max(2, min(100, int(target / 3 / max(once, 1e-5))))
    took = []
    for _ in range(3):
        start = time.perf_counter()
        last = [run() for _ in range(calls)][-1]
        jax.block_until_ready(last)
        took.append((time.perf_counter() - start) / calls)
    return sorted(took)[1]


def measure(length: int, *, causal: bool) -> dict[str, dict[str, float]]:
    """TFLOP/s of the forward and of both passes."""
    *qkv, dout = inputs(length, seed=1)
    flops = 4 * length**2 * HEADS * DIM / (2 if causal else 1) / 1e12
    rates = {}
    for name, attend in METHODS.items():
        forward = jax.jit(partial(attend, causal=causal))
        all_of = jax.jit(partial(both, partial(attend, causal=causal)))
        rates[name] = {
            "forward": flops / seconds(partial(forward, *qkv)),
            "both": 3.5 * flops / seconds(partial(all_of, *qkv, dout)),
        }
    return rates


def main(argv: list[str] | None = None) -> int:
    """Errors first, then times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(argv)
    found = errors()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; errors {found}")
    if any(a > 1.1 * b for a, b in zip(found["triton"], found["cudnn"], strict=True)):
        print("wrong: no times", file=sys.stderr)
        return 1
    rows = []
    for causal in (True, False):
        for length in options.lengths:
            rates = measure(length, causal=causal)
            rows.append({"length": length, "causal": causal, **rates})
            cells = [
                f"{rates['triton'][key]:5.0f} / {rates['cudnn'][key]:5.0f}"
                f" = {rates['triton'][key] / rates['cudnn'][key]:.2f}"
                for key in ("forward", "both")
            ]
            print(f"{length:6} {'causal' if causal else 'full':6}  {'   '.join(cells)}", flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"errors": found, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
