"""Strategies: ways to move tokens so that each work item finds its operands; and their choice.

May import ``rank_view`` and what is below it. A new strategy is one file here, and a line in
``STRATEGIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax

from ring_core import (
    KernelConfig,
    Mask,
    Request,
    RingProgram,
    StrategyName,
    UnsupportedError,
    make_plan,
    ring_program,
    viz,
)
from ring_jax.kernels import Selection, ask, sample_dtype
from ring_jax.kernels.absent import AbsentKernel, or_broken
from ring_jax.rank_view import Constants
from ring_jax.records import BackwardInputs, CallSpec, Devices, Grads, Inputs, Kernel, LocalShape
from ring_jax.strategies.gather import GATHER
from ring_jax.strategies.ring import RING
from ring_jax.strategies.steps import Strategy

#: The strategies of ``strategy=``. ``auto`` takes the first that does not refuse, or the program's
#: own as soon as it comes to that.
STRATEGIES: Mapping[StrategyName, Strategy] = MappingProxyType(
    {"gather": GATHER, "ring": RING, "balanced": RING}
)

_TOKENS = 512  # of the call by which a kernel is tried


class Way(NamedTuple):
    """The strategy and the kernels of a call, with the reasons for both.

    Attributes:
        strategy: The strategy.
        kernels: The kernels that run its launches.
        rejected: Strategies that ``auto`` did not take, each with its reasons.
    """

    strategy: StrategyName
    kernels: Selection
    rejected: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def describe(self) -> str:
        """Return the lines of ``explain`` about kernels and movement."""
        lines = [self.kernels.describe(), f"strategy {self.strategy}, transport xla"]
        lines += [f"  not {name}: {'; '.join(reasons)}" for name, reasons in self.rejected]
        return "\n".join(lines)


def choose_way(
    strategy: str,
    program: RingProgram,
    request: Request,
    devices: Devices,
    kernels_of: Callable[[StrategyName], Selection],
) -> Way:
    """Return the strategy that a call asked for, or the one that ``auto`` takes, and its kernels.

    ``auto`` takes the program's own strategy, ``ring`` or ``balanced``, if those before it in
    ``STRATEGIES`` refuse. It also leaves out a strategy for which other kernels would run than in
    the program's own, as the kernels of a ring are the fastest that there are.

    Args:
        strategy: A name, or ``auto``.
        program: The call's plan in the order of a ring.
        request: The options and sizes that the call asks for, on one device.
        devices: The devices along the axis.
        kernels_of: Returns the kernels for a strategy, or raises UnsupportedError.

    Raises:
        UnsupportedError: The strategy cannot do this call, or no kernel can.
    """
    if strategy != "auto":
        name = named_strategy(strategy, program)
        return Way(name, kernels_of(name))
    in_ring = kernels_of(program.strategy)
    rejected: list[tuple[str, tuple[str, ...]]] = []
    for name, candidate in STRATEGIES.items():
        if name == program.strategy:
            break
        reasons = (
            *candidate.refusals(program),
            *candidate.automatic_refusals(program, request, devices),
        )
        if not reasons:
            try:
                way = Way(name, kernels_of(name))
            except UnsupportedError as error:  # the named kernel cannot run this strategy
                reasons = (str(error),)
            else:
                if way.kernels.names == in_ring.names:
                    return way
                kernels, of_ring = way.kernels.names, in_ring.names
                reasons = (f"its kernels would be {kernels}, and those of a ring are {of_ring}",)
        rejected.append((name, reasons))
    return Way(program.strategy, in_ring, tuple(rejected))


def named_strategy(name: str, program: RingProgram) -> StrategyName:
    """Look up a strategy by name, and check that it can run the program.

    Raises:
        UnsupportedError: It cannot run this program.
    """
    strategy = STRATEGIES.get(cast("StrategyName", name))
    reasons = ["only ring-torch has it"] if strategy is None else strategy.refusals(program)
    if reasons:
        raise UnsupportedError(
            f"strategy {name!r}: {'; '.join(reasons)}. Instead: use strategy='ring' or 'auto'"
        )
    return cast("StrategyName", name)


def explained(call: CallSpec, way: Way) -> str:
    """Return the text of :meth:`ContextParallel.explain`, for a call that was checked."""
    launches, plan = STRATEGIES[call.strategy].launches(call.program), call.plan
    size = Constants(*map(sum, zip(*(x.constants(plan) for x in launches), strict=True)))
    of_kernels = {
        f"tiles of {kernel.capabilities.name}": len(launches) * added
        for kernel in way.kernels.kernels
        if isinstance(added := or_broken(kernel, partial(kernel.constant_bytes, call.program)), int)
    }
    contents = {
        "work items of all ranks": size.items, "kinds of a predicate's tiles": size.kinds,
        "boundaries of documents": size.boundaries, "positions of all ranks": size.positions, **of_kernels,
    }  # fmt: skip
    parts = ", ".join(f"{added:,} of {what}" for what, added in contents.items() if added)
    failing = {kernel.capabilities.name: trace_error(kernel) for kernel in way.kernels.kernels}
    return "\n".join([
        way.describe(),
        *(f"  {name} is broken: {reason}" for name, reason in failing.items() if reason),
        (
            f"program            {len(launches)} launches or loops of them, forward and backward; "
            f"{sum(contents.values()):,} bytes of constants: {parts or 'none'}"
        ),
        viz.describe(call.program, pictures=False),
    ])  # fmt: skip


def trace_error(kernel: Kernel) -> str:
    """Return why a small causal call on one device fails, asked of a kernel and traced with it.

    Returns:
        The reason; empty if it does not fail, refuses the call, or is for every platform.
    """
    can, dtype = kernel.capabilities, sample_dtype(kernel.capabilities)
    if not can.devices:
        return ""
    program = ring_program(make_plan(Mask(causal=True), seq_len=_TOKENS, cp_size=1))
    config = KernelConfig(can.name)
    call = CallSpec(program, None, 0.125, None, 0.0, (kernel,), config, dtype, head_dim=64)
    x: Any = jax.ShapeDtypeStruct((1, _TOKENS, 2, 64), dtype)
    local = LocalShape(
        1, _TOKENS, (_TOKENS,), 64, 64, x.dtype.itemsize, False, False,
        jax.local_devices()[0].device_kind, dtype, None, False, False,
    )  # fmt: skip

    def gradients(inputs: Inputs) -> Grads:
        strategy = STRATEGIES[call.strategy]
        state, last = strategy.forward(call, inputs)
        upstream = BackwardInputs(state.out.astype(dtype), state.lse, state.lse, state.out)
        return strategy.backward(call, inputs, upstream, last)

    def traced() -> object:
        refused = ask(
            kernel, Request(can.devices[0], dtype, 64, 64), config, program, local
        ).forward
        return refused or jax.eval_shape(gradients, Inputs(x, x, x, *[None] * 7))

    result = or_broken(kernel, traced)
    return result.reason if isinstance(result, AbsentKernel) else ""
