"""Shared inputs and comparisons for the tests of adapters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_meshes import close, random

from ring_core import UnsupportedError, reference
from ring_jax import ring_attention

B, T, H, K, D = 2, 16, 4, 2, 8
ONE = partial(ring_attention, axis_name=None)
IDS = np.repeat([[0, 1, 2, -1], [5, 5, 7, 9]], 4, axis=1).astype(np.int32)
SHOWN = np.arange(T) < np.array([[11], [16]])
CAUSAL = jnp.tril(jnp.ones((T, T), bool))
HIDDEN = {"bias": np.where(SHOWN, 0, -np.inf)[:, None, None].repeat(T, axis=2)}
KEY = jax.random.key(3)


QKV = (random(B, T, H, D), random(B, T, K, D, seed=1), random(B, T, K, D, seed=2))
BIAS = random(1, H, T, T, seed=4)


def dense(**options: Any) -> Any:
    return reference.attention(*map(np.asarray, QKV), **options)[0]


def compiled(function: Callable[..., Any], **arguments: Any) -> Any:
    return jax.jit(partial(function, **arguments))(*QKV)


def program(function: Callable[..., Any], **arguments: Any) -> str:
    return str(jax.make_jaxpr(partial(function, **arguments))(*QKV))


class Honoured(NamedTuple):
    """Supported arguments, and the oracle's names for them; ``None`` if they change no numbers."""

    arguments: dict[str, Any]
    oracle: dict[str, Any] | None


class Same(NamedTuple):
    """Supported arguments, and options of ours that give the same program."""

    arguments: dict[str, Any]
    options: dict[str, Any]


class Refused(NamedTuple):
    """Refused arguments, a word of advice that the error must contain, and their name in it."""

    arguments: dict[str, Any]
    advice: str
    name: str | None = None  # if it differs from the argument's


Row = Honoured | Same | Refused


def check_row(function: Callable[..., Any], name: str, row: Row, **defaults: Any) -> None:
    """Check that an argument changes the result as the oracle's does, or raises."""
    if isinstance(row, Refused):
        with pytest.raises(UnsupportedError, match=row.name or name) as caught:
            function(*QKV, **row.arguments)
        assert row.advice in str(caught.value)
    elif isinstance(row, Same):
        assert program(function, **row.arguments) == program(ONE, **row.options)
    else:
        expected = dense(**(defaults | (row.oracle or {})))
        close(function(*QKV, **row.arguments), expected)
        if row.oracle is None:
            assert program(function, **row.arguments) != program(function)
        else:
            assert np.abs(expected - dense(**defaults)).max() > 1e-3


def parameters(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    all_parameters = inspect.signature(function).parameters.values()
    return {parameter.name: (parameter.kind, parameter.default) for parameter in all_parameters}
