"""Answer of ``plan --advise``: the strategy to take on given hosts, by the bytes that it sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ring_core.base.arguments import check_size
from ring_core.cost.model import Model
from ring_core.cost.sent import COUNTED, bytes_by_link, bytes_held
from ring_core.plan.plan import Plan

#: Strategies that are compared, by their names on the page "which strategy".
STRATEGIES = {name: config for count in COUNTED for name, config in count.compared.items()}

#: Names that are left out where all ranks are on one host.
GROUPED = {name for count in COUNTED if count.needs_hosts for name in count.compared}

TIE = 1.05  # of bytes: a strategy that sends up to this many times the least is tied with it

HEADER = ("strategy", "between hosts MiB", "a host's MiB", "within MiB", "held MiB")
COLUMNS = """\
between hosts and within are what a rank sends to ranks of other hosts and of its own, at most over
the ranks; a host's is the sum of what its ranks send to others; held is what a rank keeps beyond
the caller's tensors, without buffers of kernels and transports. Forward and backward."""


class Sent(NamedTuple):
    """The bytes of a strategy in forward and backward: :data:`HEADER` in bytes."""

    name: str
    between: int
    of_host: int
    within: int
    held: int

    @property
    def cells(self) -> tuple[str, ...]:
        """The strategy's row of the table: its name, and MiB."""
        return (self.name, *map(_mib, self[1:]))


def sent_by_strategy(
    plan: Plan, model: Model, ranks_per_host: int
) -> tuple[list[Sent], dict[str, str]]:
    """Return what each strategy sends, the one to take first, and why others cannot run the plan.

    On a single host strategies of groups are in neither result. If none can run it, the first
    reason is raised.
    """
    size = check_size("ranks_per_host", ranks_per_host)
    hosts = [str(rank // size) for rank in range(plan.cp_size)]
    ways: list[Sent] = []
    refusals: dict[str, str] = {}
    for name, config in STRATEGIES.items():
        if name in GROUPED and size == plan.cp_size:
            continue  # it would be one group
        try:
            within, between = bytes_by_link(plan, model, config, ranks_per_host=size)
            held = bytes_held(plan, model, config, hosts)
        except ValueError as error:
            refusals[name] = str(error)
            continue
        of_host = max(sum(between[n : n + size]) for n in range(0, plan.cp_size, size))
        ways.append(Sent(name, max(between), of_host, max(within), held))
    if not ways:
        raise ValueError(next(iter(refusals.values())))
    return in_order(ways), refusals


def in_order(ways: Sequence[Sent]) -> list[Sent]:
    """Return the strategy to take first, then the others by what they send between hosts.

    Every rank waits for the one that sends most between hosts, where links are slowest: the least
    of these bytes wins. Of strategies within 5 % of it the one that sends least within a host does,
    then the one that holds least.
    """
    least = min(way.between for way in ways)
    tied = [way for way in ways if way.between <= TIE * least]
    taken = min(tied, key=lambda way: (way.within, way.held))
    others = sorted(ways, key=lambda way: (way.between, way.within))
    return [taken, *(way for way in others if way is not taken)]


def advice(ways: Sequence[Sent], *, num_hosts: int, ranks_per_host: int, layout: str) -> str:
    """Return which of the results of :func:`sent_by_strategy` to take and why, in two lines."""
    best = ways[0]
    if num_hosts == 1:
        return (
            f'take strategy="auto": all {ranks_per_host} ranks are on one host, where it chooses by '
            f"what the GPUs\ncan do; least sent there: {best.name}, {_mib(best.within)} MiB a rank"
        )
    config = STRATEGIES[best.name]
    spelled = f'"{config.name}"'
    if best.name != config.name:  # which would not say enough
        spelled = f'StrategyConfig("{config.name}", outer="{config.outer}")'
    return (
        f"take strategy={spelled}, layout={layout!r}\n"
        f"why: {num_hosts} hosts of {ranks_per_host} ranks wait for the rank that sends most between "
        f"hosts; of those within 5 % of the least it sends least within a host"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"
