"""Transports: the ways in which bytes move between ranks, by messages or out of peers' memory.

This package may import ``call`` and what is below. A new transport is one file here, which ends in
its :class:`~ring_torch.call.Transport`, and a line in ``TRANSPORTS``. That of ``symm_mem``, whose
ranks read each other's GPU memory, stands here: copy engines or one kernel move a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from ring_core import Plan
from ring_torch.buffers import HeadCarrier
from ring_torch.call import Call, GatherSession, Refusals, SessionSpec, Transport
from ring_torch.comm.handshake import has_agreed
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import CallSignature
from ring_torch.optional import has_triton
from ring_torch.transports import peer_copies, symm_buffer
from ring_torch.transports.p2p import P2P


def _open(call: Call, spec: SessionSpec, signature: CallSignature) -> GatherSession:
    """Open a session in the symmetric memory of the group, which grows if the pass needs more.

    Short passes exchange in one kernel each way, longer ones by copy engines. The first time that a
    group makes a call with this signature, ranks compare its fields and the host waits for that.
    From then on a digest of the call travels with its K/V, and a GPU compares it: a device assert
    if they differ.

    Raises:
        RankMismatchError: A peer is making another call, and this one is the first of its kind.
    """
    digest = _digest(call, call.ranks, signature)
    one_kernel, grad_bytes, size = _room(call.plan, spec, call.needs_grad, call.acc_dtype)
    if one_kernel is not None:
        exchange = one_kernel.exchange_state_of(call.ranks).begin_pass(size, digest)
        session: GatherSession = one_kernel.OneKernel(call, spec, exchange)
        return session
    buffer = symm_buffer.symm_buffer_of(call.ranks)
    buffer.reserve(size)
    return peer_copies.PeerCopies(call, spec, buffer, grad_bytes, digest)


@lru_cache(maxsize=256)
def _room(
    plan: Plan, spec: SessionSpec, needs_grad: bool, acc_dtype: torch.dtype
) -> tuple[Any, int, int]:
    """Return the module of short passes if this is one, and what a pass takes of a rank's memory.

    That is bytes of a group's dK/dV, on the rank that fetches most, and all bytes.
    """
    gather, keys, groups, *_ = spec
    of_grads = plan, keys, acc_dtype, gather.splits, gather.tile
    grad_bytes = peer_copies.grad_bytes_of(*of_grads) if needs_grad else 0
    splits = gather.own and gather.splits  # only own keys in the buffer can be left out of it
    is_short = peer_copies.fits_one_kernel(plan, keys, groups, splits, gather.tile)
    one_kernel = import_module("ring_torch.transports.one_kernel") if is_short else None
    return one_kernel, grad_bytes, groups * (keys.message.size + grad_bytes)


def _open_heads(call: Call, ranks: Ranks, signature: CallSignature, size: int) -> HeadCarrier:
    """Begin a pass that trades tokens for heads by one kernel each way.

    Ranks compare calls as in :func:`_open`.
    """
    from ring_torch.transports.one_kernel import HeadTrade, exchange_state_of

    digest = _digest(call, ranks, signature)
    return HeadTrade(exchange_state_of(ranks).begin_pass(size, digest))


def _digest(call: Call, ranks: Ranks, signature: CallSignature) -> int:
    """Return what identifies a pass of a call; the first of a signature is compared by hosts."""
    if not has_agreed(ranks, signature):
        call.agree(ranks, signature)
    return signature.for_call(call.number, call.seed)


def _head_refusals(ranks: Ranks) -> Refusals:
    """Return why one kernel cannot trade tokens for heads."""
    most, runs = symm_buffer.MOST_RANKS, has_triton() and torch.version.hip is None
    reasons = {
        f"tokens and heads are traded by at most {most} ranks": ranks.size > most,
        "tokens and heads are traded by a Triton kernel for NVIDIA GPUs": not runs,
    }
    return tuple(reason for reason, applies in reasons.items() if applies)


def _peer_memory_refusals(ranks: Ranks, device: torch.device, probe: bool) -> Refusals | None:
    """Return why ranks cannot read each other's memory; ``None`` if that is not known yet.

    To find out, all ranks of the group exchange messages, once and only if ``probe`` is True.
    """
    if device.type == "cuda" and ranks.group is None and not probe:  # `explain` runs alone
        return None
    if device.type != "cuda" or dist.get_backend(ranks.group) != "nccl":
        return ("copies out of the peers' memory need CUDA tensors and a nccl group",)
    buffer = symm_buffer.symm_buffer_of(ranks) if probe else symm_buffer.known_buffer(ranks)
    return None if buffer is None else buffer.refusals


def _missing_on_machine(device: str, reaches: Sequence[Sequence[int]]) -> str:
    """Return why processes of this machine cannot use this transport, or an empty string.

    ``reaches[n]`` are the indices of the GPUs whose memory GPU ``n`` can access directly.
    """
    unreachable = [
        f"{a} and {b}"
        for a, b in combinations(range(len(reaches)), 2)
        if b not in reaches[a] or a not in reaches[b]
    ]
    reasons = {
        "copies out of other GPUs' memory; torch finds no GPU here": device != "cuda",
        "this torch is built without nccl": not dist.is_nccl_available(),
        "there is no other GPU to copy from": len(reaches) < 2,
        f"GPUs do not reach each other's memory: {', '.join(unreachable)}": unreachable,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


SYMM_MEM = Transport(
    "symm_mem",
    _open,
    _peer_memory_refusals,
    _open_heads,
    sends_messages=False,
    head_refusals=_head_refusals,
    asks="the ranks' GPUs reach each other's memory: the first call asks them",
    devices=("cuda",),
    missing=_missing_on_machine,
    # Such calls exchange in one kernel each way. The rank's own keys are then copied into the
    # gathered buffer, too.
    is_short=lambda plan, keys, groups: peer_copies.fits_one_kernel(plan, keys, groups, False),
)

#: The transports of ``transport=``, the fastest first: ``auto`` takes the first that can run.
TRANSPORTS: tuple[Transport, ...] = (SYMM_MEM, P2P)


def transport_names() -> tuple[str, ...]:
    """Return the names that ``transport=`` takes."""
    return ("auto", *(transport.name for transport in TRANSPORTS))
