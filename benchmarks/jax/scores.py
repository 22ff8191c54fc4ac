"""Time options that change scores or hide them, over causal attention, on one GPU in JAX.

    python -m benchmarks.jax.scores --json scores.json
    python -m benchmarks.jax.scores --length 64 --heads 4 --kv-heads 2 --dim 8  # on a CPU

Batch 1, bfloat16, ``kernel="auto"``. Output and gradients are first compared, at up to 1,024
tokens, with float32 by the kernel ``xla``; an option that is wrong is not timed. Times are of
queued calls in rounds in which all take turns, in a random order; ratios are of one round.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import turns
from benchmarks.common.report import Report, command, environment
from benchmarks.jax.methods import both, random_arrays, seconds
from ring_core import Mask
from ring_jax import ring_attention

GATE_LENGTH, CALLS, DOCUMENTS = 1024, 4, 16
MOST_ERROR = 0.01  # relative RMS: rounding to 16 bits


def options_of(length: int, heads: int) -> dict[str, dict[str, Any]]:
    """Return the options of each row; documents are alike in ``documents`` and ``segments``."""
    ends = np.sort(np.random.default_rng(0).choice(length - 1, DOCUMENTS - 1, replace=False) + 1)
    ids = jnp.asarray(np.searchsorted(ends, np.arange(length), side="right")[None], jnp.int32)
    table = random_arrays([(1, 1, length, length)], seed=1)[0]
    return {
        "causal": {"causal": True},
        "softcap": {"causal": True, "softcap": 50.0},
        "alibi": {"causal": True, "alibi_slopes": 2.0 ** -(jnp.arange(1.0, heads + 1) / 4)},
        "documents": {"mask": Mask(causal=True, cu_seqlens=(0, *map(int, ends), length))},
        "segments": {"causal": True, "segment_ids": ids},
        "dropout": {"causal": True, "dropout_p": 0.1, "dropout_seed": 7},
        "bias": {"causal": True, "bias": table},
    }


def error(options: dict[str, Any], x: Sequence[Any]) -> float:
    """Return the largest relative RMS error of the output and all gradients."""

    def results(x: Sequence[Any], kernel: str) -> Any:
        attend = partial(ring_attention, axis_name=None, kernel=kernel, **options)
        return jax.jit(partial(both, attend))(*x)

    exact = results([y.astype("float32") for y in x], "xla")
    found = results(x, "auto")
    off = [jnp.square(a - b).mean() ** 0.5 / b.std() for a, b in zip(found, exact, strict=True)]
    return float(max(off))


def body(arguments: Any) -> int:
    """Compare, time and print all rows; return how many are wrong."""
    sizes = {name: x for name, x in vars(arguments).items() if isinstance(x, int)}
    report = Report(
        arguments.json, lambda: environment(jax.devices()[0].device_kind, jax=jax.__version__, **sizes)
    )  # fmt: skip
    shapes = [
        (n, arguments.dim) for n in (arguments.heads, *[arguments.kv_heads] * 2, arguments.heads)
    ]
    small, whole = (
        random_arrays([(1, length, *shape) for shape in shapes], seed=length)
        for length in (min(GATE_LENGTH, arguments.length), arguments.length)
    )  # fmt: skip
    wrong = {
        name: error(x, small) for name, x in options_of(small[0].shape[1], arguments.heads).items()
    }
    runs = {}
    for name, options in options_of(arguments.length, arguments.heads).items():
        if wrong[name] <= MOST_ERROR:
            attend = partial(ring_attention, axis_name=None, **options)
            runs[name, "forward"] = partial(jax.jit(attend), *whole[:-1])
            runs[name, "both"] = partial(jax.jit(partial(both, attend)), *whole)
    for run in runs.values():
        jax.block_until_ready(run())  # compiled, before any is timed
    took = turns.take_turns(runs, arguments.rounds, lambda _: CALLS, lambda x, n: seconds(x, n) / n)
    for (name, way), times in took.items():
        ratios = [a / b for a, b in zip(times, took["causal", way], strict=True)]
        report.add({
            "row": name, "pass": way, "error": wrong[name], "over_causal": turns.quartiles(ratios),
            "milliseconds": turns.quartiles([1e3 * x for x in times]),
        })  # fmt: skip
    return sum(not x <= MOST_ERROR for x in wrong.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Time each option; return the exit code."""
    sizes = {"--length": 16384, "--heads": 32, "--kv-heads": 8, "--dim": 128, "--rounds": 7}
    return command(__doc__, {x: {"type": int, "default": n} for x, n in sizes.items()}, body, argv)


if __name__ == "__main__":
    sys.exit(main())
