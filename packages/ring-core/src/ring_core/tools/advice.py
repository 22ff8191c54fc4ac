"""Answer of ``plan --advise --ranks-per-host``: the strategy to take between hosts, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ring_core.cost.model import Model
from ring_core.cost.sent import COUNTED, bytes_by_link, bytes_held
from ring_core.plan.plan import Plan

#: Strategies that are compared, by their names on the page "which strategy".
STRATEGIES = {name: config for count in COUNTED for name, config in count.compared.items()}

#: Names that are left out where all ranks are on one host.
GROUPED = {name for count in COUNTED if count.needs_hosts for name in count.compared}

#: Strategies that send at most this many times what the best one sends count as tied with it.
TIE = 1.05


@dataclass(frozen=True)
class Sent:
    """The bytes of a strategy in forward and backward, each at most over the ranks or hosts.

    The largest of each may be of another rank.

    Attributes:
        name: A key of ``STRATEGIES``.
        between: Bytes that a rank sends to other hosts.
        within: Bytes that a rank sends to ranks of its host.
        of_host: Sum of what the ranks of a host send to other hosts.
        held: Bytes that a rank holds beyond the caller's tensors.
    """

    name: str
    between: int
    within: int
    of_host: int
    held: int

    @property
    def spelled(self) -> str:
        """The argument ``strategy=`` of a call."""
        config = STRATEGIES[self.name]
        if self.name == config.name:  # which says enough
            return f'"{self.name}"'
        return f'StrategyConfig("{config.name}", outer="{config.outer}")'


def sent_by_strategy(
    plan: Plan, model: Model, ranks_per_host: int
) -> tuple[list[Sent], dict[str, str]]:
    """Return what each strategy sends, the one to take first, and why others cannot run the plan.

    The reasons are by name. On a single host strategies of groups are in neither result.

    Every rank waits for the one that sends most between hosts, where links are slowest: the least
    of these bytes wins. Of strategies within 5 % of it the one that sends least within a host does,
    then the one that holds least.

    Raises:
        ValueError: No strategy can run the plan, or hosts would have unlike numbers of ranks.
    """
    hosts = [str(rank // ranks_per_host) for rank in range(plan.cp_size)]
    ways: list[Sent] = []
    refusals: dict[str, str] = {}
    for name, config in STRATEGIES.items():
        if name in GROUPED and ranks_per_host == plan.cp_size:
            continue  # it would be one group
        try:
            within, between = bytes_by_link(plan, model, config, ranks_per_host=ranks_per_host)
            held = bytes_held(plan, model, config, hosts)
        except ValueError as error:
            refusals[name] = str(error)
            continue
        of_host = max(
            sum(between[first : first + ranks_per_host])
            for first in range(0, plan.cp_size, ranks_per_host)
        )
        ways.append(Sent(name, max(between), max(within), of_host, held))
    if not ways:
        raise ValueError(next(iter(refusals.values())))
    return in_order(ways), refusals


def in_order(ways: Sequence[Sent]) -> list[Sent]:
    """Return the strategy to take first, then the others by what they send between hosts."""
    taken = min(tied(ways), key=lambda way: (way.within, way.held))
    others = sorted(ways, key=lambda way: (way.between, way.within))
    return [taken, *(way for way in others if way is not taken)]


def tied(ways: Sequence[Sent]) -> list[Sent]:
    """Return the strategies that send the least between hosts, or within 5 % of it."""
    least = min(way.between for way in ways)
    return [way for way in ways if way.between <= TIE * least]


def advice(ways: Sequence[Sent], *, num_hosts: int, ranks_per_host: int, layout: str) -> str:
    """Return which strategy to take and why, in a few lines.

    Args:
        ways: The result of :func:`sent_by_strategy`, of which the first is to be taken.
        num_hosts: Number of hosts.
        ranks_per_host: Number of ranks of each.
        layout: The layout that was counted.
    """
    best, *others = ways
    if num_hosts == 1:
        return (
            f'take strategy="auto": all {ranks_per_host} ranks are on one host, where it chooses by '
            f"what the GPUs\ncan do; least sent there: {best.name}, {_mib(best.within)} MiB a rank"
        )
    why = (
        f"why: {num_hosts} hosts of {ranks_per_host} ranks wait for the rank that sends most between "
        f"hosts; with it that is {_mib(best.between)} MiB"
    )
    lines = [f"take strategy={best.spelled}, layout={layout!r}", why]
    ties = [way for way in tied(ways) if way is not best]
    if ties:
        within = "; ".join(f"{way.name} sends {_mib(way.within)}" for way in ties)
        lines.append(
            f"tie: within 5 % of it are others, so links within a host decide: it sends "
            f"{_mib(best.within)} MiB there; {within}"
        )
    elif others:
        lines.append(f"next: {others[0].name} with {_mib(others[0].between)} MiB")
    least = min(ways, key=lambda way: way.held)
    if least is not best:
        lines.append(
            f"memory: it holds {_mib(best.held)} MiB a rank; the least is {least.name} with "
            f"{_mib(least.held)} MiB"
        )
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def cells(way: Sent) -> tuple[str, ...]:
    """Return a strategy's row of the table: its name, and MiB."""
    sizes = (way.between, way.of_host, way.within, way.held)
    return (way.name, *map(_mib, sizes))


HEADER = ("strategy", "between hosts MiB", "a host's MiB", "within MiB", "held MiB")

#: Explains the columns of the table.
COLUMNS = """\
between hosts and within are what a rank sends to ranks of other hosts and of its own, at most over
the ranks; a host's is the sum of what its ranks send to others; held is what a rank keeps beyond
the caller's tensors, without buffers of kernels and transports. Forward and backward."""
