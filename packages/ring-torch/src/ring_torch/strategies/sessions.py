"""What strategies over gathered keys share: a session of the call's transport, and its keys."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ring_core import GatherProgram
from ring_core.triton.tile_sizes import positions_aligned8
from ring_torch.call import Call
from ring_torch.comm.signature import CallSignature
from ring_torch.payload import KVPayload
from ring_torch.positions import gathered_positions, gathered_runs
from ring_torch.records import Inputs, KeyBlock, Run
from ring_torch.transports import TRANSPORTS
from ring_torch.transports.api import GatherSession, SessionSpec


def open_session(
    call: Call, inputs: Inputs, signature: CallSignature, *, groups: int, own: bool
) -> GatherSession:
    """A session for one pass of a call; ``own`` is whether a rank's own keys are fetched, too.

    Raises:
        RankMismatchError: A peer is making another call.
    """
    spec = SessionSpec(
        call.ring, call.plan, own, KVPayload.of(inputs, groups), groups, call.device,
        call.acc_dtype, call.needs_grad, signature, call.number, call.seed,
    )  # fmt: skip
    return TRANSPORTS[call.transport](spec)


def gathered_columns(
    call: Call, gather: GatherProgram, keys: KVPayload, tensors: Sequence[Tensor]
) -> KeyBlock:
    """The keys of the buffer and all that belongs to them."""
    position, aligned8 = None, False
    runs: tuple[Run, ...] = ()
    if call.needs_index:
        which = call.plan, call.ring.rank, gather.own
        position, runs = gathered_positions(*which, call.device), gathered_runs(*which)
        aligned8 = positions_aligned8(gather.positions)
    segments = tensors[1] if keys.segments else None
    return KeyBlock(*keys.split(tensors[0]), position, segments, aligned8, runs)
