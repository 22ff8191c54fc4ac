"""Thread that looks for ranks that failed, and for passes that do not end, and logs them.

With gloo a rank that has waited in vain reads the error message of the rank that failed. The host
of a GPU waits for nothing: NCCL's own watchdog ends its process with a message that names neither
call nor cause. So this thread logs both before that.
"""

from __future__ import annotations

import atexit
import logging
import time
from datetime import timedelta
from threading import Event, Thread

from ring_torch.comm.ranks import QueuedPass, Ranks, ranks_of
from ring_torch.comm.store import read_failure

_LOG = logging.getLogger("ring_torch")
_LEAST_WAIT, _LONGEST = timedelta(seconds=0.25), timedelta(seconds=15)


def watch_group(ranks: Ranks, timeout: timedelta) -> Thread:
    """Start a thread that looks for failed ranks, several times within the group's timeout.

    It logs failures of other ranks, and passes that do not end; a failure closes the group for
    later calls. The thread ends with the group.
    """
    stop = Event()
    thread = Thread(
        target=_look_for_failures, args=(ranks, timeout, stop), daemon=True, name="ring_torch watch"
    )

    def end() -> None:
        """Stop the thread: an interpreter that ends while it is inside the store's code aborts."""
        stop.set()
        thread.join(timeout=5)

    atexit.register(end)
    thread.start()
    return thread


def _look_for_failures(ranks: Ranks, timeout: timedelta, stop: Event) -> None:
    """Look at the store and at the last queued pass until the group fails or is destroyed."""
    patience = max(_LEAST_WAIT, min(timeout / 8, _LONGEST))
    while not stop.wait(patience.total_seconds()):
        try:
            ranks_of(ranks.group)
        except (RuntimeError, ValueError):  # it was destroyed
            return
        assert ranks.group is not None
        text, state = read_failure(ranks.group), ranks.state
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
                queued.name, ranks.rank, ", ".join(map(str, ranks.peers)),
            )  # fmt: skip
        if state.queued is queued:
            state.queued = None  # each is looked at once


def _has_ended(queued: QueuedPass) -> bool:
    """Return True if the GPU has come to the end of a pass, or is in an error."""
    try:
        return bool(queued.ended.query())
    except RuntimeError:  # the GPU is in an error, which says more
        return True
