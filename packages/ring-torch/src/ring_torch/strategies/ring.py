"""The forward loop: move K/V, call a kernel for each work item, merge."""

from __future__ import annotations

from torch import Tensor

from ring_core import WorkItem
from ring_torch.call import Call, header_device
from ring_torch.comm.handshake import agree
from ring_torch.comm.ranks import DONE
from ring_torch.kernels.merge import merge_into
from ring_torch.payload import keys_of, packing_of
from ring_torch.records import AttentionState, Inputs, KeyBlock, QueryBlock, empty_state
from ring_torch.strategies.balanced import RemoteQueries, helped_rows, rows_tensors


def run_forward(call: Call, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention of this rank's queries over all keys, sinks not yet included.

    K/V move in two slots: while a kernel reads one, it is sent on and the next arrives in the
    other.

    Returns:
        ``out [B, T_local, H, Dv]`` and ``lse [B, H, T_local]`` in the accumulators' dtype, and the
        packed K/V that arrived last (``None`` if nothing travelled).
    """
    plan, ring = call.plan, call.ring
    agree(ring, call.number, call.seed, call.forward_signature, header_device(call))
    rows, keys = call.rows(inputs), keys_of(inputs)
    own = columns = call.columns(ring.rank, keys)
    into = empty_state(rows.q, inputs.v.shape[3])
    packing = packing_of(keys)
    held: Tensor | None = None
    spare: Tensor | None = None
    if plan.num_steps > 1:
        held, spare = packing.pack(keys, call.device), packing.buffer(call.device)
    errands = RemoteQueries(
        call,
        plan.forward,
        take=lambda part: rows_tensors(rows.take(part)),
        like=into.take,
        add=lambda part, tensors: merge_into(into.take(part), *tensors),
    )

    def help_with(item: WorkItem, tensors: list[Tensor]) -> AttentionState:
        return _help(call, item, helped_rows(call, item, rows, tensors), own, inputs)

    for stage in plan.forward:
        transfer = DONE
        if stage.kv_hop is not None:
            assert held is not None and spare is not None
            transfer = ring.start(
                [(held, ring.ahead(stage.kv_hop))], [(spare, ring.behind(stage.kv_hop))]
            )
        _attend(call, rows, columns, own, stage.step, into)
        errands.collect()
        if stage.helps:
            errands.help(stage.step, help_with)
        transfer.wait()
        if stage.kv_hop is not None:
            assert held is not None and spare is not None
            held, spare = spare, held
            columns = call.columns(
                ring.behind(plan.steps[stage.step + 1].shift), packing.views(held)
            )
    errands.collect()
    return into.out, into.lse, held


def _attend(
    call: Call, rows: QueryBlock, columns: KeyBlock, own: KeyBlock, step: int, into: AttentionState
) -> None:
    """Run a step's items for this rank's own queries."""
    for item in call.plan.items(call.ring.rank, step):
        if item.q_rank == call.ring.rank and rows.q.shape[0] > 0:
            keys = own if item.kv_rank == call.ring.rank else columns
            part = rows.take(item.q_slice), keys.take(item.k_slice)
            call.kernel.forward(*part, item, call.params, into.take(item.q_slice))


def _help(
    call: Call, item: WorkItem, rows: QueryBlock, own: KeyBlock, inputs: Inputs
) -> AttentionState:
    """Run an item for another rank's queries, over this rank's own keys."""
    result = empty_state(rows.q, inputs.v.shape[3])
    if rows.q.shape[0] > 0:
        call.kernel.forward(rows, own.take(item.k_slice), item, call.params, result)
    return result
