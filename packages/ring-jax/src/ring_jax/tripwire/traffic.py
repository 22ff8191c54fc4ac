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
from math import prod
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ring_core import WrongResultError
from ring_core.cost import BACKWARD_FLOPS, Model
from ring_core.tripwire import peak_tflops
from ring_jax.rank_view import ranks_of
from ring_jax.records import Array, CallSpec, Direction, Inputs, nbytes
from ring_jax.tripwire.settings import CheckedCall

_COLLECTIVES = frozenset({"ppermute", "all_gather", "reduce_scatter", "all_to_all", "psum"})


def check_traffic(
    call: CallSpec, inputs: Inputs, direction: Direction, expected: int, run: Callable[..., Any],
    *arrays: Any,
) -> None:  # fmt: skip
    """Trace a pass of a strategy once more, and count the bytes that its collectives carry.

    Args:
        call: The call.
        inputs: This device's arrays.
        direction: The pass.
        expected: The bytes that leave all ranks together, by the strategy.
        run: The strategy's function of ``arrays``.
        arrays: Its arguments.

    Raises:
        WrongResultError: The bytes are not those of the program.
    """
    size = call.plan.cp_size
    if call.axis_name is None or size == 1:
        return
    moved = _carried(size, run, *arrays)
    if direction == "forward" and inputs.bias_shift is not None:
        # The shift of a bias needs the segment ids of all keys, see bias_shift.
        expected += size * (size - 1) * nbytes(inputs.k_ids)
    if moved != expected:
        raise WrongResultError(
            f"the collectives of a {direction} carry {moved:,} bytes between {size} ranks, and the "
            f"program {expected:,}: strategy {call.strategy!r}, layout "
            f"{str(call.plan.q_layout.name)!r}, mask {call.plan.mask.describe()!r}"
        )


def check_movement(
    size: int, rows_sent: int, run: Callable[[Array], Array], rows: Array, out: Array
) -> None:
    """Trace a movement and its backward once more, and count the bytes of their collectives.

    Args:
        size: Number of ranks.
        rows_sent: Rows that leave all ranks together, by the positions of their tokens.
        run: The movement, a function of a rank's rows.
        rows: Rows of this rank.
        out: Rows that they become.

    Raises:
        WrongResultError: The bytes are not those of the rows that change rank.
    """
    expected = rows_sent * prod(rows.shape[1:]) * rows.dtype.itemsize
    carried = {"movement": _carried(size, run, rows)}
    if jnp.issubdtype(rows.dtype, jnp.inexact):
        both = _carried(size, lambda x, grad: jax.vjp(run, x)[1](grad), rows, out)
        carried["backward of a movement"] = both - carried["movement"]
    for name, moved in carried.items():
        if moved != expected:
            raise WrongResultError(
                f"the collectives of a {name} carry {moved:,} bytes between {size} ranks, and the "
                f"rows that change rank have {expected:,}"
            )


def _carried(size: int, run: Callable[..., Any], *arrays: Any) -> int:
    """Return the bytes that leave all ranks together by the collectives of a function."""
    return sum(_bytes_moved(jax.make_jaxpr(run)(*arrays).jaxpr, size))


def _bytes_moved(jaxpr: Any, size: int) -> Iterator[int]:
    """Yield, for each collective in a jaxpr, the bytes that leave all ranks together.

    A scan counts as often as it runs, the body of any other loop once, and a branch with all its
    sides. A ``psum`` counts as its whole array on every rank.
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        times = equation.params["length"] if name == "scan" else 1
        if name in _COLLECTIVES:
            for x in equation.invars:
                # A permute sends once a pair, whatever the number of ranks. Of an all-gather each
                # rank's array leaves for all others of its group; of a scattered sum and of an
                # all-to-all all pieces but the own one.
                ranks = len(equation.params["perm"]) if name == "ppermute" else size
                share = x.aval.size * x.aval.dtype.itemsize
                groups = equation.params.get("axis_index_groups")
                members = len(groups[0]) if groups else size
                if name == "all_gather":
                    share *= members - 1
                elif name in ("reduce_scatter", "all_to_all"):
                    share = share // members * (members - 1)
                yield ranks * share
        # The bodies of loops, branches and calls are jaxprs among the parameters.
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                yield times * sum(_bytes_moved(getattr(inner, "jaxpr", inner), size))


def start_clock(
    checked_call: CheckedCall, inputs: Inputs, *arrays: Array
) -> tuple[Array | None, list[Array]]:
    """Read the host's clock before the arrays that a pass computes with are available.

    Returns:
        The time in microseconds, uint32, or ``None`` if no peak is known or arrays decide the work;
        and the arrays, tied to that reading. In a call that is not checked the clock is not read,
        and the call's number is returned instead of the time.
    """
    if _peak(inputs) is None:
        return None, list(arrays)
    number = checked_call.number
    start_time = checked_call.run(lambda: _read_clock(number), lambda: number)
    # The pass computes with the tied arrays, so it cannot begin before the clock is read.
    start_time, *tied = lax.optimization_barrier((start_time, *arrays))
    return start_time, tied


def check_rate(
    checked_call: CheckedCall, call: CallSpec, inputs: Inputs, direction: Direction,
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
    pairs = call.inner.program.work().sum(axis=0) * model.flops_per_pair
    if (trade := call.trade) is not None:  # all tokens of a group, for a part of the heads
        part = trade.heads.q.shape[1] / q.shape[2]
        pairs = np.repeat(pairs, trade.grid.ulysses_size) * part
    flops = jnp.asarray(pairs * (1.0 if direction == "forward" else BACKWARD_FLOPS), jnp.float32)
    ring = ranks_of(call)

    def compare() -> None:
        sums = [jnp.sum(x, dtype=jnp.float32) for x in results]  # needs every element
        took = jnp.maximum(_read_clock(*sums) - start_time, 1)  # unsigned: the clock may wrap
        rates = ring.gather((flops[ring.rank()] / took.astype(jnp.float32) / 1e6)[None], 0)
        jax.debug.callback(partial(_compare_rates, direction, peak), rates)

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


def _compare_rates(direction: Direction, peak: float, rates: Any) -> None:
    """Raise ``WrongResultError`` if a rank's rate exceeds the peak; runs on the host."""
    for rank, rate in enumerate(rates):
        if rate > peak:
            raise WrongResultError(
                f"rank {rank}: a {direction} ran at {rate:,.0f} TFLOP/s, and the device has "
                f"{peak:,.0f}: work was left out"
            )
