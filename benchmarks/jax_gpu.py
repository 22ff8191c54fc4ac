"""Triton kernels beside cuDNN's attention in JAX: ``nox -s bench_jax_gpu``.

Batch 1, 32 query heads, 8 key heads, head dim 128, bfloat16. First the root mean square errors of
out, dQ, dK and dV at 2,048 tokens against float32 attention: where ours is more than 1.1 times
cuDNN's on one GPU, no times are printed. A time is the median of five rounds of whole calls, in
which all take turns. ``--gpus 4`` splits sequences over GPUs, causal, beside two ways written in
plain JAX; ``eta`` is the rate of a GPU over that of one GPU with the whole sequence.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_gpu_methods import AXIS, RIVALS, mesh_of
from jax_gpu_methods import ours as over_gpus

import ring_jax_gpu
from ring_core import Layout

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


def environment() -> dict[str, str]:
    """What ran."""
    names = ("jax", "jaxlib", "triton", "jax-triton")
    return {"gpu": jax.devices()[0].device_kind, "python": platform.python_version()} | {
        name: version(name) for name in names
    }


def seconds(run: Callable[[], Any]) -> float:
    """Median over rounds of calls."""
    return seconds_each({"": run})[""]


def seconds_each[Key](
    runs: dict[Key, Callable[[], Any]], rounds: int = 5, target: float = 0.05
) -> dict[Key, float]:
    """Medians over rounds in which all take turns, as a GPU's clock changes with its warmth."""
    calls: dict[Key, int] = {}
    took: dict[Key, list[float]] = {key: [] for key in runs}
    for key, run in runs.items():
        jax.block_until_ready(run())
        start = time.perf_counter()
        jax.block_until_ready(run())
        calls[key] = max(2, min(60, int(target / max(time.perf_counter() - start, 1e-5))))
    for _ in range(rounds):
        for key, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready([run() for _ in range(calls[key])][-1])
            took[key].append((time.perf_counter() - start) / calls[key])
    return {key: sorted(times)[rounds // 2] for key, times in took.items()}


def measure(length: int, *, causal: bool) -> dict[str, dict[str, float]]:
    """TFLOP/s of the forward and of both passes."""
    *qkv, dout = inputs(length, seed=1)
    flops = 4 * length**2 * HEADS * DIM / (2 if causal else 1) / 1e12
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, attend in METHODS.items():
        forward = partial(attend, causal=causal)
        runs[name, "forward"] = partial(jax.jit(forward), *qkv)
        runs[name, "both"] = partial(jax.jit(partial(both, forward)), *qkv, dout)
    took = seconds_each(runs)
    return {
        name: {
            "forward": flops / took[name, "forward"], "both": 3.5 * flops / took[name, "both"],
        }
        for name in METHODS
    }  # fmt: skip


def largest_error(mesh: Mesh, attend: Attend) -> float:
    """Of the output over several GPUs at 2,048 tokens."""
    *qkv, _ = inputs(GATE_LENGTH, seed=2)
    layout = Layout("zigzag", GATE_LENGTH, mesh.shape[AXIS])
    order = np.concatenate([layout.positions(rank) for rank in range(layout.cp_size)])
    wide = [x.astype("float32") for x in qkv]
    expected = jax.jit(partial(exact, causal=True))(*wide)[:, order]
    out = jax.jit(attend)(*(_split(mesh, x[:, order]) for x in qkv))
    return float(jnp.abs(jax.device_get(out).astype("float32") - expected).max())


def over(gpus: int, length: int, alone: dict[str, float]) -> list[dict[str, Any]]:
    """TFLOP/s a GPU of ours and others over several GPUs, causal; of others the forward."""
    mesh = mesh_of(gpus)
    *qkv, dout = (_split(mesh, x) for x in inputs(length, seed=1))
    flops = 2 * length**2 * HEADS * DIM / 1e12 / gpus
    methods = {"triton": over_gpus(mesh, "triton")}
    methods |= {f"{name} cudnn": make(mesh, "cudnn") for name, make in RIVALS.items()}
    rows = []
    for name, attend in methods.items():
        error = largest_error(mesh, attend)
        row: dict[str, Any] = {"gpus": gpus, "length": length, "method": name, "error": error}
        if not error < 0.1:
            rows.append(row | {"wrong": True})
            continue
        row["forward"] = flops / seconds(partial(jax.jit(attend), *qkv))
        if name == "triton":
            row["both"] = 3.5 * flops / seconds(partial(jax.jit(partial(both, attend)), *qkv, dout))
            row |= {f"eta {key}": row[key] / rate for key, rate in alone.items()}
        rows.append(row)
        print(
            {key: round(x, 3) if isinstance(x, float) else x for key, x in row.items()}, flush=True
        )
    return rows


def _split(mesh: Mesh, x: Any) -> Any:
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, AXIS)))


def main(argv: list[str] | None = None) -> int:
    """Errors first, then times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="*", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--gpus", type=int, nargs="*", default=[], help="beside one")
    parser.add_argument("--split-lengths", type=int, nargs="+", default=[32768, 131072])
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
    for length in options.split_lengths if options.gpus else ():
        alone = measure(length, causal=True)["triton"]
        for gpus in options.gpus:
            rows += over(gpus, length, alone)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({"environment": environment(), "errors": found, "rows": rows}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
