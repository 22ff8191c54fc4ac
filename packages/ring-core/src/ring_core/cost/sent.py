"""Bytes that ranks send in a call of each strategy, in all and by link, and that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import check_kind, check_size
from ring_core.base.config import StrategyConfig, strategy_config
from ring_core.cost.model import (
    FLOAT32_BYTES,
    Model,
    message_bytes,
    rows_and_keys,
)
from ring_core.plan.plan import Plan, make_plan
from ring_core.programs.gather import gather_program, gather_refusals, longest_gather
from ring_core.programs.grid import RankGrid, rank_grid
from ring_core.programs.heads import HeadPlan, head_plan
from ring_core.programs.ring import ring_program


def bytes_sent(
    plan: Plan, model: Model, strategy: str | StrategyConfig, *, backward: bool = True,
    fetches_again: bool = False,
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
    - ``gather`` sends each rank the K/V that it sees, and gets their dK/dV back;
    - ``ulysses`` sends each other rank its heads of q, k and v, and gets out and lse back, for all
      tokens of the rank; backward dO and dQ, dK, dV. Heads that are padded or copied count
      (:func:`ring_core.head_plan`);
    - ``hybrid`` does so within a group, and between groups what a ring or a gather does, with the
      tokens of a group and the heads of a rank.

    Args:
        plan: The plan.
        model: Heads, dims, batch, bytes an element.
        strategy: ``"ring"``, ``"gather"`` or ``"ulysses"``, or a :class:`ring_core.StrategyConfig`
            of one of them or of ``hybrid``; without ``ulysses_size`` all ranks are on one host.
        backward: Count the backward as well.
        fetches_again: For ``gather``, or ``hybrid`` with it between groups: the backward fetches
            K/V again, as the forward has not saved them.

    Raises:
        ValueError: The strategy is none of these, or cannot run the plan; or ``fetches_again`` is
            given where nothing is gathered, or without a backward.
    """
    config = _check_bytes(plan, model, strategy, backward, fetches_again)
    sent = _bytes_by_ranks(plan, model, config, backward, fetches_again)
    return tuple(map(int, sent.sum(axis=1)))


class LinkBytes(NamedTuple):
    """The bytes that ranks send over either kind of link; see :func:`bytes_by_link`.

    Attributes:
        within_host: Bytes that each rank sends to ranks of its host.
        between_hosts: Bytes that each rank sends to ranks of other hosts.
    """

    within_host: tuple[int, ...]
    between_hosts: tuple[int, ...]


def bytes_by_link(
    plan: Plan, model: Model, strategy: str | StrategyConfig, *, ranks_per_host: int,
    backward: bool = True, fetches_again: bool = False,
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
        fetches_again: As in :func:`bytes_sent`.

    Raises:
        ValueError: As in :func:`bytes_sent`; or hosts would have unlike numbers of ranks.
    """
    config = _check_bytes(plan, model, strategy, backward, fetches_again)
    if plan.cp_size % check_size("ranks_per_host", ranks_per_host):
        raise ValueError(
            f"ranks_per_host must divide the plan's {plan.cp_size} ranks, got {ranks_per_host}"
        )
    host = np.arange(plan.cp_size) // ranks_per_host
    sent = _bytes_by_ranks(plan, model, config, backward, fetches_again, [str(x) for x in host])
    # Consecutive ranks share a host, as launchers number them.
    of_host = np.equal.outer(host, host)
    within, between = (np.where(x, sent, 0).sum(axis=1) for x in (of_host, ~of_host))
    return LinkBytes(tuple(map(int, within)), tuple(map(int, between)))


_BytesByRanks = npt.NDArray[np.int64]  # bytes from a rank (row) to a rank (column), [P, P]
_COUNTED = ("ring", "gather", "ulysses", "hybrid")


def _check_bytes(
    plan: Plan, model: Model, strategy: str | StrategyConfig, backward: bool, fetches_again: bool
) -> StrategyConfig:
    """Check the arguments of a count of bytes, and return the strategy as a StrategyConfig."""
    for name, value, kind in (
        ("plan", plan, Plan), ("model", model, Model), ("backward", backward, bool),
        ("fetches_again", fetches_again, bool),
    ):  # fmt: skip
        check_kind(name, value, kind)
    config = strategy_config(strategy, _COUNTED)
    gathers = "gather" in (config.name, config.name == "hybrid" and config.outer)
    if fetches_again and not (gathers and backward):
        raise ValueError("fetches_again is for the backward of strategy 'gather': leave it out")
    return config


def _bytes_by_ranks(
    plan: Plan, model: Model, config: StrategyConfig, backward: bool, fetches_again: bool,
    hosts: Sequence[str] | None = None,
) -> _BytesByRanks:  # fmt: skip
    """Return the bytes that each rank sends to each rank in a call.

    ``hosts`` are the hosts of the ranks; by default all ranks are on one.
    """
    match config.name:
        case "ring":
            return _ring_bytes(plan, model, backward)
        case "gather":
            return _gather_bytes(plan, model, backward, fetches_again)
    trade = _HeadExchange.of(plan, model, config, hosts)
    moved, grid = np.zeros((plan.cp_size, plan.cp_size), np.int64), trade.grid
    for first in range(0, plan.cp_size, grid.ulysses_size):
        group = grid.inner_ranks(first)
        moved[np.ix_(group, group)] = _exchange_bytes(plan, model, trade.heads, backward)
    # A rank keeps its own tokens of its own heads.
    np.fill_diagonal(moved, 0)
    if trade.outer_plan is None:
        return moved
    outer = StrategyConfig(config.outer)
    between_groups = _bytes_by_ranks(
        trade.outer_plan, trade.outer_model, outer, backward, fetches_again
    )
    # Ranks with the same place in their groups make one inner call, and each such set its own.
    for rank in grid.inner_ranks(0):
        peers = grid.outer_ranks(rank)
        moved[np.ix_(peers, peers)] += between_groups
    return moved


class _HeadExchange(NamedTuple):
    """Ranks that trade tokens for heads, and the call between their groups that follows.

    Attributes:
        grid: The groups of ranks.
        heads: The heads of each rank of a group.
        outer_model: The model of that call: the heads of a rank.
        outer_plan: The plan of that call over groups, each with the tokens of its ranks; ``None``
            for one group.
    """

    grid: RankGrid
    heads: HeadPlan
    outer_model: Model
    outer_plan: Plan | None

    @classmethod
    def of(
        cls, plan: Plan, model: Model, config: StrategyConfig, hosts: Sequence[str] | None
    ) -> _HeadExchange:
        """Return the trade of ``ulysses``, in which all ranks are one group, or of ``hybrid``."""
        grid = RankGrid(plan.cp_size, plan.cp_size)
        if config.name == "hybrid":
            grid = rank_grid(
                plan.cp_size, model.num_q_heads, plan.q_layout.name, outer=config.outer,
                ulysses_size=config.ulysses_size, hosts=hosts,
            )  # fmt: skip
        heads = head_plan(model.num_q_heads, model.num_kv_heads, grid.ulysses_size)
        outer_model = replace(model, num_q_heads=heads.q.shape[1], num_kv_heads=heads.kv.shape[1])
        outer_plan = None
        if grid.outer_size > 1:
            outer_plan = make_plan(
                plan.mask, seq_len=plan.seq_len, cp_size=grid.outer_size,
                layout=grid.outer_layout(plan.q_layout.name), kv_seq_len=plan.kv_seq_len,
                pad_to=(plan.q_layout.padded_len, plan.k_layout.padded_len),
            )  # fmt: skip
        return cls(grid, heads, outer_model, outer_plan)


def bytes_held(
    plan: Plan, model: Model, config: StrategyConfig, hosts: Sequence[str] | None = None
) -> int:
    """Return the most bytes that a rank holds beyond the caller's tensors, in forward + backward.

    They are K/V, heads and sums of gradients that a strategy cannot do without; buffers of kernels
    and transports come on top, so it compares strategies and forecasts no peak. A ring holds two
    slots of K/V, dQ and three times dK/dV; a gather the longest buffer of keys and the rank's own,
    with their gradients; a trade of heads q, k, v and out of all its tokens, and their gradients.
    Sums are float32.

    Args:
        plan: The plan.
        model: Heads, dims, batch, bytes an element.
        config: ``ring``, ``gather``, ``ulysses`` or ``hybrid``.
        hosts: The host of each rank, for ``hybrid`` without ``ulysses_size``; ``None`` if all are
            on one.
    """
    e = model.bytes_per_element
    rows, keys = rows_and_keys(plan, model)
    match config.name:
        case "ring":
            return keys * (2 * e + 3 * FLOAT32_BYTES) + rows * model.head_dim * FLOAT32_BYTES
        case "gather":
            # Ranks differ in what they fetch: memory has to do for the one that fetches most.
            gathered = longest_gather(plan).length * keys // plan.k_layout.local_len
            return (gathered + keys) * (e + FLOAT32_BYTES)
    trade = _HeadExchange.of(plan, model, config, hosts)
    rows, keys = rows_and_keys(plan, trade.outer_model)
    # Q, K, V and out by heads are there while the inner call runs, and in the backward their
    # gradients beside them.
    traded = rows * (model.head_dim + model.value_dim) + keys
    held = 2 * e * trade.grid.ulysses_size * traded
    if trade.outer_plan is None:
        return held
    return held + bytes_held(trade.outer_plan, trade.outer_model, StrategyConfig(config.outer))


def _ring_bytes(plan: Plan, model: Model, backward: bool) -> _BytesByRanks:
    """Return the bytes that each rank sends to each rank in a ring."""
    program, sizes = ring_program(plan), message_bytes(plan, model)
    moved, ranks = np.zeros((plan.cp_size, plan.cp_size), np.int64), np.arange(plan.cp_size)
    passes = (program.forward, program.backward) if backward else (program.forward,)
    for stages, size in zip(passes, sizes, strict=False):
        for stage in stages:
            for hop, message in ((stage.kv_hop, size.kv), (stage.grad_hop, size.grad)):
                if hop is not None:
                    # Ranks without work in a step pass K/V on all the same.
                    moved[ranks, (ranks + hop) % plan.cp_size] += message
    return moved


def _gather_bytes(plan: Plan, model: Model, backward: bool, fetches_again: bool) -> _BytesByRanks:
    """Return the bytes that each rank sends to each rank in a gather of what its queries see."""
    if reasons := gather_refusals(plan):
        raise ValueError(f"strategy 'gather' cannot run this plan: {'; '.join(reasons)}")
    width = model.batch * model.num_kv_heads * (model.head_dim + model.value_dim)
    keys = np.zeros((plan.cp_size, plan.cp_size), np.int64)
    for rank in range(plan.cp_size):
        for fetch in gather_program(plan, rank).fetches:
            # The receiver's program names the sender; own keys are copied, not sent.
            if fetch.rank != rank:
                keys[fetch.rank, rank] += fetch.source.stop - fetch.source.start
    # dK/dV go home against the way of their keys, as float32 sums.
    grads = keys.T * width * FLOAT32_BYTES if backward else 0
    return keys * width * model.bytes_per_element * (1 + fetches_again) + grads


def _exchange_bytes(plan: Plan, model: Model, heads: HeadPlan, backward: bool) -> int:
    """Return the bytes that a rank sends each other where they trade tokens for heads."""
    d, dv, e = model.head_dim, model.value_dim, model.bytes_per_element
    rows = model.batch * plan.q_layout.local_len * int(heads.q.shape[1])
    keys = model.batch * plan.k_layout.local_len * int(heads.kv.shape[1]) * (d + dv)
    # Gradients of a K/V head with copies are summed in float32 before they are rounded.
    grad = e if heads.copies == 1 else FLOAT32_BYTES
    forward = rows * (d * e + dv * e + FLOAT32_BYTES) + keys * e
    return forward + (rows * (d + dv) * e + keys * grad if backward else 0)
