"""Bytes that ranks send in a call of each strategy, in all and by link, and that they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import check_kind, check_size, not_none
from ring_core.base.config import RingStrategy, StrategyConfig, strategy_config
from ring_core.cost.model import FLOAT32_BYTES, Model, message_bytes, rows_and_keys
from ring_core.plan.plan import Plan, make_plan
from ring_core.programs.gather import gather_program, gather_refusals, longest_gather
from ring_core.programs.grid import RankGrid, rank_grid
from ring_core.programs.heads import HeadPlan, head_plan
from ring_core.programs.ring import ring_program

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
        tile: Keys of a tile, of which gathers fetch whole ones.
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
            128 for ``fa4`` on Hopper GPUs, in calls that have a gradient and do not return ``lse``.

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


def _count_of(config: StrategyConfig) -> _Counted:
    """Return the count of a strategy that ships with Ring."""
    (counted,) = (x for x in COUNTED if x.name == config.name)
    return counted


class _HeadExchange(NamedTuple):
    """Ranks that trade tokens for heads, and the call between their groups that follows.

    Attributes:
        grid: The groups of ranks.
        heads: The heads of each rank of a group.
        outer: The call over groups, each with the tokens of its ranks and the heads of a rank;
            ``None`` for one group.
        inner_model: The model of a rank's own call: the heads of a rank.
    """

    grid: RankGrid
    heads: HeadPlan
    outer: CountedCall | None
    inner_model: Model

    @classmethod
    def of(cls, call: CountedCall, grid: RankGrid) -> _HeadExchange:
        """Return the trade of a call within the groups of a grid."""
        plan, model = call.plan, call.model
        heads = head_plan(model.num_q_heads, model.num_kv_heads, grid.ulysses_size)
        inner = replace(model, num_q_heads=heads.q.shape[1], num_kv_heads=heads.kv.shape[1])
        if grid.outer_size == 1:
            return cls(grid, heads, None, inner)
        outer_plan = make_plan(
            plan.mask, seq_len=plan.seq_len, cp_size=grid.outer_size,
            layout=grid.outer_layout(plan.q_layout.name), kv_seq_len=plan.kv_seq_len,
            pad_to=(plan.q_layout.padded_len, plan.k_layout.padded_len),
        )  # fmt: skip
        config = StrategyConfig(call.config.outer)
        return cls(
            grid, heads, call._replace(plan=outer_plan, model=inner, config=config, hosts=None), inner
        )  # fmt: skip


def _one_group(call: CountedCall) -> RankGrid:
    """Return the grid of ``ulysses``, in which all ranks trade."""
    return RankGrid(call.plan.cp_size, call.plan.cp_size)


def _groups(call: CountedCall) -> RankGrid:
    """Return the grid of ``hybrid``."""
    return rank_grid(
        call.plan.cp_size, call.model.num_q_heads, call.plan.q_layout.name,
        outer=call.config.outer, ulysses_size=call.config.ulysses_size, hosts=call.hosts,
    )  # fmt: skip


def _traded_bytes(call: CountedCall, grid: RankGrid) -> BytesByRanks:
    """Return the bytes that each rank sends to each rank in trades, and between groups."""
    plan, trade = call.plan, _HeadExchange.of(call, grid)
    moved = np.zeros((plan.cp_size, plan.cp_size), np.int64)
    for first in range(0, plan.cp_size, grid.ulysses_size):
        group = grid.inner_ranks(first)
        moved[np.ix_(group, group)] = _exchange_bytes(plan, call.model, trade.heads, call.backward)
    # A rank keeps its own tokens of its own heads.
    np.fill_diagonal(moved, 0)
    if trade.outer is None:
        return moved
    between_groups = _count_of(trade.outer.config).sent(trade.outer)
    # Ranks with the same place in their groups make one inner call, and each such set its own.
    for rank in grid.inner_ranks(0):
        peers = grid.outer_ranks(rank)
        moved[np.ix_(peers, peers)] += between_groups
    return moved


def _traded_held(call: CountedCall, grid: RankGrid) -> int:
    """Return the bytes that a rank holds for its heads, and in the call between groups."""
    trade, model = _HeadExchange.of(call, grid), call.model
    rows, keys = rows_and_keys(call.plan, trade.inner_model)
    # Q, K, V and out by heads are there while the inner call runs, and in the backward their
    # gradients beside them.
    traded = rows * (model.head_dim + model.value_dim) + keys
    held = 2 * model.bytes_per_element * grid.ulysses_size * traded
    if trade.outer is None:
        return held
    return held + not_none(_count_of(trade.outer.config).held)(trade.outer)


def _ring_held(call: CountedCall) -> int:
    """Return the bytes of two slots of K/V, dQ and three times dK/dV."""
    e, (rows, keys) = call.model.bytes_per_element, rows_and_keys(call.plan, call.model)
    return keys * (2 * e + 3 * FLOAT32_BYTES) + rows * call.model.head_dim * FLOAT32_BYTES


def _gather_held(call: CountedCall) -> int:
    """Return the bytes of the longest buffer of keys and the rank's own, with their gradients."""
    plan, (_, keys) = call.plan, rows_and_keys(call.plan, call.model)
    # Ranks differ in what they fetch: memory has to do for the one that fetches most.
    longest = longest_gather(plan, tile=call.tile).length
    gathered = longest * keys // plan.k_layout.local_len
    return (gathered + keys) * (call.model.bytes_per_element + FLOAT32_BYTES)


def _ring_bytes(call: CountedCall, strategy: RingStrategy) -> BytesByRanks:
    """Return the bytes that each rank sends to each rank in a ring, its helpers included."""
    plan, model = call.plan, call.model
    program, sizes = ring_program(plan, strategy), message_bytes(plan, model)
    moved, ranks = np.zeros((plan.cp_size, plan.cp_size), np.int64), np.arange(plan.cp_size)
    query, result = _row_bytes(model)
    passes = (program.forward, program.backward) if call.backward else (program.forward,)
    for n, stages in enumerate(passes):
        for stage in stages:
            for hop, message in ((stage.kv_hop, sizes[n].kv), (stage.grad_hop, sizes[n].grad)):
                if hop is not None:
                    # Ranks without work in a step pass K/V on all the same.
                    moved[ranks, (ranks + hop) % plan.cp_size] += message
            if not stage.offloads:
                continue
            for rank in range(plan.cp_size):
                helper = (rank + program.steps[stage.step].shift) % plan.cp_size
                rows = sum(x.q_stop - x.q_start for x in program.remote_items(rank, stage.step))
                moved[rank, helper] += rows * query[n]
                moved[helper, rank] += rows * result[n]
    return moved


def _row_bytes(model: Model) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the bytes of a token's queries for a helper, and of its results, in both passes.

    A kernel that takes ``delta`` gets that as well.
    """
    d, dv, e = model.head_dim, model.value_dim, model.bytes_per_element
    rows = model.batch * model.num_q_heads
    # Forward q, and out and lse; backward q, dout, out and lse, and dQ.
    query = rows * d * e, rows * ((d + 2 * dv) * e + FLOAT32_BYTES)
    return query, (rows * (dv + 1) * FLOAT32_BYTES, rows * d * FLOAT32_BYTES)


def _gather_bytes(call: CountedCall) -> BytesByRanks:
    """Return the bytes that each rank sends to each rank in a gather of what its queries see."""
    plan, model = call.plan, call.model
    if reasons := gather_refusals(plan):
        raise ValueError(f"strategy 'gather' cannot run this plan: {'; '.join(reasons)}")
    width = model.batch * model.num_kv_heads * (model.head_dim + model.value_dim)
    keys = np.zeros((plan.cp_size, plan.cp_size), np.int64)
    for rank in range(plan.cp_size):
        for fetch in gather_program(plan, rank, tile=call.tile).fetches:
            # The receiver's program names the sender; own keys are copied, not sent.
            if fetch.rank != rank:
                keys[fetch.rank, rank] += fetch.source.stop - fetch.source.start
    # dK/dV go home against the way of their keys, as float32 sums.
    grads = keys.T * width * FLOAT32_BYTES if call.backward else 0
    return keys * width * model.bytes_per_element * (1 + call.fetches_again) + grads


def _exchange_bytes(plan: Plan, model: Model, heads: HeadPlan, backward: bool) -> int:
    """Return the bytes that a rank sends each other where they trade tokens for heads."""
    d, dv, e = model.head_dim, model.value_dim, model.bytes_per_element
    rows = model.batch * plan.q_layout.local_len * int(heads.q.shape[1])
    keys = model.batch * plan.k_layout.local_len * int(heads.kv.shape[1]) * (d + dv)
    # Gradients of a K/V head with copies are summed in float32 before they are rounded.
    grad = e if heads.copies == 1 else FLOAT32_BYTES
    forward = rows * (d * e + dv * e + FLOAT32_BYTES) + keys * e
    return forward + (rows * (d + dv) * e + keys * grad if backward else 0)


@dataclass(frozen=True)
class _Counted(StrategyBytes):
    """Count of a strategy that ships with Ring; ``held`` is that of :func:`bytes_held`, if any."""

    held: Callable[[CountedCall], int] | None = None


#: The strategies whose bytes are counted by name.
COUNTED = (
    _Counted("ring", partial(_ring_bytes, strategy="ring"), held=_ring_held),
    _Counted("balanced", partial(_ring_bytes, strategy="balanced")),
    _Counted("gather", _gather_bytes, gathers=lambda _config: True, held=_gather_held),
    _Counted(
        "ulysses", lambda call: _traded_bytes(call, _one_group(call)),
        held=lambda call: _traded_held(call, _one_group(call)),
    ),
    _Counted(
        "hybrid", lambda call: _traded_bytes(call, _groups(call)),
        gathers=lambda config: _count_of(StrategyConfig(config.outer)).gathers(config),
        held=lambda call: _traded_held(call, _groups(call)),
    ),
)  # fmt: skip
