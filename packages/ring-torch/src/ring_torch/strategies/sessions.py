"""What strategies over gathered keys share: a session of the call's transport, and its keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType

from torch import Tensor

from ring_core import GatherProgram
from ring_core.triton.tile_configs import positions_aligned8
from ring_torch.call import Call
from ring_torch.comm.handshake import agree, has_agreed
from ring_torch.comm.store import CallSignature
from ring_torch.payload import KVPayload
from ring_torch.positions import gathered_positions, gathered_runs
from ring_torch.records import Inputs, KeyBlock
from ring_torch.transports.api import GatherSession, SessionSpec
from ring_torch.transports.p2p import Messages


def _out_of_peers(spec: SessionSpec) -> GatherSession:
    """Copies out of the peers' memory, with room for them in that of all ranks; few in a kernel.

    The first time that a group makes such a call, its signature is compared in words and the host
    waits for it; from then on each call's digest travels with its keys.

    Raises:
        RankMismatchError: A peer is making another call.
    """
    from ring_torch.transports.peer_copies import PeerCopies, fits_one_kernel, room_of
    from ring_torch.transports.symm_buffer import symm_buffer_of

    ranks, keys, signature = spec.ranks, spec.keys, spec.signature
    if not has_agreed(ranks, signature):
        agree(ranks, spec.number, spec.seed, signature, spec.device)
    room = room_of(spec.plan, keys, spec.acc_dtype) if spec.needs_grad else 0
    digest = signature.as_int64(spec.number, spec.seed)
    if spec.own and fits_one_kernel(spec.plan, keys, spec.groups):
        from ring_torch.transports.one_kernel import OneKernel

        return OneKernel.of(spec, room, digest)
    window = symm_buffer_of(ranks)
    window.reserve(spec.groups * (keys.message.size + room))
    return PeerCopies(spec, window, room, digest)


#: What opens a session over gathered keys: messages of ``torch.distributed``, or copies out of the
#: peers' memory.
TRANSPORTS: MappingProxyType[str, Callable[[SessionSpec], GatherSession]] = MappingProxyType(
    {"p2p": Messages.open, "symm_mem": _out_of_peers}
)


def open_session(
    call: Call, inputs: Inputs, signature: CallSignature, *, groups: int, own: bool
) -> GatherSession:
    """A session for one pass of a call; ``own`` is whether a rank's own keys are fetched, too.

    Raises:
        RankMismatchError: A peer is making another call.
    """
    return TRANSPORTS[call.transport](SessionSpec(
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
