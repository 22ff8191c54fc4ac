"""Checks of plain arguments: numbers, numpy arrays, records. Wrong ones are named.

Frameworks' tensors are checked in :mod:`ring_core.checks`, by their records. Types of numpy arrays
are here too, and the tiles of a predicate mask: their side, and what they show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, cast

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

TILE = 128
EMPTY, PARTIAL, FULL = 0, 1, 2

SIZE_LIMIT = 1 << 40  # no length, window or position reaches this


def is_integer(value: object) -> bool:
    """Whether it is a whole number, Python's or numpy's, and no flag."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def describe_value(value: object) -> str:
    """Return a wrong argument as a message shows it: arrays by type and shape, the rest by repr."""
    shape = getattr(value, "shape", None)
    if shape is None:
        return repr(value)
    return f"a {type(value).__name__} of shape {list(shape)}"


def check_size(name: str, value: Any, *, low: int = 1, high: int = SIZE_LIMIT) -> int:
    """A whole number in ``[low, high)``, as Python's.

    Raises:
        ValueError: It is not.
    """
    if not is_integer(value) or value < low:
        raise ValueError(
            f"{name} must be at least {low}, and an integer, got {describe_value(value)}"
        )
    if value >= high:
        raise ValueError(f"{name} must be an integer below {high}, got {value!r}")
    return int(value)


def check_index(name: str, value: Any, size: int) -> None:
    """A whole number in ``[0, size)``.

    Raises:
        ValueError: It is not.
    """
    if type(value) is int and 0 <= value < size:  # quick, for loops that ask for items
        return
    if not is_integer(value) or not 0 <= value < size:
        raise ValueError(f"{name} must be in 0..{size - 1}, got {value!r}")


def check_rate(name: str, value: Any, *, zero: bool = False) -> None:
    """A finite number above zero, or at least zero.

    Raises:
        ValueError: It is not.
    """
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not real or not (value > 0 or (zero and value == 0)) or not is_finite(value):
        raise ValueError(
            f"{name} must {'not be negative' if zero else 'be positive'}, and a finite number, got "
            f"{value!r}"
        )


def is_finite(value: float) -> bool:
    """Whether a number is finite as a float."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond floats
        return False


def check_kind(name: str, value: object, kind: type) -> None:
    """A value of a type.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(value, kind):
        got = value.__name__ if isinstance(value, type) else type(value).__name__
        raise ValueError(f"{name} must be a {kind.__name__}, got {got}")


def check_text(name: str, value: object) -> None:
    """Words.

    Raises:
        ValueError: They are none.
    """
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {value!r}")


def as_floats(name: str, value: Any, shape: Sequence[int] | None = None) -> Floats:
    """An array of real numbers as float64, of a shape if one is given.

    Raises:
        ValueError: It is not.
    """
    array = _as_array(name, value)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise ValueError(f"{name} must be an array of real numbers, got one of {array.dtype}")
    if shape is not None and array.shape != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {array.shape}")
    return array.astype(np.float64, copy=False)


def as_ints(name: str, value: Any) -> Ints:
    """An array of whole numbers as int64.

    Raises:
        ValueError: It is not.
    """
    array = _as_array(name, value)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be an array of integers, got one of {array.dtype}")
    return array.astype(np.int64, copy=False)


def as_positions(name: str, value: Any) -> Ints:
    """A row of whole numbers.

    Raises:
        ValueError: It is not.
    """
    array = as_ints(name, value)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one row of integers, got shape {array.shape}")
    return array


def check_floats(name: str, value: Any) -> None:
    """A numpy array of floats.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        got = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"{name} must be a numpy array of floats, got {got}")


def _as_array(name: str, value: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be an array: {error}") from error


def check_flag(name: str, value: object) -> None:
    """Options that switch something are booleans."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Options that name something are one of the known names."""
    if not any(type(value) is type(name) and value == name for name in known):
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(known)}")


def with_options_of[F: Callable[..., object]](function: Callable[..., object]) -> Callable[[F], F]:
    """Show in a method's signature, in place of ``**options``, the keywords of a function.

    Those before its first option, ``causal``, say where the function runs: the method knows that.
    """
    params = [x for x in signature(function).parameters.values() if x.kind is x.KEYWORD_ONLY]
    options = params[[x.name for x in params].index("causal") :]

    def shown(method: F) -> F:
        own = signature(method)
        first = [x for x in own.parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
        method.__signature__ = own.replace(parameters=[*first, *options])  # type: ignore[attr-defined]
        return method

    return shown


_KEY_MASK = "use segment_ids, int32 [B, T_local], -1 for padding"
_WINDOW = "use window=(left, right), where None is unbounded and never -1"
_LENGTHS = "leave it out: lengths follow from cu_seqlens"
_DROPOUT = "use dropout_p and dropout_seed"
#: Options of SDPA, flash-attn, TransformerEngine, Flax and others, and what says the same here.
FOREIGN_OPTIONS = {
    "attn_mask": (
        "use mask, booleans or a ring_core.Mask; numbers to be added to the scores are a bias, and "
        "a key mask [B, 1, 1, T] is segment_ids, int32 [B, T_local], -1 for padding"
    ),
    "attention_mask": f"{_KEY_MASK}; one that has a row for each query is a mask or bias",
    "key_padding_mask": _KEY_MASK,
    "attn_bias": "use bias",
    "attention_bias": "use bias",
    "is_causal": "use causal",
    "enable_gqa": "leave it out: K and V may always have fewer heads than Q",
    "scale": "use softmax_scale",
    "sm_scale": "use softmax_scale",
    "scaling": "use softmax_scale",
    "dropout": _DROPOUT,
    "dropout_rate": _DROPOUT,
    "attention_dropout": _DROPOUT,
    "sliding_window": f"{_WINDOW}; the last W tokens, itself included, are window=(W - 1, 0)",
    "window_size": _WINDOW,
    "local_window_size": _WINDOW,
    "logits_soft_cap": "use softcap",
    "logit_cap": "use softcap",
    "soft_cap": "use softcap",
    "s_aux": "use sinks",
    "softmax_aux": "use sinks",
    "learnable_sink": "use sinks",
    "slopes": "use alibi_slopes",
    "cu_seqlens_q": "use cu_seqlens, a tuple for queries and keys alike",
    "cu_seqlens_k": "use cu_seqlens, a tuple for queries and keys alike",
    "max_seqlen_q": _LENGTHS,
    "max_seqlen_k": _LENGTHS,
    "q_segment_ids": "use segment_ids, which may be a pair (queries', keys')",
    "kv_segment_ids": "use segment_ids, which may be a pair (queries', keys')",
    "block_mask": "use mask=ring_core.Mask(predicate=...)",
    "mask_mod": "use mask=ring_core.Mask(predicate=...)",
    "return_softmax_lse": "use return_lse",
    "return_attn_probs": "use return_lse; probabilities are never formed",
    "return_residual": "use return_lse",
    "implementation": "use kernel",
}


def check_foreign_options(names: Iterable[str]) -> None:
    """Refuse the options of other libraries by the names that they have here.

    Raises:
        ValueError: One of the names is that of such an option.
    """
    foreign = [name for name in names if name in FOREIGN_OPTIONS]
    if foreign:
        advice = "; ".join(f"for {name}, {FOREIGN_OPTIONS[name]}" for name in foreign)
        raise ValueError(f"no option is called {' or '.join(foreign)}. Instead: {advice}")


def refuse_foreign_options[F: Callable[..., object]](function: F) -> F:
    """Make a function refuse the options of other libraries in words that name those here.

    Its signature stays; a keyword that no library has stays Python's ``TypeError``.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> object:
        for name in kwargs:  # no call of another function where none is foreign: this is a hot path
            if name in FOREIGN_OPTIONS:
                check_foreign_options(kwargs)
        return function(*args, **kwargs)

    return cast("F", call)


def not_none[T](x: T | None) -> T:
    """What cannot be ``None`` here."""
    assert x is not None
    return x
