"""Head dims, a window and a bias on one GPU in JAX, beside cuDNN: ``nox -s bench_jax_options``.

Batch 1, causal, bfloat16: what ``kernel="auto"`` takes, the kernels in Triton, and cuDNN as
``jax.nn.dot_product_attention`` calls it, which wants V as wide as Q and K: it gets zeros there. A
bias is one for all heads, and has a gradient. First out and all gradients of each are compared with
float32 attention at 1,024 tokens: what errs more than twice as much as the best of the others
prints no time. Times are of calls that are queued, in rounds in which all take turns, each round in
an order of its own; a ratio is one of times in one round.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax_gpu_options_table import table

import ring_jax_gpu

GATE_LENGTH, ROUNDS, TURN = 1024, 20, 0.03  # seconds of calls in a turn
OURS = "ring"


class Setting(NamedTuple):
    """What a row is of."""

    name: str
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    v_dim: int = 128
    window: int | None = None  # keys that a query sees, its own included
    bias: bool = False
    methods: tuple[str, ...] = ("ring", "triton", "cudnn")


SETTINGS = (
    Setting("128"), Setting("window 1,024", window=1024), Setting("64", dim=64, v_dim=64),
    Setting("80", dim=80, v_dim=80), Setting("96", dim=96, v_dim=96),
    Setting("160", dim=160, v_dim=160), Setting("256", dim=256, v_dim=256),
    Setting("192/128, 16/16 heads", heads=16, kv_heads=16, dim=192), Setting("192/128", dim=192),
    Setting("bias", bias=True),
    *(
        Setting(str(dim), dim=dim, v_dim=dim, methods=("ring", "cudnn"))
        for dim in (40, 72, 100, 136, 200, 250)
    ),
)  # fmt: skip
Method = Callable[..., Any]  # of a setting, q, k, v and the bias if there is one


def ours(kernel: str, setting: Setting, q: Any, k: Any, v: Any, bias: Any = None) -> Any:
    """The ring on one device."""
    window = None if setting.window is None else (setting.window - 1, 0)
    return ring_jax_gpu.ring_attention(
        q, k, v, axis_name=None, causal=True, window=window, bias=bias, kernel=kernel
    )


def cudnn(setting: Setting, q: Any, k: Any, v: Any, bias: Any = None) -> Any:
    """What JAX brings."""
    window = None if setting.window is None else (setting.window - 1, 0)
    padded = jnp.pad(v, [(0, 0)] * 3 + [(0, setting.dim - setting.v_dim)])
    out = jax.nn.dot_product_attention(
        q, k, padded, bias, is_causal=True, local_window_size=window, implementation="cudnn"
    )
    return out[..., : setting.v_dim]


METHODS: dict[str, Method] = {
    OURS: partial(ours, "auto"), "triton": partial(ours, "triton"), "cudnn": cudnn,
}  # fmt: skip


def exact(setting: Setting, q: Any, k: Any, v: Any, bias: Any = None) -> Any:
    """The definition, in float32."""
    k, v = (jnp.repeat(x, setting.heads // setting.kv_heads, axis=2) for x in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") * setting.dim**-0.5
    scores = scores if bias is None else scores + bias
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
    visible = (j <= i) & (j > i - (setting.window or len(i)))
    weights = jax.nn.softmax(jnp.where(visible[None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", weights, v, precision="highest")


def inputs(setting: Setting, length: int) -> list[Any]:
    """Random dout, q, k, v and the bias, in bfloat16."""
    _, heads, kv_heads, dim, v_dim, _, has_bias, _ = setting
    shapes = [(heads, v_dim), (heads, dim), (kv_heads, dim), (kv_heads, v_dim)]
    every = [(1, length, *shape) for shape in shapes] + [(1, 1, length, length)] * has_bias
    keys = jax.random.split(jax.random.key(length), len(every))
    return [jax.random.normal(*x, "bfloat16") for x in zip(keys, every, strict=True)]


def both(method: Method, setting: Setting, dout: Any, *x: Any) -> list[Any]:
    """The output and the gradients of all else."""
    out, pull = jax.vjp(partial(method, setting), *x)
    return [out, *pull(dout.astype(out.dtype))]


def forward(method: Method, setting: Setting, _: Any, *x: Any) -> Any:
    """The output."""
    return method(setting, *x)


def errors(setting: Setting) -> dict[str, float | str]:
    """The largest root mean square error of out and gradients; or why a method has none."""
    x = inputs(setting, GATE_LENGTH)
    wide = [y.astype("float32") for y in x]
    wanted = jax.jit(partial(both, exact, setting))(*wide)
    found, _ = compiled(both, setting, setting.methods, x)
    return {
        name: program if isinstance(program, str) else max(map(_error, program(*x), wanted))
        for name, program in found.items()
    }


def compiled(
    passes: Callable[..., Any], setting: Setting, names: Sequence[str], x: Sequence[Any]
) -> tuple[dict[str, Callable[..., Any] | str], str]:
    """Programs, or why there is none, by method; and the kernel that ours took.

    They are compiled at once: for cuDNN, and for Triton, that takes seconds each.
    """
    found: dict[str, Callable[..., Any] | str] = {}
    kernel = ""
    with ThreadPoolExecutor(len(METHODS)) as pool:
        coming: dict[str, Future[Any]] = {}
        for name in names:
            try:
                lowered = jax.jit(partial(passes, METHODS[name], setting)).lower(*x)
            except Exception as error:  # noqa: BLE001 - a library's own; the row says so
                found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            if name == OURS:
                kernel = "cudnn" if "__cudnn$" in str(lowered.as_text()) else "triton"
            coming[name] = pool.submit(lowered.compile)
        for name, program in coming.items():
            failed = program.exception()
            found[name] = program.result() if failed is None else str(failed).splitlines()[0]
    return {name: found[name] for name in names}, kernel


def _error(result: Any, wanted: Any) -> float:
    off = jnp.square(result.astype("float32") - wanted).mean()
    return float(jnp.sqrt(off) / wanted.std())


def passing(wrong: dict[str, float | str]) -> list[str]:
    """Those that err at most twice as much as the best of the others."""
    numbers = {name: x for name, x in wrong.items() if not isinstance(x, str) and isfinite(x)}
    return [
        name for name, x in numbers.items()
        if x <= 2 * min((y for other, y in numbers.items() if other != name), default=x)
    ]  # fmt: skip


def rounds(runs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Milliseconds per call, a list of all rounds each."""
    names = list(runs)
    took: dict[str, list[float]] = {name: [] for name in names}
    calls = {name: max(1, round(TURN / _seconds(run, 1))) for name, run in runs.items()}
    shuffled = random.Random(0)
    for _ in range(ROUNDS):
        for name in shuffled.sample(names, len(names)):
            took[name].append(1e3 * _seconds(runs[name], calls[name]) / calls[name])
    return took


def _seconds(run: Callable[[], Any], calls: int) -> float:
    jax.block_until_ready(run())  # what follows finds the queue empty, and a GPU that is awake
    start = time.perf_counter()
    for _ in range(calls):
        last = run()
    jax.block_until_ready(last)
    return time.perf_counter() - start


def measure(setting: Setting, length: int, names: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Milliseconds forward and forward + backward, by method; and the kernel that ours took."""
    x = inputs(setting, length)
    took, kernel = {}, ""
    for way, passes in (("forward", forward), ("both", both)):
        programs, kernel = compiled(passes, setting, names, x)
        runs = {name: run for name, run in programs.items() if not isinstance(run, str)}
        took[way] = rounds({name: partial(run, *x) for name, run in runs.items()})
        for name in programs.keys() - runs.keys():
            print(f"{setting.name}, {way}: {name} has no time: {programs[name]}", file=sys.stderr)
    return took, kernel


def summary(times: Sequence[float]) -> list[float]:
    """Least, median, most."""
    return [min(times), statistics.median(times), max(times)]


def row_of(
    setting: Setting, wrong: dict[str, float | str], took: dict[str, Any], kernel: str
) -> dict[str, Any]:
    """What is kept of a setting."""
    row: dict[str, Any] = {"setting": setting.name, "kernel": kernel, "error": wrong}
    row |= {"milliseconds": {}, "ratio": {}}
    for way, times in took.items():
        row["milliseconds"][way] = {name: summary(x) for name, x in times.items()}
        row["ratio"][way] = {
            name: summary([a / b for a, b in zip(times[OURS], x, strict=True)])
            for name, x in times.items() if name != OURS and OURS in times
        }  # fmt: skip
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Errors first, then times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--table", type=Path, help="print the rows of a JSON as Markdown and stop")
    options = parser.parse_args(argv)
    if options.table:
        print(table(json.loads(options.table.read_text())["rows"]))
        return 0
    environment = {
        "gpu": jax.devices()[0].device_kind, "jax": jax.__version__,
        "python": platform.python_version(), "length": options.length,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for setting in SETTINGS:
        if setting.name not in options.settings:
            continue
        wrong = errors(setting)
        took, kernel = measure(setting, options.length, passing(wrong))
        rows.append(row_of(setting, wrong, took, kernel))
        print(json.dumps(rows[-1]), flush=True)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            found = {"environment": environment, "rows": rows}
            options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
