"""Run ranks of a JAX ring without communication: one GPU emulates them, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp

import ring_jax_gpu
from ring_jax import attention, autodiff
from ring_jax.strategies import steps


@dataclass(frozen=True)
class Alone:
    """A stand-in for :class:`ring_jax.collectives.Ranks` that moves nothing.

    Results are wrong, but times do not depend on which keys arrive.
    """

    place: int
    size: int

    def rank(self) -> jax.Array:
        """Return the rank that is emulated."""
        return jnp.int32(self.place)

    def move[T](self, x: T, hop: int, receivers: Sequence[int] | None = None) -> T:
        """Return ``x``, in place of what another rank sends."""
        del hop, receivers
        return x

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """Concatenate ``size`` copies of ``x``: faster than a transfer, but timed like one."""
        return jnp.concatenate([x] * self.size, axis)

    def scatter(self, x: jax.Array, axis: int) -> jax.Array:
        """Return the first of ``size`` pieces of ``x``."""
        return jax.lax.slice_in_dim(x, 0, x.shape[axis] // self.size, axis=axis)


def as_rank(rank: int, size: int, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run``, traced as on one of ``size`` GPUs: ``ring_attention(axis_name=None)``."""

    def traced(*args: Any) -> Any:
        with ExitStack() as stack:
            ring = partial(Alone, rank)
            stack.enter_context(patch.object(steps, "Ranks", lambda _, size: ring(size)))
            stack.enter_context(patch.object(attention, "axis_size", lambda _: size))
            autodiff._compiled.cache_clear()  # noqa: SLF001  # its keys do not hold ranks
            stack.callback(autodiff._compiled.cache_clear)  # noqa: SLF001 - calls are traced anew
            return run(*args)

    return traced


def share(strategy: str) -> Callable[..., Any]:
    """Return one GPU's part of causal attention over the zigzag layout, by our Triton kernels."""
    return partial(
        ring_jax_gpu.ring_attention, axis_name=None, layout="zigzag", causal=True,
        kernel="triton", strategy=strategy,
    )  # fmt: skip
