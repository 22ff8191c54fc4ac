"""What the collectives of a traced pass carry, and what they have to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from ring_core import WrongResultError
from ring_core.programs.steps import Stage
from ring_jax.rank_view import remote_table, step_table
from ring_jax.records import Inputs, Pass, Static

_COLLECTIVES = frozenset({"ppermute", "all_gather", "reduce_scatter", "all_to_all", "psum"})


def check_traffic(
    static: Static, inputs: Inputs, which: Pass, run: Callable[..., Any], *arrays: Any
) -> None:
    """Trace a pass of a strategy once more, and count the bytes that its collectives carry.

    Raises:
        WrongResultError: They are not those of the program.
    """
    size = static.plan.cp_size
    if static.axis_name is None or size == 1:
        return
    moved = sum(_moved(jax.make_jaxpr(run)(*arrays).jaxpr, size))
    expected = _EXPECTED[static.strategy](static, inputs, which)
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


def _bytes(*arrays: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in arrays if x is not None)


def _ring(static: Static, x: Inputs, which: Pass) -> int:
    program, size, wide = static.program, static.plan.cp_size, np.dtype(static.wide).itemsize
    total = 0
    for stage in program.forward if which == "forward" else program.backward:
        if stage.kv_hop is not None:
            total += size * _bytes(x.k, x.v, x.k_ids)
        if stage.grad_hop is not None and which == "backward":
            total += size * (x.k.size + x.v.size) * wide
        if stage.helps:
            total += _help(static, x, which, stage, wide)
    return total


def _help(static: Static, x: Inputs, which: Pass, stage: Stage, wide: int) -> int:
    """SampledQueries to helpers, and results back."""
    helpers = len(step_table(static.program, stage.step).helpers)
    rows = x.q.size // x.q.shape[3]
    bias = 0 if x.bias is None else x.bias.size // x.bias.shape[3] * x.k.shape[1]
    there = _bytes(x.q, x.q_ids) + (0 if x.bias is None else bias * x.bias.dtype.itemsize)
    if which == "forward":
        return helpers * (there + rows * (x.v.shape[3] + 1) * wide)
    there += rows * (x.v.shape[3] * x.q.dtype.itemsize + 2 * wide)
    return helpers * (there + (x.q.size + (bias if static.bias_grad else 0)) * wide)


def _gather(static: Static, x: Inputs, which: Pass) -> int:
    if remote_table(static.program) is None:
        return 0
    size, wide = static.plan.cp_size, np.dtype(static.wide).itemsize
    if which == "forward":
        return size * (size - 1) * _bytes(x.k, x.v, x.k_ids)
    return size * (size - 1) * (x.k.size + x.v.size) * wide


#: Bytes that leave all ranks together in a pass, by strategy.
_EXPECTED: dict[str, Callable[[Static, Inputs, Pass], int]] = {
    "ring": _ring, "balanced": _ring, "gather": _gather,
}  # fmt: skip
