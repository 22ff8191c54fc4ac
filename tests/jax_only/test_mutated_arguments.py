"""Arguments changed in place between two calls: the second call sees the new values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from ring_core import Mask
from ring_jax import ContextParallel, ring_attention
from ring_jax.compat import flash_attention
from ring_jax.nn import make_dot_product_attention

T = 24
KINDS: dict[str, Callable[[Any], Any]] = {
    "ndarray": lambda values: _narrow(np.array(values)),
    "list": list,
    "tuple of arrays": lambda values: tuple(np.array(value) for value in values),
}
#: Two values of each argument that can be changed in place.
VALUES: dict[str, tuple[Any, Any]] = {
    "cu_seqlens": ((0, 6, T), (0, 16, T)),
    "window": ((3, 0), (5, 0)),
    "segment_ids": ([[0] * T], [[0] * 9 + [1] * 15]),
    "bias": ([[[[0.0] * T] * T]], [[[[0.0, 1.0] * (T // 2)] * T]]),
    "sinks": ([0.0, 0.0], [1.0, 2.0]),
    "alibi_slopes": ([0.0, 0.0], [0.5, 0.25]),
    "dropout_seed": (3, 4),
}
STATIC = {"cu_seqlens": tuple(KINDS), "window": ("list",)}
OURS = STATIC | dict.fromkeys(
    ("segment_ids", "bias", "sinks", "alibi_slopes", "dropout_seed"), ("ndarray",)
)


def _narrow(x: Any) -> Any:
    return x.astype({"f": np.float32, "i": np.int32}.get(x.dtype.kind, x.dtype))


def _qkv() -> Any:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((1, T, 2, 8), dtype=np.float32) for _ in range(3))


def _options(argument: str, argument_value: Any) -> dict[str, Any]:
    return {argument: argument_value} | ({"dropout_p": 0.5} if argument == "dropout_seed" else {})


def _alone(argument: str, argument_value: Any) -> Any:
    return ring_attention(*_qkv(), axis_name=None, **_options(argument, argument_value))


def _two() -> ContextParallel:
    return ContextParallel(jax.make_mesh((2,), ("cp",), devices=jax.devices()[:2]), "cp")


def _of_an_object(argument: str, argument_value: Any) -> Any:
    return _two().attention(*_qkv(), causal=True, **_options(argument, argument_value))


def _explained(argument: str, argument_value: Any) -> str:
    return str(_two().explain(*_qkv(), **_options(argument, argument_value)))


def _of_a_mask(argument: str, argument_value: Any) -> Any:
    mask: Any = Mask
    return ring_attention(*_qkv(), axis_name=None, mask=mask(**{argument: argument_value}))


def _as_flash_attention(argument: str, argument_value: Any) -> Any:
    documents: Any = {"cum_seqlens_q": argument_value, "cum_seqlens_k": argument_value}
    options = documents if argument == "cu_seqlens" else {"sliding_window": argument_value}
    return flash_attention(*_qkv(), **options)


def _as_jax(_: str, argument_value: Any) -> Any:
    attend = make_dot_product_attention(_two().attention)
    return attend(*_qkv(), bias=argument_value)


FUNCTIONS: dict[str, tuple[Callable[[str, Any], Any], dict[str, tuple[str, ...]]]] = {
    "ring_attention": (_alone, OURS),
    "ContextParallel.attention": (_of_an_object, OURS),
    "ContextParallel.explain": (_explained, STATIC),
    "Mask": (_of_a_mask, STATIC),
    "compat.flash_attention": (_as_flash_attention, {"cu_seqlens": ("ndarray",), "window": ("list",)}),
    "nn": (_as_jax, {"bias": ("ndarray",)}),
}  # fmt: skip
CASES = [
    (name, argument, kind)
    for name, (_, arguments) in FUNCTIONS.items()
    for argument, kinds in arguments.items()
    for kind in kinds
]


def _change(argument_value: Any, values: Any) -> None:
    if isinstance(argument_value, np.ndarray):
        argument_value[...] = values
        return
    for n, value in enumerate(values):
        if isinstance(argument_value, tuple):
            argument_value[n][...] = value
        else:
            argument_value[n] = value


@pytest.mark.nightly(  # calls of the function change the other arguments per change
    only=[
        f"ContextParallel.attention-{x}-ndarray" for x in ("bias", "alibi_slopes", "dropout_seed")
    ]
)
@pytest.mark.parametrize(("name", "argument", "kind"), CASES)
def test_changed_in_place(name: str, argument: str, kind: str) -> None:
    function, (first, second) = FUNCTIONS[name][0], VALUES[argument]
    argument_value = KINDS[kind](first)
    results = [np.asarray(function(argument, argument_value))]
    _change(argument_value, second)
    results.append(np.asarray(function(argument, argument_value)))
    for result, value in zip(results, (first, second), strict=True):
        np.testing.assert_array_equal(result, function(argument, KINDS[kind](value)))
    is_text = results[0].dtype.kind == "U"  # numbers are the same
    assert is_text or not np.array_equal(results[0], results[1])
