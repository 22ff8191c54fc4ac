"""State of a process group, and the thread that watches a group whose host waits for nothing.

The host of a GPU does not wait for messages: NCCL's watchdog ends its process with a message that
names neither call nor cause. So the thread logs these before that: the error message of a rank that
failed, and a pass that does not end.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event, Thread
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch

_LOG = logging.getLogger("ring_torch")
_LEAST_WAIT, _LONGEST = timedelta(seconds=0.25), timedelta(seconds=15)


class QueuedPass(NamedTuple):
    """A pass that the host has queued on its GPU and does not wait for."""

    name: str  # the call's number and the pass
    start: float  # when it was queued, seconds of ``time.monotonic``
    ended: Any  # a CUDA event after the pass; the next pass records it again


@dataclass
class GroupState:
    """Mutable state of a group: calls counted, signatures compared, failures."""

    calls: int = 0
    nonce: int | None = None  # drawn by rank 0, and passed on with the first header
    agreed: dict[bytes, None] = field(default_factory=dict)  # signatures compared, oldest first
    last: tuple[Any, bytes] | None = None  # the last ``StoreAgreement``, and the digest it used
    is_inherited: bool = False  # True in a process forked from the one that made the group
    failure: str | None = None  # error message of a failed pass; the group is closed then
    is_watched: bool = False  # True once a thread looks for failures of other ranks
    queued: QueuedPass | None = None  # the last pass, until the thread has looked at it
    ended: dict[int, Any] = field(default_factory=dict)  # CUDA event by device
    streams: dict[Any, Any] = field(default_factory=dict)  # by torch's id of each
    runs_together: dict[str, bool] = field(default_factory=dict)  # messages, by type of device
    digest_checks: dict[Any, Any] = field(default_factory=dict)  # by device, or ``None``
    hosts: tuple[str, ...] | None = None  # name of each rank's host, once it was asked for
    before_passes: dict[int, WeakMethod[Callable[[], None]]] = field(default_factory=dict)  # by id
    captured: dict[int, object] = field(default_factory=dict)  # what CUDA graphs read, by id
    equal_calls: dict[str, int] = field(default_factory=dict)  # of `check_equal`, by name
    exchanges: Any = None  # memory of exchanges by one kernel, once there was one

    def forget_memory(self) -> None:
        """Let go of memory that ranks share and of what CUDA graphs read, as the group is gone."""
        self.captured.clear()
        self.exchanges = None


def note_queued(state: GroupState, name: str) -> None:
    """Record the pass that the host has just queued, for the thread that checks whether it ends.

    While a CUDA graph is captured nothing is recorded: querying an event from any thread could
    break the capture.
    """
    state.queued = None  # before its event is recorded again
    if not torch.cuda.is_current_stream_capturing():
        device = torch.cuda.current_device()
        if (ended := state.ended.get(device)) is None:
            ended = state.ended[device] = torch.cuda.Event()
        # Torch makes a new object for the current stream each time it is asked.
        identity = torch._C._cuda_getCurrentStream(device)  # noqa: SLF001 - its id alone
        if (stream := state.streams.get(identity)) is None:
            stream = state.streams[identity] = torch.cuda.current_stream()
        # The event is behind all that the pass has queued on this stream, transfers it waits for
        # included.
        ended.record(stream)
        state.queued = QueuedPass(name, time.monotonic(), ended)


def watch(
    state: GroupState,
    rank: int,
    peers: Sequence[int],
    read_failure: Callable[[], str | None],
    timeout: timedelta,
) -> Thread:
    """Start a thread that looks for failed ranks, several times within the group's timeout.

    It logs failures of other ranks, and passes that do not end; a failure closes the group for
    later calls. The thread ends with the group, with its first failure, or with the interpreter.

    Args:
        state: The state of the group.
        rank: Number of this rank in the group.
        peers: Numbers of the others.
        read_failure: Returns the error message of a rank that failed, or ``None``; raises a
            ``RuntimeError`` or ``ValueError`` once the group is destroyed.
        timeout: The group's timeout.
    """
    stop = Event()
    thread = Thread(
        target=_watch_group,
        args=(state, rank, peers, read_failure, timeout, stop),
        daemon=True,
        name="ring_torch watch",
    )

    def end() -> None:
        """Stop the thread: an interpreter that ends while it is inside the store's code aborts."""
        # The thread looks at it between two looks at the store, never inside of one.
        stop.set()
        thread.join(timeout=5)

    atexit.register(end)
    thread.start()
    return thread


def _watch_group(
    state: GroupState,
    rank: int,
    peers: Sequence[int],
    read_failure: Callable[[], str | None],
    timeout: timedelta,
    stop: Event,
) -> None:
    """Look for failures and at the last queued pass until the group fails or is destroyed."""
    patience = max(_LEAST_WAIT, min(timeout / 8, _LONGEST))
    while not stop.wait(patience.total_seconds()):
        try:
            text = read_failure()
        except (RuntimeError, ValueError):  # the group was destroyed
            return
        if state.failure is not None:
            return
        if text is not None:
            state.failure = text
            _LOG.error("%s", text)
            return
        # A pass is looked at once, after three quarters of the timeout: soon enough to log before
        # the watchdog ends the process.
        queued = state.queued
        if queued is None or time.monotonic() - queued.start < 0.75 * timeout.total_seconds():
            continue
        # If the host is queueing another pass, the event is that one's, and the old one is past.
        if not _has_ended(queued) and state.queued is queued:  # the watchdog will end the process
            _LOG.error(
                "%s, or one before it, has not ended on rank %d: it waits for ranks %s of the "
                "group, or for what was queued before",
                queued.name,
                rank,
                ", ".join(map(str, peers)),
            )
        if state.queued is queued:
            state.queued = None  # each is looked at once


def _has_ended(queued: QueuedPass) -> bool:
    """Return True if the GPU has come to the end of a pass, or is in an error."""
    try:
        return bool(queued.ended.query())
    except RuntimeError:  # the GPU is in an error, which says more
        return True
