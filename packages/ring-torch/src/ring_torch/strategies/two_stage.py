"""Strategy ``gather`` in two stages, for kernels that cannot mask any band.

The forward attends to the rank's own K/V while those of other ranks arrive, then to these in full
rectangles, and merges. The backward goes over the other ranks' K/V first, and over its own while
their dK/dV travel home.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from ring_core import GatherProgram, Plan, WorkItem, gather_program
from ring_torch.call import Call, Saved, Strategy, zero_row_grads
from ring_torch.payload import KeyGradBuffer, KVPayload
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    Grads,
    Inputs,
    KeyBlock,
    KeyGrads,
    empty_state,
)
from ring_torch.transports.api import Traffic, gathered_traffic


@dataclass(frozen=True)
class TwoStageGather(Strategy):
    """Strategy ``gather`` in two stages. It saves nothing: the backward fetches K/V again."""

    gather: GatherProgram
    own_items: tuple[WorkItem, ...]
    name: str = "gather"
    depends_on_kernel = True

    @classmethod
    def of(cls, plan: Plan, rank: int) -> Self:
        """Make what a rank fetches from others, and its work over its own K/V."""
        return cls(gather_program(plan, rank, own=False), plan.items(rank, rank))

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """Return ``(out, lse)`` in the accumulators' dtype; nothing is saved."""
        session = call.open_session(inputs, call.forward_signature, self.gather, groups=1)
        gather = self.gather
        # Fetches from all peers are in flight from here on, into one buffer.
        (arriving,) = session.fetch(gather, inputs)
        columns = call.gathered_columns(gather, session.spec.keys, arriving.tensors)
        rows, rank = call.rows(inputs), call.ranks.rank
        into = empty_state(rows.q, inputs.v.shape[3])
        own = call.columns(rank, inputs.key_tensors())
        work = [(own, item, 0) for item in self.own_items]
        work += [(columns, *each) for each in zip(gather.items, gather.waits_for, strict=True)]
        # Own K/V wait for nothing and hide the fetches; each item of the buffer waits for its own
        # fetches, while later ones still write other columns.
        for keys, item, waits_for in work:
            arriving.wait(waits_for)
            if rows.q.shape[0] > 0:
                call.kernel.attend_into(
                    rows.take(item.q_slice), keys.take(item.k_slice), item, call.params, into.take(item.q_slice)
                )  # fmt: skip
        # All has arrived, and the rank's own K/V have been read: the caller may change them.
        arriving.wait(None)
        return into, ()

    def backward(
        self, call: Call, inputs: Inputs, upstream: BackwardInputs, _saved: Saved
    ) -> Grads:
        """Return the gradients in the accumulators' dtype."""
        session = call.open_session(inputs, call.backward_signature, self.gather, groups=1)
        gather, rows, keys = self.gather, call.rows(inputs), session.spec.keys
        own = call.columns(call.ranks.rank, inputs.key_tensors())
        sums = KeyGradBuffer(keys, head_major=False)
        row_grads = zero_row_grads(call, rows)
        # Sums of dK/dV of other ranks' keys, where these ranks can read them; and of own keys.
        (peer_sums,) = session.accumulators(gather, sums, zero=True)
        (arriving,) = session.fetch(gather, inputs)
        own_sums = torch.zeros(sums.numel(keys.length), dtype=call.acc_dtype, device=call.device)
        columns = call.gathered_columns(gather, keys, arriving.tensors)
        # Nothing to compute meanwhile: own launches are kept to hide the way home.
        arriving.wait(None)

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
            differentiate(columns, item, *sums.of(peer_sums, gather.length, item.k_slice))
        # `peer_sums` is final and may not be written any more: peers take their part of it, while
        # this rank starts taking the peers' sums for its own keys ...
        add_to = session.return_grads(gather, sums, peer_sums, 0, overlapped=True)
        # ... and goes on with launches over own keys, into `own_sums`, which nobody else reads.
        for item in self.own_items:
            differentiate(own, item, *sums.of(own_sums, keys.length, item.k_slice))
        # Wait for the peers' sums and add them; own keys lie there as they lie in the shard.
        add_to(own_sums, keys.length, lambda source: source)
        return Grads(row_grads.dq, *sums.views(own_sums, keys.length), row_grads.dbias)

    def traffic(self, call: Call, inputs: Inputs, *, forward: bool, saved: bool) -> Traffic:
        """Count the bytes of K/V, fetched in both passes, and of returned dK/dV."""
        del saved  # it saves nothing
        return gathered_traffic(
            self.gather, call.plan, call.ranks.rank, KVPayload.of(inputs), call.acc_dtype,
            forward=forward, fetches=True,
        )  # fmt: skip
