"""Count the bytes that each rank sends in a call, in all and by link, for every strategy.

Letters: ``B`` batch, ``H`` query heads, ``K`` key/value heads, ``D`` head dim of Q and K, ``Dv`` of
V, ``Tq`` and ``Tk`` queries and keys per rank, ``e`` bytes per element.
"""

from ring_core.cost.counts.api import CountedCall as CountedCall, StrategyBytes as StrategyBytes
from ring_core.cost.model import BACKWARD_FLOPS as BACKWARD_FLOPS, Model as Model
from ring_core.cost.sent import (
    LinkBytes as LinkBytes,
    bytes_by_link as bytes_by_link,
    bytes_sent as bytes_sent,
)
