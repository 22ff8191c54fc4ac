"""Strategies: ways to move tokens so that each work item finds its operands.

May import ``kernels``, ``collectives``, ``rank_view`` and ``records``. A new strategy is one file
here, and a line in ``STRATEGIES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ring_jax.strategies.gather import GATHER
from ring_jax.strategies.ring import RING
from ring_jax.strategies.steps import Strategy

STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {"ring": RING, "balanced": RING, "gather": GATHER}
)
