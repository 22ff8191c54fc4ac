"""How tokens move so that each work item finds its operands, forward and backward.

May import ``call``, ``transports`` and what is below. A new strategy is one file here, which ends
in its :class:`~ring_torch.strategies.api.StrategySpec`, and its name in ``STRATEGIES``.
"""

from __future__ import annotations

from ring_torch.call import Strategy
from ring_torch.strategies.api import Resolution, StrategySpec
from ring_torch.strategies.balanced import BALANCED
from ring_torch.strategies.gather import GATHER
from ring_torch.strategies.ring import RING
from ring_torch.strategies.single import Single, only_item
from ring_torch.strategies.ulysses import ULYSSES

#: The strategies of ``strategy=``: ``auto`` takes the first of its own that can do a call.
STRATEGIES: tuple[StrategySpec, ...] = (GATHER, RING, BALANCED, ULYSSES)


def strategy_names() -> tuple[str, ...]:
    """Return the names that ``strategy=`` takes."""
    return ("auto", *(spec.name for spec in STRATEGIES))


def resolve(spec: StrategySpec, given: Resolution, *, sinks: bool) -> Strategy:
    """Return the object that runs a strategy's passes on a rank; of one rank often one launch."""
    item = only_item(
        given.program.plan, given.kernel, batch=given.sizes.batch, sinks=sinks,
        segment_ids=given.segment_ids,
    )  # fmt: skip
    return spec.resolve(given) if item is None else Single(item, spec.name)
