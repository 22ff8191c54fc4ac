"""Makes ranks that ask for a GPU each share the first one; the fork server imports it.

NCCL takes one rank per GPU. gloo takes more, and torch's symmetric memory lets them read each
other's memory if it is told to. So passes that read peers' memory run as on a GPU each: the same
kernels, copies and barriers, in turns. gloo sends messages from the host, so they are copied there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from ring_torch import local, transports
from ring_torch.call import Refusals
from ring_torch.capture import is_capturing
from ring_torch.comm.ranks import DONE, Ranks, Transfer
from ring_torch.transports import SYMM_MEM, symm_buffer
from ring_torch.transports.symm_buffer import SHARED_GPU

Messages = Sequence[tuple[Tensor, int]]  # tensors, and the ranks that they go to or come from


def share(_: int) -> None:
    """Let this process be one of several ranks of a gloo group that share the first GPU."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    others = [x for x in transports.TRANSPORTS if x is not SYMM_MEM]
    for place, name, value in (
        (transports, "TRANSPORTS", (replace(SYMM_MEM, refusals=_refusals), *others)),
        # Messages cannot be captured, and passes out of peers' memory send none.
        (Ranks, "is_gloo", property(lambda _: not is_capturing())),
        (Ranks, "start", _started_on_host(Ranks.start)),
        (Ranks, "_all_to_all", _all_to_all_on_host(Ranks._all_to_all)),
    ):
        patch.object(place, name, value).start()  # until the process ends


def _refusals(ranks: Ranks, device: torch.device, probe: bool) -> Refusals | None:
    """Return why ranks cannot read each other's memory; sharing a GPU is no reason."""
    if device.type != "cuda":
        return ("the tensors are not on a GPU",)
    known = symm_buffer.symm_buffer_of(ranks) if probe else symm_buffer.known_buffer(ranks)
    return None if known is None else tuple(x for x in known.refusals if x != SHARED_GPU)


@dataclass
class _Arriving:
    """Messages in flight between hosts, in place of a ``dist.Work``."""

    transfer: Transfer
    received: list[tuple[Tensor, Tensor]]  # on the GPU, and on the host

    def wait(self) -> None:
        """Wait for all messages, and copy those that were received to the GPU."""
        self.transfer.wait()
        for target, x in self.received:
            target.copy_(x)
        self.received = []


def _started_on_host(start: Any) -> Any:
    def started(self: Ranks, sends: Messages, receives: Messages) -> Transfer:
        if not any(x.is_cuda for x, _ in (*sends, *receives)):
            return cast("Transfer", start(self, sends, receives))
        host_sends = [(x.cpu(), peer) for x, peer in sends]  # waits for the kernels that write them
        host_receives = [(torch.empty_like(x, device="cpu"), peer) for x, peer in receives]
        transfer: Transfer = start(self, host_sends, host_receives)
        pairs = zip(receives, host_receives, strict=True)
        arriving: Any = _Arriving(transfer, [(target, x) for (target, _), (x, _) in pairs])
        return Transfer((arriving,), transfer.sent, transfer.peers)

    return started


def _all_to_all_on_host(all_to_all: Any) -> Any:
    def traded(
        self: Ranks, sent: Tensor, received: Tensor, *sizes: list[int], beside: bool
    ) -> Transfer:
        if not sent.is_cuda:
            return cast("Transfer", all_to_all(self, sent, received, *sizes, beside=beside))
        host = torch.empty_like(received, device="cpu")
        all_to_all(self, sent.cpu(), host, *sizes, beside=beside).wait()
        received.copy_(host)
        return DONE

    return traded


_join = local._join


def _joined(rank: int, *rest: Any, cuda: bool) -> None:
    _join(rank, *rest, cuda=False)
    if cuda:
        share(rank)


patch.object(local, "_join", _joined).start()  # kept until the process ends
