"""Strategies: ways to move tokens so that each work item finds its operands; and their choice.

May import ``rank_view`` and what is below it. A new strategy is one file here, and a line in
``STRATEGIES``. ``explanation`` tells users what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, cast

from ring_core import Request, RingProgram, StrategyName, UnsupportedError
from ring_jax.kernels import Selection
from ring_jax.records import Devices
from ring_jax.strategies.gather import GATHER
from ring_jax.strategies.ring import BALANCED, RING
from ring_jax.strategies.steps import Strategy
from ring_jax.strategies.ulysses import HYBRID, ULYSSES

#: The strategies of ``strategy=``. ``auto`` takes the first that does not refuse, or the program's
#: own as soon as it comes to that.
STRATEGIES: Mapping[StrategyName, Strategy] = MappingProxyType(
    {strategy.name: strategy for strategy in (ULYSSES, GATHER, RING, BALANCED, HYBRID)}
)


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

    def describe(self, notes: Sequence[str]) -> str:
        """Return the lines of ``explain`` about kernels, with their notes, and movement."""
        lines = [self.kernels.describe(notes), f"strategy {self.strategy}, transport xla"]
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
        name = named_strategy(strategy, program, request)
        return Way(name, kernels_of(name))
    in_ring = kernels_of(program.strategy)
    rejected: list[tuple[str, tuple[str, ...]]] = []
    for name, candidate in STRATEGIES.items():
        if name == program.strategy:
            break
        reasons = (
            *candidate.refusals(program, request),
            *candidate.automatic_refusals(program, request, devices),
        )
        if not reasons:
            try:
                way = Way(name, kernels_of(name))
            except UnsupportedError as error:  # the named kernel cannot run this strategy
                reasons = (str(error),)
            else:
                if way.kernels.names == in_ring.names:
                    return way._replace(rejected=tuple(rejected))
                kernels, of_ring = way.kernels.names, in_ring.names
                reasons = (f"its kernels would be {kernels}, and those of a ring are {of_ring}",)
        rejected.append((name, reasons))
    return Way(program.strategy, in_ring, tuple(rejected))


def named_strategy(name: str, program: RingProgram, request: Request) -> StrategyName:
    """Look up a strategy by name, and check that it can run the program.

    Raises:
        UnsupportedError: It cannot run this program.
    """
    strategy = cast("StrategyName", name)
    if reasons := STRATEGIES[strategy].refusals(program, request):
        raise UnsupportedError(
            f"strategy {name!r}: {'; '.join(reasons)}. Instead: use strategy='ring' or 'auto'"
        )
    return strategy
