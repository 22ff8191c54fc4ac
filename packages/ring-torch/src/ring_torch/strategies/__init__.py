"""How tokens move so that each work item finds its operands, forward and backward.

May import ``call``, ``transports`` and what is below. A new strategy is one file here, a line in
``strategy_for`` and one in ``choose``.
"""

from __future__ import annotations

from ring_core import Plan, StrategyName
from ring_torch.call import Strategy
from ring_torch.kernels.api import Kernel
from ring_torch.strategies.gather import Gather
from ring_torch.strategies.ring import Ring
from ring_torch.strategies.single import Single, only_item
from ring_torch.strategies.two_stage import TwoStageGather


def strategy_for(
    name: StrategyName, plan: Plan, kernel: Kernel, *, batch: int, sinks: bool, segment_ids: bool
) -> Strategy:
    """What runs calls of a strategy's name: by what its kernel can do, and on one rank."""
    if name == "gather":
        return Gather() if kernel.capabilities.bands == "any" else TwoStageGather()
    item = only_item(plan, kernel, batch=batch, sinks=sinks, segment_ids=segment_ids)
    return Ring(name) if item is None else Single(item, name)
