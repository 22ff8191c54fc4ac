"""Decide which calls the tripwire checks: one in every ``n``, by a hash of the numbers in ``q``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
from jax import lax

from ring_core import UnsupportedError
from ring_core.base.arguments import check_size, numbers_as_python
from ring_core.tripwire import VARIABLE, every_of
from ring_jax.records import Array, CallSpec

_HASHED_TOKENS = 64  # at least so many tokens of a rank's q go into the hash, if there are
_every: Any = jax.make_user_context(default_value=None)  # part of the key of compiled programs


@numbers_as_python
@contextmanager
def check(every: int = 1) -> Iterator[None]:
    """Check calls of attention in this context: a few rows each, against dense float64 attention.

    A checked call takes four query rows of each rank. All ranks get them, and each computes ``(out,
    lse)`` over its own keys in float64, by the mask's rule over positions; merged, they must be the
    call's result, within twice the error of a plain implementation in the same dtype. In the
    backward dQ of four rows and dK, dV of four keys of each rank are checked likewise. The bytes of
    the collectives of a traced call must be those of its program. So it is of ``shift``, ``halo``
    and ``relayout``, and of their backwards: they carry rows that change rank, and no others.

    A compiled program cannot count calls: the numbers in ``q`` decide which calls are checked, and
    which rows; of many different calls it is one in ``every``. A wrong result is raised by a
    callback on the host, which JAX turns into a ``JaxRuntimeError`` that names
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
    """Return the number of calls of which one is checked, 0 for none.

    It is that of :func:`check`, else that of ``RING_CHECK``.

    Raises:
        ValueError: ``RING_CHECK`` is malformed.
        UnsupportedError: Calls are to be checked, and JAX has no CPU device.
    """
    every = _every.value
    every = every_of(os.environ.get(VARIABLE)) if every is None else int(every)
    if every == 0:
        return 0
    try:
        jax.local_devices(backend="cpu")  # the callback that compares and raises needs one
    except RuntimeError as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise UnsupportedError(
            f"{VARIABLE}: a checked call compares rows on the host, for which JAX needs a CPU "
            f"device beside the others, and there is none: JAX_PLATFORMS={platforms!r}. Instead: add "
            f"',cpu' to it, or unset it"
        ) from error
    return every


class CheckedCall(NamedTuple):
    """A call that the tripwire may check, and the number that decides whether it does."""

    every: int  # one call in this many is checked
    number: Array  # uint32, a hash of q, equal on all ranks

    @classmethod
    def of(cls, call: CallSpec, q: Array) -> Self:
        """Hash some tokens of the queries ``[B, T, H, D]`` of a call, over all ranks.

        ``q`` must not be empty.
        """
        sample = q[:, :: max(1, q.shape[1] // _HASHED_TOKENS)]
        width = jnp.uint16 if sample.dtype.itemsize == 2 else jnp.uint32
        digits = lax.bitcast_convert_type(sample, width).astype(jnp.uint32).reshape(-1)
        weights = 2 * jnp.arange(len(digits), dtype=jnp.uint32) + 1
        total = lax.bitcast_convert_type((digits * weights).sum(dtype=jnp.uint32), jnp.int32)
        total = total if call.axis_name is None else lax.psum(total, call.axis_name)
        return cls(call.check_every, mixed(lax.bitcast_convert_type(total, jnp.uint32)))

    def run[T](self, if_checked: Callable[[], T], if_not: Callable[[], T]) -> T:
        """Run the first function if this call is checked, else the second."""
        if self.every == 1:
            return if_checked()
        return cast("T", lax.cond(self.number % jnp.uint32(self.every) == 0, if_checked, if_not))


def mixed(x: Array) -> Array:
    """Mix the bits of uint32 words, by the finalizer of MurmurHash3."""
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))
