"""A thread that looks for the words of a rank that failed, where the host does not wait for it.

With gloo a rank finds them when it has waited in vain. The host of a GPU waits for nothing: NCCL's
watchdog ends its process, in words that name no cause. So these are logged before.
"""

from __future__ import annotations

import atexit
import logging
from datetime import timedelta
from threading import Event, Thread

from ring_torch._comm import Ring, ring_of, state_of
from ring_torch._store import read_failure

_LOG = logging.getLogger("ring_torch")
_SHORTEST, _LONGEST = timedelta(seconds=0.25), timedelta(seconds=15)


def watch(ring: Ring, timeout: timedelta) -> Thread:
    """Start to look, several times within a group's timeout, until the group is gone.

    What is found is logged, and closes the group for later calls.
    """
    interval = max(_SHORTEST, min(timeout / 8, _LONGEST))
    stop = Event()
    thread = Thread(target=_look, args=(ring, interval, stop), daemon=True, name="ring_torch watch")

    def end() -> None:
        """A process whose interpreter ends while a thread is inside the store's code is aborted."""
        stop.set()
        thread.join(timeout=5)

    atexit.register(end)
    thread.start()
    return thread


def _look(ring: Ring, interval: timedelta, stop: Event) -> None:
    while not stop.wait(interval.total_seconds()):
        try:
            ring_of(ring.group)
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
