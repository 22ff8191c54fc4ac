"""How fast a pass was: faster than the device can be, and work was left out.

The host's clock is read before the queries (in a backward, and the gradients of the output) go into
the pass, and when its result is there, so what is measured is no shorter than the pass.
"""

from __future__ import annotations

import time
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
from ring_jax.records import Array, Inputs, Pass, Static
from ring_jax.tripwire.settings import Turn


def start(
    turn: Turn, inputs: Inputs, which: Pass, *arrays: Array
) -> tuple[Array | None, list[Array]]:
    """Read the clock, then give back the arrays that a pass computes with.

    Returns:
        Microseconds, ``None`` where a rate is not checked, and the arrays.
    """
    if _peak(inputs) is None:
        return None, list(arrays)
    at = turn.run(lambda: _read(f"{which} starts", turn.number), lambda: turn.number)
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
        took = jnp.maximum(_read(f"{which} ends", *sums) - at, 1)  # unsigned: it may wrap
        rates = ring.gather((flops[ring.rank()] / took.astype(jnp.float32) / 1e6)[None], 0)
        jax.debug.callback(partial(_compare, which, peak), rates)

    turn.run(compare, lambda: None)


def _peak(inputs: Inputs) -> float | None:
    """The device's, where the plan knows a call's work."""
    hidden = inputs.q_ids is not None or inputs.bias is not None
    return None if hidden else peak_tflops(jax.devices()[0].device_kind)


def _read(what: str, *before: Array) -> Array:
    """Microseconds of the host's clock, uint32, once some arrays are there."""
    shape = jax.ShapeDtypeStruct((), jnp.uint32)
    return cast(
        "Array", jax.pure_callback(partial(_now, what), shape, *before, vmap_method="sequential")
    )


def _now(when: str, *before: Any) -> Any:
    """To the compiler no reading is another's."""
    del when, before
    return np.uint32(time.perf_counter_ns() // 1000 % (1 << 32))


def _compare(which: Pass, peak: float, rates: Any) -> None:
    """Compare on the hosts of all ranks, which raise the same.

    Raises:
        WrongResultError: No device is so fast.
    """
    for rank, rate in enumerate(rates):
        if rate > peak:
            raise WrongResultError(
                f"rank {rank}: a {which} ran at {rate:,.0f} TFLOP/s, and the device has "
                f"{peak:,.0f}: work was left out"
            )
