"""Which calls are checked."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ring_core.base.arguments import check_size
from ring_core.tripwire import VARIABLE, every_of
from ring_torch.capture import is_capturing

_every: ContextVar[int | None] = ContextVar("every", default=None)
_ALONE = itertools.count(1)  # calls without a group, which nobody else counts


@contextmanager
def check(every: int = 1) -> Iterator[None]:
    """Check calls of attention inside: a few rows each, against dense attention in float64.

    A checked call takes four query rows of each rank, drawn from the call's number. All ranks get
    them, and each computes ``(out, lse)`` over its own keys in float64, by the mask's rule over
    positions; merged, they must be the call's result, within twice the error of a plain
    implementation in the same dtype. In the backward dQ of four rows and dK, dV of four keys of
    each rank are checked alike, wherever the backward runs. Bytes sent are counted, and must be
    the program's.

    The environment variable ``RING_CHECK``, ``1`` or ``every:100``, does the same for all calls
    of a process; inside this context its value does not matter. All ranks need the same. Calls
    that are captured into a CUDA graph are not checked, of which a warning says so.

    Args:
        every: Check each call whose number on its group is a multiple of this; 0 checks none.

    Raises:
        ValueError: ``every`` is no whole number, or below 0.
        WrongResultError: A result is wrong (on all ranks of the group, from the call itself).

    Example::

        with ring_torch.check(every=100):
            train()
    """
    token = _every.set(check_size("every", every, low=0))
    try:
        yield
    finally:
        _every.reset(token)


def checked_every() -> int:
    """Every which call is checked now; 0 is none.

    Raises:
        ValueError: ``RING_CHECK`` says something else.
    """
    every = _every.get()
    return every_of(os.environ.get(VARIABLE)) if every is None else every


def number_checked(every: int, number: int) -> int:
    """The number by which a call is checked, or 0: it is not.

    Args:
        every: Of :func:`checked_every`.
        number: The call's on its group, from 1 on; 0 without a group.
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
