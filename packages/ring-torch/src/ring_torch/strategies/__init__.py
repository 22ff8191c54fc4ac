"""How tokens move so that each work item finds its operands, forward and backward.

May import ``call``, ``transports`` and what is below. A new strategy is one file here, a line in
``strategy_for`` and one in ``choose``.
"""

from __future__ import annotations

from ring_core import RingProgram, StrategyName, gather_program
from ring_core.checks import Sizes
from ring_torch.call import Call, Strategy
from ring_torch.kernels.api import Kernel
from ring_torch.payload import ONE_GROUP
from ring_torch.strategies.balanced import Balanced
from ring_torch.strategies.gather import Gather, head_groups_of
from ring_torch.strategies.ring import Ring
from ring_torch.strategies.single import Single, only_item
from ring_torch.strategies.two_stage import TwoStageGather
from ring_torch.strategies.ulysses import Ulysses

#: Those whose kernels run in an inner call, of one rank: for all tokens and some of the heads.
HEAD_STRATEGIES: frozenset[StrategyName] = frozenset({"ulysses"})


def strategy_for(
    name: StrategyName, program: RingProgram, rank: int, kernel: Kernel, sizes: Sizes, *, itemsize: int,
    needs_index: bool, sinks: bool, segment_ids: bool, inner: Call | None,
) -> Strategy:  # fmt: skip
    """What runs calls of a strategy's name: by what its kernel can do, and on one rank."""
    if inner is not None:
        return Ulysses(inner)
    if name == "gather":
        if kernel.capabilities.bands != "any":
            return TwoStageGather.of(program.plan, rank)
        whole = needs_index or segment_ids
        groups = ONE_GROUP if whole else head_groups_of(program, sizes, itemsize)
        return Gather(groups, gather_program(program.plan, rank))
    item = only_item(program.plan, kernel, batch=sizes.batch, sinks=sinks, segment_ids=segment_ids)
    if item is not None:
        return Single(item, name)
    return (Balanced if name == "balanced" else Ring).of(program, rank)
