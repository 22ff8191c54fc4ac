"""Bytes that ranks send in a call of each strategy, in all and by link, and that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ring_core.base.arguments import check_kind, check_size, not_none, numbers_as_python
from ring_core.base.config import StrategyConfig, strategy_config
from ring_core.cost.counts.api import Count, CountedCall, StrategyBytes
from ring_core.cost.counts.gather import GATHER
from ring_core.cost.counts.hybrid import HYBRID
from ring_core.cost.counts.ring import BALANCED, RING
from ring_core.cost.counts.ulysses import ULYSSES
from ring_core.cost.model import Model
from ring_core.plan.plan import Plan

#: The strategies whose bytes are counted by name.
COUNTED: tuple[Count, ...] = (RING, BALANCED, GATHER, ULYSSES, HYBRID)


@numbers_as_python
def bytes_sent(
    plan: Plan, model: Model, strategy: str | StrategyConfig | StrategyBytes, *,
    backward: bool = True, fetches_again: bool = False, tile: int = 1,
) -> tuple[int, ...]:  # fmt: skip
    """Return the bytes that each rank sends in a call of a strategy, without headers.

    >>> from ring_core import Mask, StrategyConfig, make_plan
    >>> from ring_core.cost import Model, bytes_sent
    >>> plan = make_plan(Mask(causal=True), seq_len=65536, cp_size=4, layout="zigzag")
    >>> model = Model(num_q_heads=32, num_kv_heads=8, head_dim=128)
    >>> ways = "ring", "gather", "ulysses", StrategyConfig("hybrid", ulysses_size=2)
    >>> [round(max(bytes_sent(plan, model, way)) / 2**20) for way in ways]
    [704, 480, 482, 513]

    With ``e`` bytes an element and float32 sums, a token of K/V that travels is ``K * (D + Dv) *
    e`` bytes, one of dK/dV ``K * (D + Dv) * 4``:

    - ``ring`` passes the K/V of all tokens of a rank on at each hop, and dK/dV backward, too;
    - ``balanced`` does so, and sends rows of q to helpers, which send out and lse back; backward q,
      dO, out and lse go there, and dQ comes back;
    - ``gather`` sends each rank the K/V that it sees, and gets their dK/dV back;
    - ``ulysses`` sends each other rank its heads of q, k and v, and gets out and lse back, for all
      tokens of the rank; backward dO and dQ, dK, dV. Heads that are padded or copied count
      (:func:`ring_core.head_plan`);
    - ``hybrid`` does so within a group, and between groups what a ring or a gather does, with the
      tokens of a group and the heads of a rank.

    Args:
        plan: The plan.
        model: Heads, dims, batch, bytes an element.
        strategy: A name or a :class:`ring_core.StrategyConfig`; ``hybrid`` without ``ulysses_size``
            has all ranks on one host; or a :class:`StrategyBytes`.
        backward: Count the backward as well.
        fetches_again: For ``gather``, or ``hybrid`` with it between groups: the backward fetches
            K/V again, as the forward has not saved them.
        tile: Likewise: keys of a tile, where a kernel's backward needs whole tiles, so that more
            keys travel at the edge of a window (:func:`ring_core.gather_program`). In PyTorch it is
            128 where ``fa4`` adds up dK/dV over its launches itself: on Hopper GPUs, with grouped
            heads of 64 or 128, in calls with a gradient, without other options than a mask, sinks
            and a scale, which do not return ``lse``.

    Raises:
        ValueError: The strategy is none of these, or cannot run the plan; or ``fetches_again`` or
            ``tile`` is given where nothing is gathered, or ``fetches_again`` without a backward.
    """
    counted, call = _checked(plan, model, strategy, backward, fetches_again, tile)
    return tuple(map(int, counted.sent(call).sum(axis=1)))


class LinkBytes(NamedTuple):
    """The bytes that ranks send over either kind of link; see :func:`bytes_by_link`.

    Attributes:
        within_host: Bytes that each rank sends to ranks of its host.
        between_hosts: Bytes that each rank sends to ranks of other hosts.
    """

    within_host: tuple[int, ...]
    between_hosts: tuple[int, ...]


@numbers_as_python
def bytes_by_link(
    plan: Plan, model: Model, strategy: str | StrategyConfig | StrategyBytes, *,
    ranks_per_host: int, backward: bool = True, fetches_again: bool = False, tile: int = 1,
) -> LinkBytes:  # fmt: skip
    """Return the bytes that each rank sends within its host, and to other hosts.

    >>> from ring_core import Mask, StrategyConfig, make_plan
    >>> from ring_core.cost import Model, bytes_by_link
    >>> plan = make_plan(Mask(causal=True), seq_len=65536, cp_size=4, layout="zigzag")
    >>> hybrid = StrategyConfig("hybrid", ulysses_size=2)
    >>> sent = bytes_by_link(plan, Model(32, 8, 128), hybrid, ranks_per_host=2)
    >>> max(sent.within_host) >> 20, max(sent.between_hosts) >> 20
    (321, 192)

    Args:
        plan: The plan.
        model: Heads, dims, batch, bytes an element.
        strategy: As in :func:`bytes_sent`; ``hybrid`` without ``ulysses_size`` takes the largest
            groups within a host.
        ranks_per_host: Number of consecutive ranks on each host, a divisor of the plan's ranks.
        backward: Count the backward as well.
        fetches_again, tile: As in :func:`bytes_sent`.

    Raises:
        ValueError: As in :func:`bytes_sent`; or hosts would have unlike numbers of ranks.
    """
    counted, call = _checked(plan, model, strategy, backward, fetches_again, tile)
    if plan.cp_size % check_size("ranks_per_host", ranks_per_host):
        raise ValueError(
            f"ranks_per_host must divide the plan's {plan.cp_size} ranks, got {ranks_per_host}"
        )
    host = np.arange(plan.cp_size) // ranks_per_host
    sent = counted.sent(call._replace(hosts=[str(x) for x in host]))
    # Consecutive ranks share a host, as launchers number them.
    of_host = np.equal.outer(host, host)
    within, between = (np.where(x, sent, 0).sum(axis=1) for x in (of_host, ~of_host))
    return LinkBytes(tuple(map(int, within)), tuple(map(int, between)))


def bytes_held(
    plan: Plan, model: Model, strategy: str | StrategyConfig,
    hosts: Sequence[str] | None = None, *, tile: int = 1,
) -> int:  # fmt: skip
    """Return the most bytes that a rank holds beyond the caller's tensors, in forward + backward.

    They are K/V, heads and sums of gradients that a strategy cannot do without; buffers of kernels
    and transports come on top, so it compares strategies and forecasts no peak. A ring holds two
    slots of K/V, dQ and three times dK/dV; a gather the longest buffer of keys and the rank's own,
    with their gradients; a trade of heads q, k, v and out of all its tokens, and their gradients.
    Sums are float32.

    Args:
        plan: The plan.
        model: Heads, dims, batch, bytes an element.
        strategy: As in :func:`bytes_sent`, but for ``balanced`` and other strategies' own counts.
        hosts: The host of each rank, for ``hybrid`` without ``ulysses_size``; ``None`` if all are
            on one.
        tile: As in :func:`bytes_sent`.

    Raises:
        ValueError: The strategy is none of these, or cannot run the plan; or ``tile`` is given
            where nothing is gathered.
    """
    config = strategy_config(strategy, [x.name for x in COUNTED if x.held is not None])
    _, call = _checked(plan, model, config, True, False, tile)
    return not_none(_count_of(config).held)(call._replace(hosts=hosts))


def _checked(
    plan: Plan, model: Model, strategy: str | StrategyConfig | StrategyBytes, backward: bool,
    fetches_again: bool, tile: int,
) -> tuple[StrategyBytes, CountedCall]:  # fmt: skip
    """Check the arguments of a count of bytes, and return the strategy's count and what it gets."""
    for name, value, kind in (
        ("plan", plan, Plan), ("model", model, Model), ("backward", backward, bool),
        ("fetches_again", fetches_again, bool),
    ):  # fmt: skip
        check_kind(name, value, kind)
    if isinstance(strategy, StrategyBytes):
        counted, config = strategy, StrategyConfig(strategy.name)
    else:
        config = strategy_config(strategy, [x.name for x in COUNTED])
        counted = _count_of(config)
    if fetches_again and not (counted.gathers(config) and backward):
        raise ValueError("fetches_again is for the backward of strategy 'gather': leave it out")
    if check_size("tile", tile) != 1 and not counted.gathers(config):
        raise ValueError(
            f"tile is for strategies that gather keys, not {config.name!r}: leave it out"
        )
    return counted, CountedCall(plan, model, config, backward, fetches_again, tile=tile)


def _count_of(config: StrategyConfig) -> Count:
    """Return the count of a strategy that ships with Ring."""
    (counted,) = (x for x in COUNTED if x.name == config.name)
    return counted
