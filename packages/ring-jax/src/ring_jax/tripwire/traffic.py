"""Checks of the bytes that a pass sends, and of its speed.

The bytes of a traced pass's collectives must be those that its program needs. A pass that is
faster than the device's peak has left work out. The host's clock is read before the queries (and in
a backward the gradients of the output) enter the pass, and when its result is there, so that the
time measured is no shorter than the pass.
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
from ring_core.programs.ring import Stage
from ring_core.tripwire import peak_tflops
from ring_jax.collectives import Ranks
from ring_jax.rank_view import remote_table, step_table
from ring_jax.records import Array, CallSpec, Direction, Inputs
from ring_jax.tripwire.settings import CheckedCall

_COLLECTIVES = frozenset({"ppermute", "all_gather", "reduce_scatter", "all_to_all", "psum"})


def check_traffic(
    call: CallSpec, inputs: Inputs, which: Direction, run: Callable[..., Any], *arrays: Any
) -> None:
    """Trace a pass of a strategy once more, and count the bytes that its collectives carry.

    Args:
        call: The call.
        inputs: This device's arrays.
        which: The pass.
        run: The strategy's function of ``arrays``.
        arrays: Its arguments.

    Raises:
        WrongResultError: The bytes are not those of the program.
    """
    size = call.plan.cp_size
    if call.axis_name is None or size == 1:
        return
    moved = sum(_moved(jax.make_jaxpr(run)(*arrays).jaxpr, size))
    expected = _EXPECTED[call.strategy](call, inputs, which)
    if which == "forward" and inputs.bias_shift is not None:
        # The shift of a bias needs the segment ids of all keys, see bias_shift.
        expected += size * (size - 1) * _bytes(inputs.k_ids)
    if moved != expected:
        raise WrongResultError(
            f"the collectives of a {which} carry {moved:,} bytes between {size} ranks, and the "
            f"program {expected:,}: strategy {call.strategy!r}, layout "
            f"{str(call.plan.q_layout.name)!r}, mask {call.plan.mask.describe()!r}"
        )


def _moved(jaxpr: Any, size: int) -> Iterator[int]:
    """Yield, for each collective in a jaxpr, the bytes that leave all ranks together."""
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


def _bytes(*arrays: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in arrays if x is not None)


def _ring_bytes(call: CallSpec, x: Inputs, which: Direction) -> int:
    """Return the bytes that leave all ranks together in one pass of a ring."""
    program, size, wide = call.program, call.plan.cp_size, np.dtype(call.wide).itemsize
    total = 0
    for stage in program.forward if which == "forward" else program.backward:
        if stage.kv_hop is not None:
            total += size * _bytes(x.k, x.v, x.k_ids)
        if stage.grad_hop is not None and which == "backward":
            total += size * (x.k.size + x.v.size) * wide
        if stage.helps:
            total += _helper_bytes(call, x, which, stage, wide)
    return total


def _helper_bytes(call: CallSpec, x: Inputs, which: Direction, stage: Stage, wide: int) -> int:
    """Return the bytes of queries to helpers and of results back, in one stage."""
    helpers = len(step_table(call.program, stage.step).helpers)
    rows = x.q.size // x.q.shape[3]
    bias = 0 if x.bias is None else x.bias.size // x.bias.shape[3] * x.k.shape[1]
    sent = _bytes(x.q, x.q_ids, x.bias_shift) + (
        0 if x.bias is None else bias * x.bias.dtype.itemsize
    )
    if which == "forward":
        return helpers * (sent + rows * (x.v.shape[3] + 1) * wide)
    sent += rows * (x.v.shape[3] * x.q.dtype.itemsize + 2 * wide)
    return helpers * (sent + (x.q.size + (bias if call.bias_grad else 0)) * wide)


def _gather_bytes(call: CallSpec, x: Inputs, which: Direction) -> int:
    """Return the bytes that leave all ranks together in one pass over gathered keys."""
    if remote_table(call.program) is None:
        return 0
    grads = (x.k.size + x.v.size) * np.dtype(call.wide).itemsize
    per_pair = _bytes(x.k, x.v, x.k_ids) if which == "forward" else grads
    return call.plan.cp_size * (call.plan.cp_size - 1) * per_pair


_EXPECTED: dict[str, Callable[[CallSpec, Inputs, Direction], int]] = {
    "ring": _ring_bytes, "balanced": _ring_bytes, "gather": _gather_bytes,
}  # fmt: skip


def start_clock(
    checked_call: CheckedCall, inputs: Inputs, *arrays: Array
) -> tuple[Array | None, list[Array]]:
    """Read the host's clock before the arrays that a pass computes with are available.

    Returns:
        The time in microseconds, uint32, or ``None`` if rates are not checked for this call; and
        the arrays, tied to that reading.
    """
    if _peak(inputs) is None:
        return None, list(arrays)
    number = checked_call.number
    start_time = checked_call.run(lambda: _read_clock(number), lambda: number)
    start_time, *tied = lax.optimization_barrier((start_time, *arrays))
    return start_time, tied


def check_rate(
    checked_call: CheckedCall, call: CallSpec, inputs: Inputs, which: Direction,
    start_time: Array | None, *results: Array,
) -> None:  # fmt: skip
    """Compare the speed of a pass with the device's peak, if this call is checked.

    ``start_time`` is that of :func:`start_clock`; the pass ends when ``results`` are there.
    """
    peak = _peak(inputs)
    if peak is None or start_time is None:
        return
    q, v = inputs.q, inputs.v
    model = Model(q.shape[2], q.shape[2], q.shape[3], v.shape[3], q.shape[0])
    pairs = call.program.work().sum(axis=0) * model.flops_per_pair
    flops = jnp.asarray(pairs * (1.0 if which == "forward" else BACKWARD_FLOPS), jnp.float32)
    ring = Ranks(call.axis_name, call.plan.cp_size)

    def compare() -> None:
        sums = [jnp.sum(x, dtype=jnp.float32) for x in results]  # needs every element
        took = jnp.maximum(_read_clock(*sums) - start_time, 1)  # unsigned: the clock may wrap
        rates = ring.gather((flops[ring.rank()] / took.astype(jnp.float32) / 1e6)[None], 0)
        jax.debug.callback(partial(_compare_rates, which, peak), rates)

    checked_call.run(compare, lambda: None)


def _peak(inputs: Inputs) -> float | None:
    """Return the device's peak in TFLOP/s; ``None`` if unknown, or if arrays decide the work."""
    hidden = inputs.q_ids is not None or inputs.bias is not None
    return None if hidden else peak_tflops(jax.devices()[0].device_kind)


def _read_clock(*after: Array) -> Array:
    """Read the host's clock in microseconds, uint32, once some arrays are there.

    Each reading has a function of its own, so that the compiler cannot merge two of them.
    """
    return cast(
        "Array",
        jax.pure_callback(
            lambda *_: np.uint32(time.perf_counter_ns() // 1000 % (1 << 32)),
            jax.ShapeDtypeStruct((), jnp.uint32),
            *after,
            vmap_method="sequential",
        ),
    )


def _compare_rates(which: Direction, peak: float, rates: Any) -> None:
    """Raise ``WrongResultError`` if a rank's rate exceeds the peak; runs on the host."""
    for rank, rate in enumerate(rates):
        if rate > peak:
            raise WrongResultError(
                f"rank {rank}: a {which} ran at {rate:,.0f} TFLOP/s, and the device has "
                f"{peak:,.0f}: work was left out"
            )
