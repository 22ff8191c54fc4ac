"""A strategy as it describes itself: what it refuses, and how it is resolved for a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ring_core import Plan, Request, RingProgram
from ring_core.checks import Sizes
from ring_torch.call import Call, Strategy
from ring_torch.kernels.api import Kernel
from ring_torch.transports.api import Refusals, Transport


class Resolution(NamedTuple):
    """All that a strategy is resolved from, for one rank of a call.

    Attributes:
        program: The plan in the order of a ring.
        rank: The rank.
        kernel: The kernel that its launches run.
        sizes: Those of this rank's tensors.
        itemsize: Bytes of a number of the inputs.
        needs_index: Some option asks for global positions.
        segment_ids: Ids go with the keys.
        inner: The call of one rank for this rank's heads, if the strategy splits heads.
    """

    program: RingProgram
    rank: int
    kernel: Kernel
    sizes: Sizes
    itemsize: int
    needs_index: bool
    segment_ids: bool
    inner: Call | None


def _nothing(_plan: Plan, _request: Request) -> Refusals:
    return ()


def _never(_transport: Transport) -> bool:
    return False


@dataclass(frozen=True)
class StrategySpec:
    """A strategy of ``strategy=``, as it describes itself.

    Attributes:
        name: The name that ``strategy=`` takes.
        resolve: Makes the steps of both passes for a rank: the object that runs them, and counts
            what they send. On one rank, where nothing travels, it is not asked.
        refusals: Reasons why it cannot do a call, the same on all ranks.
        opens_sessions: Its keys move in sessions of any transport; otherwise it sends messages
            itself, and needs a transport that has them.
        splits_heads: Its kernels run in an inner call of one rank: all tokens, a part of the heads.
        is_automatic: True if ``strategy="auto"`` considers it over a transport.
        automatic_refusals: Reasons for which a call that names neither strategy nor transport does
            not take it, though it could.
    """

    name: str
    resolve: Callable[[Resolution], Strategy]
    refusals: Callable[[Plan, Request], Refusals] = _nothing
    opens_sessions: bool = False
    splits_heads: bool = False
    is_automatic: Callable[[Transport], bool] = _never
    automatic_refusals: Callable[[Plan, Request], Refusals] = _nothing

    def runs_over(self, transport: Transport) -> bool:
        """Return True if its bytes can move by a transport."""
        return self.opens_sessions or transport.sends_messages
