"""Bytes of ``ulysses``: all ranks trade tokens for heads."""

from __future__ import annotations

from ring_core.base.config import StrategyConfig
from ring_core.cost.counts.api import Count, CountedCall
from ring_core.cost.counts.trade import traded_bytes, traded_held
from ring_core.programs.grid import RankGrid


def _grid(call: CountedCall) -> RankGrid:
    """Return the grid in which all ranks trade."""
    return RankGrid(call.plan.cp_size, call.plan.cp_size)


ULYSSES = Count(
    "ulysses", lambda call: traded_bytes(call, _grid(call)),
    held=lambda call: traded_held(call, _grid(call)),
    compared={"ulysses": StrategyConfig("ulysses")},
)  # fmt: skip
