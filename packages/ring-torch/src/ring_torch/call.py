"""Everything static about one call, and its forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ring_core import GatherProgram, Plan, Request, RingProgram
from ring_core.checks import Sizes
from ring_core.triton.tile_configs import positions_aligned8
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import CallSignature
from ring_torch.kernels.api import Kernel, Selection
from ring_torch.payload import KVPayload
from ring_torch.positions import (
    gathered_positions,
    gathered_runs,
    key_runs,
    positions_of,
    query_runs,
)
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    Grads,
    Inputs,
    KernelParams,
    KeyBlock,
    QueryBlock,
    QueryGrads,
    folded,
    zero_bias_grad,
)
from ring_torch.transports.api import (
    GatherSession,
    Refusals,
    SessionSpec,
    Traffic,
    Transport,
)

Saved = tuple[Tensor, ...]  # what a forward leaves to its backward, beside inputs and results
Shapes = list[tuple[tuple[int, ...], torch.dtype]]


class Strategy(Protocol):
    """How tokens move so that each work item finds its operands, forward and backward.

    Both passes begin with :func:`ring_torch.comm.handshake.agree`, before any tensor is used, and
    hand plain tensors on: autograd stands around them.
    """

    name: str  # what ``strategy=`` calls it
    depends_on_kernel: bool = False  # whether what travels is another with another kernel
    adds_sinks: bool = False  # whether the state that the forward returns includes the sinks

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """Attention of this rank's queries, ``[B, T_local, H, Dv]``, and what to save."""

    def backward(
        self, call: Call, inputs: Inputs, upstream: BackwardInputs, saved: Saved, /
    ) -> Grads:
        """Gradients of this rank's shards, wide or in the inputs' dtype."""

    def traffic(self, call: Call, inputs: Inputs, *, forward: bool, saved: bool) -> Traffic:
        """Count the bytes of a pass from the steps that it runs, for the tripwire and ``explain``.

        ``saved`` says that the backward has what the forward saved.
        """

    def visible_pairs(self, call: Call) -> float:
        """Return how many visible (query, key) pairs this rank computes in a forward, a head."""
        return float(call.program.work()[:, call.ranks.rank].sum())

    def saved_shapes(self, call: Call, inputs: Inputs, *, plan_known: bool) -> Shapes:
        """What a compiled forward saves; where the plan is not known, what all plans save."""
        del call, inputs, plan_known
        return []


class Call(NamedTuple):
    """Everything static about a call."""

    ranks: Ranks
    plan: Plan
    program: RingProgram  # the plan in the order of a ring
    request: Request  # what it asks of kernels and strategies
    params: KernelParams
    kernel: Kernel
    choice: Selection
    dtype: torch.dtype  # of the inputs
    acc_dtype: torch.dtype  # of accumulators
    device: torch.device
    needs_index: bool  # some option asks for global positions
    needs_grad: bool
    strategy: Strategy
    transport: Transport
    number: int  # of the calls on this group
    forward_signature: CallSignature
    backward_signature: CallSignature
    check_every: int = 0  # every which call the tripwire checked when this one was made
    checked: int = 0  # the number by which the tripwire checks it, or 0
    prepare_lse_grad: Callable[[], Call] | None = None  # this call, if ``lse`` has a gradient

    @property
    def seed(self) -> int:
        """The seed of dropout, or 0."""
        return self.params.dropout_seed

    def with_lse_grad(self) -> Call:
        """The call whose backward takes a gradient of ``lse``: maybe with another kernel.

        Raises:
            UnsupportedError: The kernel that was named has none.
        """
        if self.kernel.capabilities.lse_grad or self.prepare_lse_grad is None:
            return self
        call = self.prepare_lse_grad()
        if not self.strategy.depends_on_kernel:
            call = call._replace(backward_signature=self.backward_signature)
        params = replace(call.params, dropout_seed=self.seed)
        return call._replace(number=self.number, checked=self.checked, params=params)

    def positions(self, rank: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Query indices, query positions, key positions of a rank, where an option needs them."""
        if not self.needs_index:
            return None, None, None
        return positions_of(self.plan, rank, self.device)

    def rows(self, inputs: Inputs) -> QueryBlock:
        """This rank's queries."""
        slopes = None if inputs.slopes is None else torch.atleast_2d(inputs.slopes)
        rows = QueryBlock(
            inputs.q, None, None, inputs.q_ids, inputs.bias, slopes, bias_shift=inputs.bias_shift
        )
        if not self.needs_index:
            return rows
        indices, position, _ = self.positions(self.ranks.rank)
        runs = query_runs(self.plan, self.ranks.rank)
        return rows._replace(indices=indices, position=position, runs=runs)

    def columns(self, rank: int, tensors: Sequence[Tensor]) -> KeyBlock:
        """The keys of a rank from ``k``, ``v`` and, where there are any, segment ids."""
        columns = KeyBlock(tensors[0], tensors[1], None, tensors[2] if len(tensors) > 2 else None)
        if not self.needs_index:
            return columns
        return columns._replace(
            position=self.positions(rank)[2],
            aligned8=_positions_aligned8(self.plan, rank),
            runs=key_runs(self.plan, rank),
        )

    def open_session(
        self, inputs: Inputs, signature: CallSignature, *, groups: int, own: bool
    ) -> GatherSession:
        """Open a session for one pass; ``own`` says that a rank's own keys are fetched, too.

        Raises:
            RankMismatchError: A peer is making another call.
        """
        return self.transport.open(SessionSpec(
            self.ranks, self.plan, own, KVPayload.of(inputs, groups), groups, self.device,
            self.acc_dtype, self.needs_grad, signature, self.number, self.seed,
        ))  # fmt: skip

    def gathered_columns(
        self, gather: GatherProgram, keys: KVPayload, tensors: Sequence[Tensor]
    ) -> KeyBlock:
        """Return the gathered keys in a session's buffer, and all that belongs to them."""
        columns = KeyBlock(*keys.split(tensors[0]), None, tensors[1] if keys.segments else None)
        if not self.needs_index:
            return columns
        which = self.plan, self.ranks.rank, gather.own
        return columns._replace(
            position=gathered_positions(*which, self.device),
            aligned8=positions_aligned8(gather.positions),
            runs=gathered_runs(*which),
        )


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


@lru_cache(maxsize=256)
def _positions_aligned8(plan: Plan, rank: int) -> bool:
    return positions_aligned8(plan.k_positions(rank))


def attend(call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
    """A call's forward by its strategy, sinks included."""
    state, saved = call.strategy.forward(call, inputs)
    if inputs.sinks is not None and not call.strategy.adds_sinks:
        state = add_sinks(state.out.to(call.acc_dtype), state.lse, inputs.sinks)
    return state, saved


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> AttentionState:
    """:func:`ring_core.finalize`, ``out`` in place: sinks take softmax mass and yield no value."""
    with_sinks = torch.logaddexp(lse, folded(sinks, lse.dtype)[:, None])
    weight = (lse - with_sinks.masked_fill(with_sinks == -torch.inf, 0.0)).exp_()
    out.mul_(weight.transpose(1, 2).unsqueeze(-1))
    return AttentionState(out, with_sinks)


def zero_row_grads(call: Call, rows: QueryBlock) -> QueryGrads:
    """Accumulators of what a backward adds up for queries."""
    dq = torch.zeros(rows.q.shape, dtype=call.acc_dtype, device=call.device)
    return QueryGrads(dq, zero_bias_grad(rows, call.params, call.acc_dtype))
