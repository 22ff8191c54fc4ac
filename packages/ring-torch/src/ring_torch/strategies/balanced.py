"""Strategy ``balanced``: a ring over contiguous shards whose idle ranks compute for busy ones.

Beside K/V, queries travel: a busy rank sends rows of Q to an idle one, its helper, which attends
with them to its own K/V and sends ``(out, lse)`` back to be merged; in the backward dQ comes back.
Rows move in pieces. The next piece is in flight while one is computed, so a helper holds two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from torch import Tensor

from ring_core import RingProgram, WorkItem
from ring_core.programs.grid import RankGrid
from ring_core.programs.ring import Stage, offload_pieces
from ring_torch.accumulate import Accumulator, Joins, Rows, Work, joins_of, merge
from ring_torch.call import Call, StrategySpec, Traffic
from ring_torch.comm.ranks import DONE, Ranks, Transfer
from ring_torch.positions import query_positions
from ring_torch.records import (
    AttentionState,
    Backward,
    BackwardInputs,
    Inputs,
    KeyBlock,
    QueryBlock,
)
from ring_torch.strategies.ring import Ring, RotatingKeyGrads, ring_steps


class OffloadPiece(NamedTuple):
    """A piece of the work that ranks do for each other in a step, as one rank sees it.

    Attributes:
        helper: The rank that computes for this rank, if any rows are sent there.
        sent_rows: Slices of this rank's query rows that are sent there.
        items: Work items of this rank for other ranks' query rows, over its own K/V.
    """

    helper: int
    sent_rows: tuple[slice, ...]
    items: tuple[WorkItem, ...]


Pieces = tuple[OffloadPiece, ...]  # of a step, as many on all ranks


def offload_pieces_of(
    program: RingProgram, rank: int, stages: tuple[Stage, ...]
) -> tuple[Pieces, ...]:
    """Return the pieces of offloaded work of each step of a pass for a rank."""
    count = offload_pieces(program.plan.q_layout.local_len)

    def pieces(stage: Stage) -> Pieces:
        """Return the pieces of a stage: its work items for other ranks, cut in slices of rows.

        Owner and helper cut the same items in the same order, so the owner's n-th piece is what
        the helper receives n-th.
        """
        if not stage.offloads:
            return ()
        helper = (rank + program.steps[stage.step].shift) % program.plan.cp_size
        # A small item has fewer pieces than `count`: the others are empty, on both ranks alike, so
        # that sends and receives still meet.
        offloaded = [item.cut(count) for item in program.remote_items(rank, stage.step)]
        for_others = [
            item.cut(count) for item in program.items(rank, stage.step) if item.q_rank != rank
        ]
        return tuple(
            OffloadPiece(
                helper,
                tuple(cut[n].q_slice for cut in offloaded if n < len(cut)),
                tuple(cut[n] for cut in for_others if n < len(cut)),
            )
            for n in range(count)
        )

    return tuple(map(pieces, stages))


@dataclass(frozen=True, kw_only=True)
class Balanced(Ring):
    """Strategy ``balanced``: a ring in which idle ranks compute for the queries of busy ones.

    In the backward helpers also get dout, out, lse and delta of the rows they compute for, and send
    dQ back. Their part of dK/dV is of their own K/V and stays.

    Attributes:
        forward_pieces: The pieces of each step of the forward.
        backward_pieces: The same of the backward.
        lent: The launches of items for other ranks' queries, and how their results are kept.
        lent_backward: The launches of their backward.
    """

    name: str = "balanced"
    forward_pieces: tuple[Pieces, ...]  # of each step
    backward_pieces: tuple[Pieces, ...]
    lent: Mapping[WorkItem, tuple[Work, Joins]]
    lent_backward: Mapping[WorkItem, Backward]

    def __post_init__(self) -> None:
        """Check that both passes have pieces for each step, perhaps none: all steps are asked."""
        assert len(self.forward_pieces) == len(self.forward_steps)
        assert len(self.backward_pieces) == len(self.backward_steps)

    @classmethod
    def of(cls, call: Call, _inner: Call | None = None, _grid: RankGrid | None = None) -> Self:
        """Make the steps of both passes of a call for its rank."""
        program, rank, params = call.program, call.ranks.rank, replace(call.params, needs_lse=True)
        passes = program.forward, program.backward
        forward, backward = (offload_pieces_of(program, rank, stages) for stages in passes)
        lent, lent_back = (
            [item for pieces in steps for piece in pieces for item in piece.items]
            for steps in (forward, backward)
        )
        launches = {}
        for item in lent:
            launch, length = call.kernel.forward(item, params), item.q_stop - item.q_start
            # Results travel in the accumulators' dtype: the owner merges them.
            joins = joins_of([launch], call.dtype, length, resumes=True)
            launches[item] = Work.of([launch], length, call.keys.length), joins
        return cls.of_steps(
            call,
            *(ring_steps(program, rank, stages) for stages in passes),
            resumes=True,
            forward_pieces=forward,
            backward_pieces=backward,
            lent=launches,
            lent_backward={
                item: call.kernel.backward([item], params, adds=True) for item in lent_back
            },
        )

    def offload_forward(
        self,
        call: Call,
        inputs: Inputs,
        keys: Sequence[Tensor],
        rows: QueryBlock,
        results: Accumulator,
    ) -> Iterator[None]:
        """Return the exchange of queries and results; those for ``rows`` merge into ``results``."""
        own, into = call.columns(call.ranks.rank, keys), results.state

        def attend(item: WorkItem, tensors: list[Tensor]) -> AttentionState:
            """Attend to own K/V with another rank's rows; the result is merged there, not here."""
            peer_rows, (work, joins) = remote_rows(call, item, rows, tensors), self.lent[item]
            result = Accumulator(joins, peer_rows.q, inputs.v.shape[3])
            result.attend(work, peer_rows, own)
            return result.finish()

        def add(tokens: slice, tensors: list[Tensor]) -> None:
            """Merge results that a helper sent home for a slice of this rank's rows."""
            rows_of_helper = (0, tokens.stop - tokens.start)
            merge(into.take(tokens), tensors[0], tensors, spans=(rows_of_helper,))

        return remote_queries(
            call.ranks,
            self.forward_pieces,
            take=lambda tokens: rows_tensors(rows.take(tokens)),
            compute=attend,
            results_like=into.take,
            add=add,
        )

    def offload_backward(
        self,
        call: Call,
        own: KeyBlock,
        upstream: BackwardInputs,
        rows: QueryBlock,
        row_sums: Rows,
        key_grads: RotatingKeyGrads,
    ) -> Iterator[None]:
        """Return the exchange of queries and dQ; gradients of own K/V are added to their sums."""
        own_grads = key_grads.grads(own=True)
        num_upstream = 3 if upstream.delta is None else 4

        def differentiate(item: WorkItem, tensors: list[Tensor]) -> list[Tensor]:
            """Compute dQ and, if any, dbias for another rank's rows; dK/dV go to own sums."""
            peer_rows = remote_rows(call, item, rows, tensors)
            sums = call.row_sums(peer_rows, "add")
            if peer_rows.q.shape[0] > 0:
                dout, out, lse, *delta = tensors[-num_upstream:]
                peer_upstream = BackwardInputs(dout, out, lse, delta[0] if delta else None)
                # Own sums stay at home while this step's launches for own rows may add to them,
                # too: both are on one stream.
                self.lent_backward[item].run(peer_rows, [own], peer_upstream, sums, own_grads)
            return [x for x in (sums.whole(), sums.dbias) if x is not None]

        def add(tokens: slice, tensors: list[Tensor]) -> None:
            """Add the gradients that a helper sent home for a slice of this rank's rows."""
            totals = [x for x in row_sums.take(tokens) if x is not None]
            # A row may be helped in several steps; its sum grows in the order of the pieces on
            # every run.
            for total, x in zip(totals, tensors, strict=True):
                total.add_(x)

        return remote_queries(
            call.ranks,
            self.backward_pieces,
            take=lambda tokens: [
                *rows_tensors(rows.take(tokens)),
                *[x for x in upstream.take(tokens) if x is not None],
            ],
            compute=differentiate,
            results_like=lambda tokens: [x for x in row_sums.take(tokens) if x is not None],
            add=add,
        )

    def traffic(self, call: Call, inputs: Inputs, *, forward: bool, **_: bool) -> Traffic:
        """Count the bytes of the ring's K/V, of query rows for helpers, and of their results."""
        ring = super().traffic(call, inputs, forward=forward)
        moved = call.program.moved(call.ranks.rank, forward=forward)
        rows_sent, rows_received = (sum(x.values()) for x in (moved.queries, moved.results))
        query, result = _row_bytes(call, inputs, forward=forward)
        return Traffic(
            ring.sent + query * rows_sent + result * rows_received,
            ring.received + query * rows_received + result * rows_sent,
        )


def remote_queries(
    ranks: Ranks,
    steps: Sequence[Pieces],
    *,
    take: Callable[[slice], list[Tensor]],
    compute: Callable[[WorkItem, list[Tensor]], Sequence[Tensor]],
    results_like: Callable[[slice], Sequence[Tensor]],
    add: Callable[[slice, list[Tensor]], None],
) -> Iterator[None]:
    """Exchange query rows and results between busy ranks and their helpers, a part at a time.

    All ranks go through the pieces of all steps in one order, so that sends meet their receives.
    The first part starts the exchange of the first piece; then there is a part for each step. The
    end takes in the last results.

    Args:
        ranks: The ranks that hold one sequence.
        steps: The pieces of each step of the pass.
        take: Returns the tensors that a helper needs for a slice of this rank's rows. Shards have
            equal shapes on all ranks, so it also gives the shapes of what other ranks send.
        compute: Returns the results of a work item, from the tensors that arrived for it.
        results_like: Returns tensors with the shapes and dtypes of the results for a slice of rows.
        add: Merges or adds results that came home for a slice of rows.
    """
    to_send = deque([piece for pieces in steps for piece in pieces])
    returning: list[tuple[Transfer, list[tuple[slice, list[Tensor]]]]] = []

    def send_next() -> tuple[Transfer, list[tuple[WorkItem, list[Tensor]]]]:
        """Start sending this rank's next piece to its helper, and receiving the next to compute.

        Return the transfer and what it fills.
        """
        piece = to_send.popleft()
        # Copies, where rows are not contiguous: the transfer keeps them alive, and the rows
        # themselves are never written in a pass.
        sends = [(x.contiguous(), piece.helper) for rows in piece.sent_rows for x in take(rows)]
        arriving = [
            (item, [x.new_empty(x.shape) for x in take(item.q_slice)]) for item in piece.items
        ]
        receives = [(x, item.q_rank) for item, tensors in arriving for x in tensors]
        return ranks.start(sends, receives), arriving

    def add_results() -> None:
        """Wait for the results that helpers sent home, and add them to this rank's."""
        for transfer, expected in returning:
            transfer.wait()
            # What a helper computed is complete for its keys, so it is added or merged once.
            for rows, tensors in expected:
                add(rows, tensors)
        returning.clear()

    transfer, arriving = send_next() if to_send else (DONE, [])
    yield
    for pieces in steps:
        # Take in earlier results, then compute for others.
        if returning:
            add_results()
        for piece in pieces:
            # This piece of other ranks' rows is here, and this rank's own has left.
            transfer.wait()
            received = arriving
            # The next piece travels, into tensors of its own, while this one is computed; the
            # peers start the same exchange when they come to this point.
            transfer, arriving = send_next() if to_send else (DONE, [])
            results = [(item.out_rank, compute(item, x)) for item, x in received]
            # Before more results are sent home take in those of the piece before: at most one
            # piece of results is in flight, and what was sent of it may be freed.
            if returning:
                add_results()
            # Memory for the results comes before the send, so both directions start at once. The
            # transfer keeps what is sent alive.
            expected = [
                (rows, [x.new_empty(x.shape) for x in results_like(rows)])
                for rows in piece.sent_rows
            ]
            sends = [(x, owner) for owner, tensors in results for x in tensors]
            receives = [(x, piece.helper) for _, tensors in expected for x in tensors]
            returning.append((ranks.start(sends, receives), expected))
            # A generator keeps its locals while other steps' launches run: free this piece.
            del received, results, expected, sends, receives
        yield
    if returning:
        add_results()


def rows_tensors(rows: QueryBlock) -> list[Tensor]:
    """Return the tensors of some rows that a helper needs for a forward: q, and what q comes with.

    The order is q, segment ids, bias, bias shift; absent ones are left out, alike on all ranks.
    """
    return [x for x in (rows.q, rows.segments, rows.bias, rows.bias_shift) if x is not None]


def remote_rows(call: Call, item: WorkItem, local: QueryBlock, tensors: list[Tensor]) -> QueryBlock:
    """Return another rank's rows as a block, from tensors in the order of :func:`rows_tensors`.

    Positions come from the plan, which every rank has, and slopes from ``local``, this rank's rows:
    both are never sent.
    """
    # The sender has left out what is absent in the call, which is absent on every rank.
    q, *remaining = tensors
    segments = None if local.segments is None else remaining.pop(0)
    bias = None if local.bias is None else remaining.pop(0)
    shift = None if local.bias_shift is None else remaining.pop(0)
    indices = position = None
    if call.needs_index:
        of_owner = query_positions(call.plan, item.q_rank, call.device)[:2]
        indices, position = (x[item.q_slice] for x in of_owner)
    return local._replace(
        q=q,
        indices=indices,
        position=position,
        segments=segments,
        bias=bias,
        runs=(),
        bias_shift=shift,
    )


def _row_bytes(call: Call, inputs: Inputs, *, forward: bool) -> tuple[int, int]:
    """Return the bytes that are sent to a helper for one token's queries, and those sent home."""
    batch, _, heads, dim = inputs.q.shape
    bias, v_dim, wide = inputs.bias, inputs.v.shape[3], call.acc_dtype.itemsize
    query = sum(x[:, :1].nbytes for x in (inputs.q, inputs.q_ids) if x is not None)
    if bias is not None:
        query += bias[:, :, :1].nbytes
        if call.params.shifts_bias:
            query += (bias.shape[0] if inputs.k_ids is None else batch) * bias.shape[1] * wide
    if forward:
        return query, batch * heads * (v_dim + 1) * wide
    numbers = 2 if call.kernel.needs_delta else 1  # lse, delta
    query += batch * heads * (2 * v_dim * inputs.q.itemsize + numbers * wide)  # dout, out
    dbias = bias[:, :, :1].numel() if bias is not None and call.params.bias_grad else 0
    return query, (batch * heads * dim + dbias) * wide


BALANCED = StrategySpec("balanced", Balanced.of)
