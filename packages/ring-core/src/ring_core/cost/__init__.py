"""Estimate what a plan costs on given hardware: FLOPs, bytes, messages, memory and time.

The model is a ring whose ranks wait for each other after every stage: a stage takes as long as its
slowest rank's kernels or the messages that travel meanwhile, if these take longer. It knows nothing
of launches, merges or small blocks, on which kernels run slower, so it is a bound to compare
layouts by and no forecast of a benchmark.

Letters: ``B`` batch, ``H`` query heads, ``K`` key/value heads, ``D`` head dim of Q and K, ``Dv`` of
V, ``Tq`` and ``Tk`` queries and keys per rank, ``e`` bytes per element.
"""

from ring_core.cost.counts.api import CountedCall as CountedCall, StrategyBytes as StrategyBytes
from ring_core.cost.estimates import (
    Cost as Cost,
    compare as compare,
    estimate as estimate,
)
from ring_core.cost.model import (
    BACKWARD_FLOPS as BACKWARD_FLOPS,
    HARDWARE as HARDWARE,
    Hardware as Hardware,
    Model as Model,
    hardware as hardware,
)
from ring_core.cost.sent import (
    LinkBytes as LinkBytes,
    bytes_by_link as bytes_by_link,
    bytes_sent as bytes_sent,
)
