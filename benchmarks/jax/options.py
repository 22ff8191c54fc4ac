"""Time head dims, masks and options on one GPU in JAX: ``nox -s bench_jax_options``.

Batch 1, causal, bfloat16. Methods are the kernel that ``kernel="auto"`` takes, our Triton kernels,
and cuDNN as ``jax.nn.dot_product_attention`` calls it, with V zero-padded to the head dim of Q and
K; of options that change scores, or hide them, ours without the option. A bias is one for all
heads, and has a gradient. First the output and all gradients of each are compared with float32
attention at 1,024 tokens: a method that errs more than twice as much as the best of the others gets
no time. Times are of queued calls, in rounds in which all take turns, each round in a random order;
a ratio is of two times of one round, and each is kept as its quartiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import harness
from benchmarks.common.cases import (
    CAUSAL,
    JAX_ROWS,
    OPTIONS_GATE as GATE_LENGTH,
    OURS,
    Rival,
    Row,
    windowed,
)
from benchmarks.common.harness import Errors, Run
from benchmarks.jax.scaling import (
    Attend,
    both,
    calls_of,
    cudnn,
    exact,
    milliseconds,
    on_one,
    program_of,
    random_arrays,
)
from ring_core import Mask
from ring_jax.tools.doctor import versions

WINDOW, DOCUMENTS = 1024, 16
METHODS: dict[str, Attend] = {
    OURS: on_one, "triton": partial(on_one, name="triton"), "cudnn": cudnn,
}  # fmt: skip


def options_of(row: Row, length: int) -> dict[str, Any]:
    """Return a row's mask and arguments; documents are alike in all options that have them."""
    ends = np.sort(np.random.default_rng(0).choice(length - 1, DOCUMENTS - 1, replace=False) + 1)
    ids = np.searchsorted(ends, np.arange(length), side="right")
    by_option: dict[str, dict[str, Any]] = {
        "window": {"mask": windowed(WINDOW)},
        "cu_seqlens": {"mask": Mask(causal=True, cu_seqlens=(0, *ends.tolist(), length))},
        "segment_ids": {"segment_ids": jnp.asarray(ids[None], jnp.int32)},
        "softcap": {"softcap": 50.0},
        "alibi": {"alibi_slopes": 2.0 ** -(jnp.arange(1.0, row.heads + 1) / 4)},
        "dropout": {"dropout_p": 0.1, "dropout_seed": 7},
    }
    return {"mask": CAUSAL} | by_option.get(row.option, {})


def inputs(row: Row, length: int) -> list[Any]:
    """Return random q, k, v, the bias if there is one, and dout, in bfloat16."""
    *qkv, dout = [(1, length, *shape) for shape in row.shapes]
    bias = [(1, 1, length, length)] * (row.option == "bias")
    return random_arrays([*qkv, *bias, dout], seed=length)


def run_of(row: Row, x: Sequence[Any], way: str, rival: Rival) -> Run:
    """Return a method's compiled run of a pass, which has run once."""
    attend = partial(METHODS[rival.method], **options_of(row.of(rival), x[0].shape[1]))
    run = program_of(attend, way, x)
    jax.block_until_ready(run())
    return run


def errors(row: Row) -> Errors:
    """Return each method's largest relative RMS error of out and gradients, or why it has none."""
    x = inputs(row, GATE_LENGTH)

    def error(rival: Rival) -> float:
        definition = partial(exact, **options_of(row.of(rival), GATE_LENGTH))
        expected = jax.jit(partial(both, definition))(*(y.astype("float32") for y in x))
        pairs = zip(run_of(row, x, "both", rival)(), expected, strict=True)
        return max(
            float(jnp.sqrt(jnp.square(a.astype("float32") - b).mean()) / b.std()) for a, b in pairs
        )

    with ThreadPoolExecutor(len(METHODS)) as pool:
        found = harness.attempted(row.entrants, error, pool.map)
    return {rival.name: x for rival, x in found.items()}


def measured(row: Row, length: int, count: int) -> dict[str, Any]:
    """Measure a row, and return it with the kernel that ours took."""
    x = inputs(row, length)
    lowered = jax.jit(partial(METHODS[OURS], **options_of(row, length))).lower(*x[:-1])
    taken = "cudnn" if "__cudnn$" in str(lowered.as_text()) else "triton"

    rounds = partial(harness.take_turns, count=count, calls_of=calls_of, time_of=milliseconds)
    # Compiled in parallel: cuDNN and Triton take seconds for each.
    with ThreadPoolExecutor(len(METHODS)) as pool:
        timed = harness.timed_row(row, errors(row), partial(run_of, row, x), rounds, pool.map)
    return timed | {"kernel": taken}


@harness.command(__doc__, harness.ARGUMENTS)
def main(options: Any) -> int:
    """Compare results, then time each row; return the exit code."""
    described = harness.environment(jax.devices()[0].device_kind, versions())
    return harness.run_rows(options, JAX_ROWS, measured, described)
