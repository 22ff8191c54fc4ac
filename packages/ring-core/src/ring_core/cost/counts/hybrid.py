"""Bytes of ``hybrid``: groups of ranks trade tokens for heads, a ring or a gather between them."""

from __future__ import annotations

from ring_core.base.config import OUTER_NAMES, StrategyConfig
from ring_core.cost.counts.api import Count, CountedCall
from ring_core.cost.counts.gather import GATHER
from ring_core.cost.counts.ring import RING
from ring_core.cost.counts.trade import traded_bytes, traded_held
from ring_core.programs.grid import RankGrid, rank_grid


def _grid(call: CountedCall) -> RankGrid:
    """Return the grid whose groups trade."""
    return rank_grid(
        call.plan.cp_size, call.model.num_q_heads, call.plan.q_layout.name,
        outer=call.config.outer, ulysses_size=call.config.ulysses_size, hosts=call.hosts,
    )  # fmt: skip


def _outer(config: StrategyConfig) -> Count:
    """Return the count of the strategy between groups."""
    (count,) = (x for x in (RING, GATHER) if x.name == config.outer)
    return count


HYBRID = Count(
    "hybrid", lambda call: traded_bytes(call, _grid(call), _outer(call.config)),
    gathers=lambda config: _outer(config).gathers(config),
    held=lambda call: traded_held(call, _grid(call), _outer(call.config)),
    compared={f"hybrid, {x}": StrategyConfig("hybrid", outer=x) for x in OUTER_NAMES},
    needs_hosts=True,
)  # fmt: skip
