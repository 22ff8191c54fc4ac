"""What the collectives of a traced pass carry, and what they have to; how fast a pass was.

One that is faster than the device can be left work out. The host's clock is read before the queries
(in a backward, and the gradients of the output) go into the pass, and when its result is there, so
what is measured is no shorter than the pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ring_core import WrongResultError
from ring_core.cost import BACKWARD_FLOPS, Model
from ring_core.tripwire import peak_tflops
from ring_jax.collectives import Ranks
from ring_jax.records import Array, Inputs, Pass, Static, nbytes
from ring_jax.tripwire.settings import Turn

_COLLECTIVES = frozenset({"ppermute", "all_gather", "reduce_scatter", "all_to_all", "psum"})


def check_traffic(
    static: Static,
    inputs: Inputs,
    which: Pass,
    expected: int,
    run: Callable[..., Any],
    *arrays: Any,
) -> None:
    """Trace a pass of a strategy once more, and count the bytes that its collectives carry.

    Args:
        static: The call.
        inputs: This device's.
        which: The pass.
        expected: Bytes that leave all ranks together, by the strategy.
        run: The pass, to be traced.
        arrays: What it is given.

    Raises:
        WrongResultError: They are not those of the program.
    """
    size = static.plan.cp_size
    if static.axis_name is None or size == 1:
        return
    moved = sum(_moved(jax.make_jaxpr(run)(*arrays).jaxpr, size))
    if which == "forward" and inputs.bias_shift is not None:
        expected += size * (size - 1) * nbytes(inputs.k_ids)  # to know what rows of a bias see
    if moved != expected:
        raise WrongResultError(
            f"the collectives of a {which} carry {moved:,} bytes between {size} ranks, and the "
            f"program {expected:,}: strategy {static.strategy!r}, layout "
            f"{str(static.plan.q_layout.name)!r}, mask {static.plan.mask.describe()!r}"
        )


def _moved(jaxpr: Any, size: int) -> Iterator[int]:
    """Bytes that leave all ranks together, of each collective."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _COLLECTIVES:
            for x in equation.invars:
                ranks = len(equation.params["perm"]) if name == "ppermute" else size
                share = x.aval.size * x.aval.dtype.itemsize
                if name == "all_gather":
                    share *= size - 1
                elif name == "reduce_scatter":
                    share = share // size * (size - 1)
                yield ranks * share
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                yield from _moved(getattr(inner, "jaxpr", inner), size)


def start(turn: Turn, inputs: Inputs, *arrays: Array) -> tuple[Array | None, list[Array]]:
    """Read the clock, then give back the arrays that a pass computes with.

    Returns:
        Microseconds, ``None`` where a rate is not checked, and the arrays.
    """
    if _peak(inputs) is None:
        return None, list(arrays)
    at = turn.run(lambda: _read(turn.number), lambda: turn.number)
    at, *held = lax.optimization_barrier((at, *arrays))
    return at, held


def check_rate(
    turn: Turn, static: Static, inputs: Inputs, which: Pass, at: Array | None, *results: Array
) -> None:
    """Compare a pass with the device's peak, if it is this call's turn."""
    peak = _peak(inputs)
    if peak is None or at is None:
        return
    q, v = inputs.q, inputs.v
    model = Model(q.shape[2], q.shape[2], q.shape[3], v.shape[3], q.shape[0])
    pairs = static.program.work().sum(axis=0) * model.flops_per_pair
    flops = jnp.asarray(pairs * (1.0 if which == "forward" else BACKWARD_FLOPS), jnp.float32)
    ring = Ranks(static.axis_name, static.plan.cp_size)

    def compare() -> None:
        sums = [jnp.sum(x, dtype=jnp.float32) for x in results]  # all of them has to be there
        took = jnp.maximum(_read(*sums) - at, 1)  # unsigned: it may wrap
        rates = ring.gather((flops[ring.rank()] / took.astype(jnp.float32) / 1e6)[None], 0)
        jax.debug.callback(partial(_compare, which, peak), rates)

    turn.run(compare, lambda: None)


def _peak(inputs: Inputs) -> float | None:
    """The device's, where the plan knows a call's work."""
    hidden = inputs.q_ids is not None or inputs.bias is not None
    return None if hidden else peak_tflops(jax.devices()[0].device_kind)


def _read(*before: Array) -> Array:
    """Microseconds of the host's clock, uint32, once some arrays are there.

    To the compiler no reading is another's: each has a function of its own.
    """
    return cast(
        "Array",
        jax.pure_callback(
            lambda *_: np.uint32(time.perf_counter_ns() // 1000 % (1 << 32)),
            jax.ShapeDtypeStruct((), jnp.uint32),
            *before,
            vmap_method="sequential",
        ),
    )


def _compare(which: Pass, peak: float, rates: Any) -> None:
    for rank, rate in enumerate(rates):
        if rate > peak:
            raise WrongResultError(
                f"rank {rank}: a {which} ran at {rate:,.0f} TFLOP/s, and the device has "
                f"{peak:,.0f}: work was left out"
            )
