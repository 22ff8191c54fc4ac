"""A call whose bytes are counted, and the count of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ring_core.base.config import StrategyConfig
from ring_core.cost.model import Model
from ring_core.plan.plan import Plan

BytesByRanks = npt.NDArray[np.int64]  # bytes from a rank (row) to a rank (column), [P, P]


class CountedCall(NamedTuple):
    """A call whose bytes are counted.

    Attributes:
        plan: The plan.
        model: Heads, dims, batch, bytes an element.
        config: The strategy and its parameters.
        backward: True if the backward counts as well.
        fetches_again: True if the backward fetches K/V again, as the forward has not saved them.
        hosts: The host of each rank; ``None`` if all are on one.
        tile: Keys of a tile; what a gather fetches begins and ends at multiples of it.
    """

    plan: Plan
    model: Model
    config: StrategyConfig
    backward: bool
    fetches_again: bool
    hosts: Sequence[str] | None = None
    tile: int = 1


@dataclass(frozen=True)
class StrategyBytes:
    """A count of bytes for a strategy that :func:`bytes_sent` does not know by name.

    It is given as ``strategy``, in place of a name:

    >>> import numpy as np
    >>> from ring_core import Mask, make_plan
    >>> from ring_core.cost import Model, StrategyBytes, bytes_sent
    >>> def to_the_next(call):  # one byte
    ...     return np.roll(np.eye(call.plan.cp_size, dtype=np.int64), 1, axis=1)
    >>> mine = StrategyBytes("mine", to_the_next)
    >>> bytes_sent(make_plan(Mask(), seq_len=8, cp_size=2), Model(1, 1, 8), mine)
    (1, 1)

    Attributes:
        name: The name that ``strategy=`` takes.
        sent: Returns the bytes that each rank sends to each rank in a call, int64 ``[P, P]``.
        gathers: Returns True if K/V are gathered, which a backward may fetch again, and of which
            kernels may need whole tiles.
    """

    name: str
    sent: Callable[[CountedCall], BytesByRanks]
    gathers: Callable[[StrategyConfig], bool] = lambda _config: False


@dataclass(frozen=True)
class Count(StrategyBytes):
    """Count of a strategy that ships with Ring.

    Attributes:
        held: Returns the bytes of :func:`ring_core.cost.sent.bytes_held`; ``None`` if they are not
            counted.
        compared: Configurations that ``plan --advise --ranks-per-host`` compares, by their names on
            the page "which strategy"; none without ``held``.
        needs_hosts: True if they are compared only where ranks are on several hosts.
    """

    held: Callable[[CountedCall], int] | None = None
    compared: Mapping[str, StrategyConfig] = field(default_factory=dict)
    needs_hosts: bool = False
