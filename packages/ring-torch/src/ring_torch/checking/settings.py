"""Settings of the tripwire, which say what calls are checked: of attention and of movements."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ring_core.base.arguments import check_size, numbers_as_python
from ring_core.tripwire import VARIABLE, every_of
from ring_torch.capture import is_capturing

#: The setting of :func:`check`, ``None`` outside of its blocks, where the environment's holds.
SETTING: ContextVar[int | None] = ContextVar("every", default=None)
_ALONE = itertools.count(1)  # numbers of calls without a group, which are not counted elsewhere


@numbers_as_python
@contextmanager
def check(every: int = 1) -> Iterator[None]:
    """Check the results of attention calls within the block against dense attention in float64.

    A checked call samples four query rows of each rank, chosen by the call's number. All ranks
    receive them, and each computes ``(out, lse)`` over its own keys in float64, by the mask's rule
    over positions. Merged, these must equal the call's result, within twice the error of a plain
    implementation in the same dtype. In the backward, dQ of four queries and dK and dV of four keys
    of each rank are checked in the same way, even if the backward runs outside the block. The bytes
    that were sent must be those that the call's program states. Of ``shift``, ``halo`` and
    ``relayout``, and their backwards, the bytes are checked: those of rows that change rank. Of a
    recurrent layer one document is computed again, token by token: its states, and outputs and
    gradients of some tokens.

    The environment variable ``RING_CHECK``, ``1`` or ``every:100``, does the same for all calls
    of a process; within this block its value is not used. All ranks need the same setting. Calls
    that are captured into a CUDA graph are not checked, and warn of it.

    Args:
        every: Interval of checked calls: those whose number on their group is a multiple of it. 1
            checks all, 0 none.

    Raises:
        ValueError: ``every`` is no integer, or below 0.
        WrongResultError: Raised by the call or its backward, on all ranks of the group, if a result
            is wrong.

    Example::

        with ring_torch.check(every=100):
            train()
    """
    token = SETTING.set(check_size("every", every, low=0))
    try:
        yield
    finally:
        SETTING.reset(token)


def checked_every() -> int:
    """Return the current interval of checked calls, as ``every`` of :func:`check`; 0 for none.

    Raises:
        ValueError: ``RING_CHECK`` has an unknown value.
    """
    every = SETTING.get()
    return every_of(os.environ.get(VARIABLE)) if every is None else every


def number_checked(every: int, number: int) -> int:
    """Return the number by which a call's rows are sampled, or 0 if the call is not checked.

    A call that would be checked, but is captured into a CUDA graph, is not, and warns of it.

    Args:
        every: Interval of checked calls, not 0.
        number: Number of the call on its group, from 1 on; 0 without a group.
    """
    number = number or next(_ALONE)
    if number % every:
        return 0
    if is_capturing():
        warnings.warn(
            f"{VARIABLE}: calls that are captured into a CUDA graph are not checked", stacklevel=4
        )
        return 0
    return number


def check_of(number: int) -> tuple[int, int]:
    """Return the interval of checked calls, and a number that is not 0 if this one is checked."""
    check_every = checked_every()
    return check_every, check_every and number_checked(check_every, number)
