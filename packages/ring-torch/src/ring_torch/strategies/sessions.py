"""What strategies over gathered keys share: a session of the call's transport, and its keys."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ring_core import GatherProgram
from ring_core.triton.tile_configs import positions_aligned8
from ring_torch.call import Call, Traffic
from ring_torch.comm.store import CallSignature
from ring_torch.payload import KVPayload
from ring_torch.positions import gathered_positions, gathered_runs
from ring_torch.records import Inputs, KeyBlock
from ring_torch.transports.api import GatherSession, SessionSpec, requests_to


def open_session(
    call: Call, inputs: Inputs, signature: CallSignature, *, groups: int, own: bool
) -> GatherSession:
    """A session for one pass of a call; ``own`` is whether a rank's own keys are fetched, too.

    Raises:
        RankMismatchError: A peer is making another call.
    """
    return call.transport.open(SessionSpec(
        call.ring, call.plan, own, KVPayload.of(inputs, groups), groups, call.device,
        call.acc_dtype, call.needs_grad, signature, call.number, call.seed,
    ))  # fmt: skip


def gathered_columns(
    call: Call, gather: GatherProgram, keys: KVPayload, tensors: Sequence[Tensor]
) -> KeyBlock:
    """The keys of the buffer and all that belongs to them."""
    columns = KeyBlock(*keys.split(tensors[0]), None, tensors[1] if keys.segments else None)
    if not call.needs_index:
        return columns
    which = call.plan, call.ring.rank, gather.own
    return columns._replace(
        position=gathered_positions(*which, call.device),
        aligned8=positions_aligned8(gather.positions),
        runs=gathered_runs(*which),
    )


def gathered_traffic(
    call: Call, inputs: Inputs, gather: GatherProgram, *, forward: bool, fetches: bool
) -> Traffic:
    """Count the bytes of keys that others fetch from here, and of gradients that go back.

    ``fetches`` says that this pass moves keys. Groups of heads add up to all of them.
    """
    rank, keys = call.ring.rank, KVPayload.of(inputs)
    requests = [one for _, one in requests_to(call.plan, rank, own=gather.own)]
    fetched = [one for one in gather.fetches if one.rank != rank]
    asked, given = (
        sum(one.source.stop - one.source.start for one in some) for some in (requests, fetched)
    )
    kv = Traffic(keys.size(asked), keys.size(given)) if fetches else Traffic(0, 0)
    if forward:
        return kv
    token = keys.batch * keys.width * call.acc_dtype.itemsize
    return Traffic(kv.sent + given * token, kv.received + asked * token)
