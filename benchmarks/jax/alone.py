"""A ring without its communication: one GPU emulates its ranks, one after the other."""

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
    """A :class:`ring_jax.collectives.Ranks` that moves nothing: any keys do for a time."""

    place: int
    size: int

    def rank(self) -> jax.Array:
        """Whose turn it is."""
        return jnp.int32(self.place)

    def move[T](self, x: T, hop: int, receivers: Sequence[int] | None = None) -> T:
        """What arrives is what was sent."""
        del hop, receivers
        return x

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """As many copies: less time than the transfer, but on the clock."""
        return jnp.concatenate([x] * self.size, axis)

    def scatter(self, x: jax.Array, axis: int) -> jax.Array:
        """One piece."""
        return jax.lax.slice_in_dim(x, 0, x.shape[axis] // self.size, axis=axis)


def as_rank(rank: int, size: int, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is traced as on one of so many GPUs: ``ring_attention(axis_name=None)``."""

    def traced(*args: Any) -> Any:
        with ExitStack() as stack:
            ring = partial(Alone, rank)
            stack.enter_context(patch.object(steps, "Ranks", lambda _, size: ring(size)))
            stack.enter_context(patch.object(attention, "axis_size", lambda _: size))
            autodiff._compiled.cache_clear()  # noqa: SLF001  # it does not know of ranks
            stack.callback(autodiff._compiled.cache_clear)  # noqa: SLF001 - times first calls
            return run(*args)

    return traced


def share(strategy: str) -> Callable[..., Any]:
    """What a GPU does of causal attention over the zigzag layout."""
    return partial(
        ring_jax_gpu.ring_attention, axis_name=None, layout="zigzag", causal=True,
        kernel="triton", strategy=strategy,
    )  # fmt: skip
