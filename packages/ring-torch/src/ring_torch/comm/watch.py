"""A thread that looks for what went wrong where the host waits for nothing.

With gloo a rank finds the words of one that failed when it has waited in vain. The host of a GPU
waits for nothing: NCCL's watchdog ends its process, in words that name no call and no cause. So
these are logged before: the words of a rank that failed, and a pass that does not end.
"""

from __future__ import annotations

import atexit
import logging
import time
from datetime import timedelta
from threading import Event, Thread

from ring_torch.comm.ranks import QueuedPass, Ranks, others, ranks_of, state_of
from ring_torch.comm.store import read_failure

_LOG = logging.getLogger("ring_torch")
_LEAST_WAIT, _LONGEST = timedelta(seconds=0.25), timedelta(seconds=15)


def watch(ring: Ranks, timeout: timedelta) -> Thread:
    """Start to look, several times within a group's timeout, until the group is gone.

    What is found is logged; a failure closes the group for later calls.
    """
    stop = Event()
    thread = Thread(
        target=_watch_group, args=(ring, timeout, stop), daemon=True, name="ring_torch watch"
    )

    def end() -> None:
        """A process whose interpreter ends while a thread is inside the store's code is aborted."""
        stop.set()
        thread.join(timeout=5)

    atexit.register(end)
    thread.start()
    return thread


def _watch_group(ring: Ranks, timeout: timedelta, stop: Event) -> None:
    patience = max(_LEAST_WAIT, min(timeout / 8, _LONGEST))
    while not stop.wait(patience.total_seconds()):
        try:
            ranks_of(ring.group)
        except (RuntimeError, ValueError):  # it was destroyed
            return
        assert ring.group is not None
        text, state = read_failure(ring.group), state_of(ring)
        if state.failure is not None:
            return
        if text is not None:
            state.failure = text
            _LOG.error("%s", text)
            return
        queued = state.queued
        if queued is None or time.monotonic() - queued.since < 0.75 * timeout.total_seconds():
            continue
        if not _has_ended(queued):  # the watchdog is about to end the process
            _LOG.error(
                "%s, or one before it, has not ended on rank %d: it waits for ranks %s of the "
                "group, or for what was queued before",
                queued.name, ring.rank, ", ".join(map(str, others(ring))),
            )  # fmt: skip
        if state.queued is queued:
            state.queued = None  # each is looked at once


def _has_ended(queued: QueuedPass) -> bool:
    try:
        return bool(queued.ended.query())
    except RuntimeError:  # the GPU is in an error, which says more
        return True
