"""Which calls are checked: one in so many, told apart by the numbers in ``q``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
from jax import lax

from ring_core import UnsupportedError
from ring_core.base.arguments import check_size
from ring_core.tripwire import VARIABLE, every_of
from ring_jax.records import Array, Static

_SPREAD = 64  # tokens whose numbers tell calls apart
_every: Any = jax.make_user_context(default_value=None)  # programs are compiled anew for another


@contextmanager
def check(every: int = 1) -> Iterator[None]:
    """Check calls of attention inside: a few rows each, against dense attention in float64.

    A checked call takes four query rows of each rank. All ranks get them, and each computes ``(out,
    lse)`` over its own keys in float64, by the mask's rule over positions; merged, they must be the
    call's result, within twice the error of a plain implementation in the same dtype. In the
    backward dQ of four rows and dK, dV of four keys of each rank are checked alike. The bytes of
    the collectives of a traced call must be the program's.

    A compiled program counts no calls: which ones are checked, and which rows, follows from the
    numbers in ``q``; of many different calls it is one in ``every``. What is wrong is raised by
    a callback of the host, as jax does it: a ``JaxRuntimeError`` that names
    :class:`ring_core.WrongResultError`.

    The environment variable ``RING_CHECK``, ``1`` or ``every:100``, does the same where this
    context is not used; it is read when a call is traced, so set it before anything is compiled.

    Args:
        every: Check one in so many calls; 0 checks none.

    Raises:
        ValueError: ``every`` is no whole number, or below 0.
        UnsupportedError: A call is traced where JAX has no CPU device, which callbacks need.
        WrongResultError: A traced call's collectives carry other bytes than its program.

    Example::

        with ring_jax.check(every=100):
            train()
    """
    with _every(check_size("every", every, low=0)):
        yield


def checked_every() -> int:
    """Every which call is checked now; 0 is none.

    Raises:
        ValueError: ``RING_CHECK`` says something else.
        UnsupportedError: JAX has no CPU device.
    """
    every = _every.value
    every = every_of(os.environ.get(VARIABLE)) if every is None else int(every)
    if every == 0:
        return 0
    try:
        jax.local_devices(backend="cpu")  # a callback, which raises what is found, needs one
    except RuntimeError as error:
        told = os.environ.get("JAX_PLATFORMS", "")
        raise UnsupportedError(
            f"{VARIABLE}: a checked call compares rows on the host, for which JAX needs a CPU "
            f"device beside the others, and there is none: JAX_PLATFORMS={told!r}. Instead: add "
            f"',cpu' to it, or unset it"
        ) from error
    return every


class Turn(NamedTuple):
    """A call that may be checked."""

    every: int
    number: Array  # the call's, equal on all ranks, uint32

    @classmethod
    def of(cls, static: Static, q: Array) -> Self:
        """Of a call that has queries."""
        taken = q[:, :: max(1, q.shape[1] // _SPREAD)]
        width = jnp.uint16 if taken.dtype.itemsize == 2 else jnp.uint32
        words = lax.bitcast_convert_type(taken, width).astype(jnp.uint32).reshape(-1)
        weights = 2 * jnp.arange(len(words), dtype=jnp.uint32) + 1
        total = lax.bitcast_convert_type((words * weights).sum(dtype=jnp.uint32), jnp.int32)
        total = total if static.axis_name is None else lax.psum(total, static.axis_name)
        return cls(static.check, mixed(lax.bitcast_convert_type(total, jnp.uint32)))

    def run[T](self, checked: Callable[[], T], skipped: Callable[[], T]) -> T:
        """The one or the other."""
        if self.every == 1:
            return checked()
        return cast("T", lax.cond(self.number % jnp.uint32(self.every) == 0, checked, skipped))


def mixed(x: Array) -> Array:
    """All bits of a word from all of its bits (the finalizer of MurmurHash3)."""
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))
