"""Strategy ``gather`` in two stages, for kernels that can mask only some bands.

The forward attends to the rank's own K/V while those of other ranks arrive, then to these in full
rectangles, and merges the partial results. The backward goes over the other ranks' K/V first, and
over its own while their dK/dV travel home.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch

from ring_core import GatherProgram, WorkItem, gather_program
from ring_core.viz.text import figure
from ring_torch.buffers import ONE_GROUP, HeadGroups, KeyGradBuffer, Shapes
from ring_torch.call import Call, Resolution, Saved, Strategy, zero_row_grads
from ring_torch.capture import is_capturing
from ring_torch.launches.cache import keep, tensors_key
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    Grads,
    Inputs,
    KeyBlock,
    KeyGrads,
    empty_state,
    is_aligned,
)
from ring_torch.strategies.prepared_partials import PreparedPartials, prepare_partials
from ring_torch.transports.api import GatherSession, Traffic, as_in_shard, gathered_traffic


@dataclass(frozen=True)
class GatheringStrategy(Strategy):
    """A strategy that fetches K/V of other ranks into one buffer, by a program.

    The forward saves the gathered K/V if they are few on every rank; otherwise the backward fetches
    them again.
    """

    gather: GatherProgram
    groups: HeadGroups = ONE_GROUP
    name: str = "gather"
    saves: bool = False  # True if the forward saves the gathered K/V
    prepares: bool = False  # True if launches may be prepared: they need q, k and v alone
    depends_on_kernel = True

    def saved_shapes(self, call: Call, _inputs: Inputs, *, plan_known: bool) -> Shapes:
        """Return the shapes of the gathered K/V, group by group; none if the plan is not known.

        Another plan may gather more keys, and then a compiled backward fetches them again.
        """
        if not plan_known or not self.saves:
            return []
        keys = call.keys.of_group(self.groups.forward)
        return keys.gathered_shapes(self.gather.length, self.groups.forward)

    def gathered(self, session: GatherSession, inputs: Inputs, saved: Saved) -> Saved:
        """Return the gathered tensors of a backward over one group: ``saved``, or fetched again."""
        if not saved:
            # Nothing to compute meanwhile: launches over own keys are kept to hide the way home.
            for arriving in session.fetch(self.gather, inputs):
                arriving.wait(None)
                saved += arriving.tensors
        return saved

    def traffic(self, call: Call, _inputs: Inputs, *, forward: bool, saved: bool) -> Traffic:
        """Count the bytes of fetched K/V, unless the forward saved them, and of returned dK/dV."""
        return gathered_traffic(
            self.gather, call.plan, call.ranks.rank, call.keys, call.acc_dtype,
            forward=forward, fetches=forward or not saved,
        )  # fmt: skip

    def figures(self, call: Call, inputs: Inputs) -> list[str]:
        """Return how even the work is, what this rank fetches, and how many launches follow."""
        gather, groups = self.gather, self.groups.forward
        fetches = [x for x in gather.fetches if x.rank != call.ranks.rank]
        keys = sum(x.target.stop - x.target.start for x in fetches)
        peers = {x.rank for x in fetches}
        others = f"{len(peers)} of {call.ranks.size - 1} other ranks"
        fetched = f"{len(fetches)} by this rank: {keys:,} keys from {others}"
        if not fetches:
            fetched = "none, as no query of this rank sees keys of another"
        launches = f"{len(gather.items)} over gathered keys, {len(self.own_work)} over own in place"
        of_groups = f", for each of {groups} groups of heads" if groups > 1 else ""
        return [
            *super().figures(call, inputs),
            figure("fetches", f"{fetched}{of_groups}"),
            figure("launches", f"{launches}, in the forward{of_groups}"),
        ]

    @property
    def own_work(self) -> tuple[WorkItem, ...]:
        """Work over the rank's own K/V where they lie."""
        return self.gather.in_place


@dataclass(frozen=True)
class TwoStageGather(GatheringStrategy):
    """Strategy ``gather`` in two stages: over own K/V, and over those of other ranks.

    The program fetches only other ranks' K/V.
    """

    own_items: tuple[WorkItem, ...] = ()
    launches: dict[object, PreparedPartials | None] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, resolution: Resolution) -> Self:
        """Make what a rank fetches from others, and its work over its own K/V.

        A call that returns ``lse`` saves nothing: another kernel, with another program, may run its
        backward.
        """
        plan, rank = resolution.program.plan, resolution.ranks.rank
        gather = gather_program(plan, rank, own=False)
        return cls(
            gather, own_items=plan.items(rank, rank), prepares=resolution.kernel.prepares,
            saves=resolution.saves_keys(gather) and not resolution.returns_lse,
        )  # fmt: skip

    @property
    def own_work(self) -> tuple[WorkItem, ...]:
        """Work over the rank's own K/V, none of which are in the buffer."""
        return self.own_items

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """Return ``(out, lse)`` in the inputs' dtype or the accumulators', and the gathered K/V."""
        session = call.open_session(call.forward_signature, self.gather, groups=1)
        # Prepared launches round all rows. With sinks a row is rounded once, after they are added.
        key = tensors_key(*inputs[:3]) if self.prepares and inputs.sinks is None else None
        if (prepared := self.launches.get(key)) is not None:
            return self._repeat_forward(inputs, session, prepared)
        gather, keys = self.gather, session.spec.keys
        rows, own = call.rows(inputs), call.columns(call.ranks.rank, inputs.key_tensors())
        into = empty_state(rows.q, inputs.v.shape[3])

        def attend(key_block: KeyBlock, item: WorkItem) -> None:
            """Run the launch of an item, and merge its results."""
            if rows.q.shape[0] > 0:
                operands = rows.take(item.q_slice), key_block.take(item.k_slice)
                call.kernel.attend_into(*operands, item, call.params, into.take(item.q_slice))

        def attend_to_own_keys() -> None:
            """Queue the launches over own K/V, which run while the fetches are in flight."""
            for item in self.own_items:
                attend(own, item)

        saved: Saved = []
        # Fetches from all peers are in flight from here on, into one buffer. The loop has one pass,
        # as all heads are one group. What the session does after it comes behind these launches.
        for arriving in session.fetch(gather, inputs, attend_to_own_keys):
            columns = call.gathered_columns(gather, keys, arriving.tensors)
            # Each item of the buffer waits for its own fetches, while later ones still write other
            # columns.
            for item, waits_for in zip(gather.items, gather.waits_for, strict=True):
                arriving.wait(waits_for)
                attend(columns, item)
            # All has arrived, and the rank's own K/V have been read: the caller may change them.
            arriving.wait(None)
            saved = [*arriving.tensors]
        can_prepare = key is not None and rows.q.numel() > 0
        if can_prepare and key not in self.launches and not is_capturing():
            own_work, others = (own, self.own_items), (columns, gather)
            prepared = prepare_partials(call.kernel, rows, own_work, others, keys, call.params)
            keep(self.launches, key, prepared)
        return into, saved if self.saves else []

    def _repeat_forward(
        self, inputs: Inputs, session: GatherSession, prepared: PreparedPartials
    ) -> tuple[AttentionState, Saved]:
        """Run a forward by prepared launches: over own K/V while others arrive, then over these."""
        q, k, v = inputs[:3]
        own_results: list[tuple[torch.Tensor, torch.Tensor]] = []

        def attend_to_own_keys() -> None:
            # Runs while the session's fetches are in flight.
            own_results.append(prepared.own.forward(q, k, v))

        saved: Saved = []
        for arriving in session.fetch(self.gather, inputs, attend_to_own_keys):
            gathered = session.spec.keys.split(arriving.tensors[0])
            state = prepared.attend(own_results[0], q, gathered, arriving.wait)
            # All has arrived, and the rank's own K/V have been read: the caller may change them.
            arriving.wait(None)
            saved = [*arriving.tensors]
        return state, saved if self.saves else []

    def backward(self, call: Call, inputs: Inputs, upstream: BackwardInputs, saved: Saved) -> Grads:
        """Return the gradients in the inputs' dtype or the accumulators'."""
        session = call.open_session(call.backward_signature, self.gather, groups=1)
        prepared = self.launches.get(tensors_key(*inputs[:3])) if self.prepares else None
        # The others are no part of the key; hooks on saved tensors may put them anywhere in memory.
        if (
            prepared is not None
            and upstream.delta is None
            and upstream.lse.data_ptr() % 16 == 0
            and all(map(is_aligned, (upstream.dout, upstream.out, *saved)))
        ):
            return self._repeat_backward(call, inputs, upstream, saved, session, prepared)
        gather, rows, keys = self.gather, call.rows(inputs), session.spec.keys
        own = call.columns(call.ranks.rank, inputs.key_tensors())
        sums = KeyGradBuffer(keys, head_major=False)
        # Both stages add to dQ, so it begins with zeros.
        row_grads = zero_row_grads(call, rows)
        # Sums of dK/dV of other ranks' keys, where these ranks can read them; and of own keys.
        (peer_sums,) = session.accumulators(gather, sums, zero=True)
        columns = call.gathered_columns(gather, keys, self.gathered(session, inputs, saved))
        saved.clear()

        def differentiate(
            key_block: KeyBlock, item: WorkItem, dk: torch.Tensor, dv: torch.Tensor
        ) -> None:
            """Run a backward launch, adding to the rows' gradients, ``dk`` and ``dv``."""
            if rows.q.shape[0] > 0:
                operands = (
                    rows.take(item.q_slice),
                    key_block.take(item.k_slice),
                    upstream.take(item.q_slice),
                )
                into = row_grads.take(item.q_slice), KeyGrads(dk, dv)
                call.kernel.grads_into(*operands, item, call.params, *into)

        for item in gather.items:
            differentiate(columns, item, *sums.span_views(peer_sums, gather.length, item.k_slice))
        del columns  # their memory serves the launches over own keys
        own_sums = torch.zeros(sums.numel(keys.length), dtype=call.acc_dtype, device=call.device)
        # `peer_sums` is final and may not be written any more: peers take their part of it, while
        # this rank starts taking the peers' sums for its own keys ...
        add_to = session.return_grads(gather, sums, peer_sums, 0, overlapped=True)
        # ... and goes on with launches over own keys, into `own_sums`, which nobody else reads.
        for item in self.own_items:
            differentiate(own, item, *sums.span_views(own_sums, keys.length, item.k_slice))
        # Wait for the peers' sums and add them; own keys lie there as they lie in the shard.
        add_to(own_sums, keys.length, as_in_shard)
        return Grads(row_grads.dq, *sums.views(own_sums, keys.length), row_grads.dbias)

    def _repeat_backward(
        self, call: Call, inputs: Inputs, upstream: BackwardInputs, saved: Saved,
        session: GatherSession, prepared: PreparedPartials,
    ) -> Grads:  # fmt: skip
        """Run a backward by prepared launches.

        The first launch that writes a column of the sums overwrites it, so none has to be zeroed.
        """
        gather, keys, (q, k, v) = self.gather, session.spec.keys, inputs[:3]
        sums, tensors = KeyGradBuffer(keys, head_major=False), (q, upstream.dout, upstream.out)
        (peer_sums,) = session.accumulators(gather, sums, zero=False)
        kv = keys.split(self.gathered(session, inputs, saved)[0])
        packed = peer_sums.view(keys.batch, gather.length, keys.width)
        dqs = prepared.differentiate_others(tensors, upstream.lse, kv, packed)
        saved.clear()
        del kv  # the memory of gathered K/V serves the launch over own keys
        # `peer_sums` is final and may not be written any more: peers take their part of it, while
        # this rank starts taking the peers' sums for its own keys ...
        add_to = session.return_grads(gather, sums, peer_sums, 0, overlapped=True)
        # ... and goes on with the launch over own keys, whose gradients nobody else reads.
        own_sums = torch.empty(
            (keys.batch, keys.length, keys.width), dtype=call.acc_dtype, device=call.device
        )
        dq = prepared.differentiate_own(tensors, upstream.lse, (k, v), dqs, own_sums)
        # Wait for the peers' sums and add them; own keys lie there as they lie in the shard.
        add_to(own_sums.view(-1), keys.length, as_in_shard)
        return Grads(dq, *keys.split(own_sums), None)
