"""Strategy ``hybrid``: groups of ranks trade tokens for heads; a ring or a gather between groups.

Ranks stand in a :class:`ring_core.programs.grid.RankGrid`. In its group a rank trades tokens for
heads as in ``ulysses``. Then it has all tokens of the group for a part of the heads, and attends
together with the ranks of other groups that have the same heads::

    4 ranks, groups of 2         first trade       then attend with
    group 0   ranks 0 1          0 <-> 1           0 with 2
    group 1   ranks 2 3          2 <-> 3           1 with 3

That inner call is a ring or a gather over the layout that the groups' tokens have, in which work is
as even as in the layout of the ranks. Messages of both go over the call's own process group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ring_core import LayoutSpec, Request, StrategyConfig, UnsupportedError
from ring_core.programs.grid import RankGrid, rank_grid
from ring_core.viz.text import figure
from ring_torch.call import Call, StrategySpec
from ring_torch.comm.groups import hosts_of
from ring_torch.comm.ranks import Ranks
from ring_torch.records import Inputs
from ring_torch.strategies.ulysses import Ulysses, exchanges_of, shared_bias_refusals


@dataclass(frozen=True)
class Hybrid(Ulysses):
    """Strategy ``hybrid``: in the inner call a rank holds all tokens of its group."""

    name: str = "hybrid"

    def figures(self, call: Call, inputs: Inputs) -> list[str]:
        """Return the exchanges of heads, and the figures of the inner call between groups."""
        grid, strategy = self.grid, self.inner.strategy
        if grid.outer_size == 1:
            return super().figures(call, inputs)
        between = f"{strategy.name} over {grid.outer_size} groups of {grid.ulysses_size} ranks:"
        inside = strategy.figures(self.inner, self._inside(call, inputs)[0])
        exchanges = exchanges_of(call, inputs, self.heads).figure(backward=call.needs_grad)
        trades = [exchanges] if grid.ulysses_size > 1 else []
        return [*trades, figure("between groups", between), *inside]

    def notes(self, call: Call) -> tuple[str, ...]:
        """Return the ranks of both exchanges, with this one, and what is special about heads."""
        rank, grid = call.ranks.rank, self.grid
        lines = [
            f"trades tokens for heads with ranks {', '.join(map(str, grid.inner_ranks(rank)))}"
        ]
        if grid.outer_size > 1:
            others = ", ".join(map(str, grid.outer_ranks(rank)))
            lines.append(f"then {self.inner.strategy.name} with ranks {others}")
        return (*lines, *self.inner.strategy.notes(self.inner), *super().notes(call))


def _grid(
    ranks: Ranks, layout: LayoutSpec, request: Request, config: StrategyConfig, probe: bool
) -> RankGrid:
    """Return the grid of a call's ranks.

    Without ``ulysses_size`` it needs the ranks' hosts. Only with ``probe`` it waits for ranks that
    have not told theirs.

    Raises:
        UnsupportedError: These ranks make no such grid, or a bias is too large to gather.
        PeerError: A rank has not told its host.
    """
    hosts = None
    if config.ulysses_size is None and ranks.size > 1:
        if ranks.group is None:  # `explain` of ranks that are not there
            raise UnsupportedError(
                f"strategy {config.name!r} groups ranks by their hosts, and there is no process group to ask. "
                f"Instead: ask cp.explain in the job, or 'python -m ring_core plan --advise --ranks-per-host N'"
            )
        # A trade moves all of its bytes before and after kernels, so it stays on a host's links;
        # the ring or gather between hosts hides behind kernels.
        hosts = hosts_of(ranks, torch.device(request.device), wait=probe)
    grid = rank_grid(
        ranks.size,
        request.q_heads,
        layout,
        outer=config.outer,
        ulysses_size=config.ulysses_size,
        hosts=hosts,
    )
    if reasons := shared_bias_refusals(request, grid.ulysses_size):
        raise UnsupportedError(f"strategy {config.name!r}: {'; '.join(reasons)}")
    return grid


HYBRID = StrategySpec("hybrid", Hybrid.of, grid=_grid)
