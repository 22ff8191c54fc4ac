"""Blocks of calls that end on all ranks of a group as soon as one fails in them."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch

from ring_core.base.arguments import not_none
from ring_torch.comm.groups import default_device
from ring_torch.comm.handshake import GuardedPass, agree, fail
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import CallSignature, StoreMeeting, timeout_of

_TAG = 0x52494E47  # of a message that no rank sends


@contextmanager
def failing_together(ranks: Ranks, what: str) -> Iterator[None]:
    """Raise on every rank if the block raises on one, and name that rank and its error.

    A rank that raises waits a moment for the others, which may raise, too, or come to the end. One
    that does neither waits for a message that does not come. So over gloo the group's connections
    are closed, which ends every wait for it, in others' collectives, too; over NCCL a host waits
    for the group's timeout. The group is closed for later calls then, and where other ranks have
    come to the end. If all raise it is as before.

    Args:
        ranks: Ranks of the group, all of which enter the block.
        what: Name of the block, for messages.

    Raises:
        RuntimeError: Another rank failed first.
    """
    if ranks.size == 1:
        yield
        return
    number, device = ranks.next_call(), default_device(ranks)
    signature = CallSignature.of({"what": what}, "together")
    with GuardedPass(ranks, number, signature, device):
        agree(ranks, number, 0, signature, device)
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised below
        error = caught
    meeting = StoreMeeting.of(not_none(ranks.group), not_none(ranks.state.nonce), number)
    text = None if error is None else f"rank {ranks.rank}: {_described(error)}"
    first, is_open = meeting.end(
        text, ranks.rank, ranks.size, timeout_of(not_none(ranks.group), device),
        lambda cause: _hang_up(ranks, f"{what} failed on {cause}"),
    )  # fmt: skip
    if not is_open:
        fail(ranks, f"{what} failed on {first}", report=False)
    if error is not None and (is_open or first == text):
        raise error
    if first is not None:
        raise RuntimeError(
            f"{what} failed on {first}. This rank {'ended' if error is None else 'waited for it'}; make a new process "
            f"group before the next call"
        ) from None  # that it waited in vain says nothing more


def _described(error: Exception) -> str:
    """Return an error with the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (at {frame.filename}:{frame.lineno})"


def _hang_up(ranks: Ranks, text: str) -> None:
    """Close the group and its connections over gloo: there a wait that times out does so."""
    fail(ranks, text)
    for peer in ranks.peers:
        with suppress(RuntimeError):  # it always raises
            not_none(ranks.group).recv([torch.empty(1, device="cpu")], peer, _TAG).wait(
                timedelta(milliseconds=1)
            )
