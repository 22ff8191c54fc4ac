"""Check plain arguments (numbers, numpy arrays, records), and name the wrong ones in errors.

Frameworks' tensors are checked in :mod:`ring_core.checks`, by their records. Here are also
decorators for functions with the options of a call, and what the rest of the package needs before
anything else: types of numpy arrays, and the size and kinds of tiles of a predicate mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, TypeGuard, cast

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

TILE = 128  # queries, and keys, of a tile of a predicate mask
EMPTY, PARTIAL, FULL = 0, 1, 2  # kinds of tiles: no query sees a key, some do, all do

SIZE_LIMIT = 1 << 40  # no length, window or position reaches this


_NUMPY = np.generic, np.ndarray


def as_python(value: Any) -> Any:
    """Return a numpy scalar, or an array without dimensions, as Python's number or text."""
    if not isinstance(value, _NUMPY) or value.ndim > 0:
        return value
    number = value.item()
    return float(number) if isinstance(number, np.floating) else number  # a long double stays one


def numbers_as_python[F: Callable[..., Any]](function: F) -> F:
    """Decorate a function, or a class, that takes numpy's scalars where it takes Python's numbers.

    So all kinds of them are one to what follows: to checks, keys of caches, and what ranks compare.
    """
    if isinstance(function, type):
        function.__init__ = numbers_as_python(function.__init__)  # type: ignore[misc]  # of a new class
        return function

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, _NUMPY):
                return function(
                    *map(as_python, args), **{name: as_python(x) for name, x in kwargs.items()}
                )
        return function(*args, **kwargs)

    return cast("F", call)


def is_integer(value: object) -> TypeGuard[int | np.integer]:
    """Return True for a Python or numpy integer; a boolean is none."""
    value = as_python(value)
    return isinstance(value, int) and not isinstance(value, bool)


def describe_value(value: object) -> str:
    """Return a wrong argument as messages show it: arrays by type and shape, the rest by repr."""
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"a {type(value).__name__} of shape {list(shape)}"


def check_size(name: str, value: Any, *, low: int = 1, high: int = SIZE_LIMIT) -> int:
    """Check that an argument is an integer in ``[low, high)``, and return it as Python's ``int``.

    Raises:
        ValueError: It is no integer, or out of range; the message begins with ``name``.
    """
    if not is_integer(value) or value < low:
        raise ValueError(
            f"{name} must be at least {low}, and an integer, got {describe_value(value)}"
        )
    if value >= high:
        raise ValueError(f"{name} must be an integer below {high}, got {value!r}")
    return int(value)


def check_index(name: str, value: Any, size: int) -> None:
    """Check that an argument is an integer in ``[0, size)``.

    Raises:
        ValueError: It is no integer, or out of range; the message begins with ``name``.
    """
    if type(value) is int and 0 <= value < size:  # quick, for loops that ask for items
        return
    if not is_integer(value) or not 0 <= value < size:
        raise ValueError(f"{name} must be in 0..{size - 1}, got {value!r}")


def check_rate(name: str, value: Any, *, zero: bool = False) -> None:
    """Check that an argument is a finite number above zero, or with ``zero=True`` not below it.

    Raises:
        ValueError: It is not; the message begins with ``name``.
    """
    number = as_python(value)
    real = isinstance(number, int | float) and not isinstance(number, bool)
    if not real or not (value > 0 or (zero and value == 0)) or not is_finite(value):
        raise ValueError(
            f"{name} must {'not be negative' if zero else 'be positive'}, and a finite number, got "
            f"{value!r}"
        )


def is_finite(value: float) -> bool:
    """Return True if a number is finite once it is a float: ``10**400`` is not."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond floats
        return False


def check_kind(name: str, value: object, kind: type) -> None:
    """Check that an argument is an instance of a class.

    Raises:
        ValueError: It is not; the message begins with ``name``.
    """
    if not isinstance(value, kind):
        actual = value.__name__ if isinstance(value, type) else type(value).__name__
        raise ValueError(f"{name} must be a {kind.__name__}, got {actual}")


def as_floats(name: str, value: Any, shape: Sequence[int] | None = None) -> Floats:
    """Return an array of real numbers as float64, of exactly ``shape`` if that is given.

    Raises:
        ValueError: It is no array of real numbers, or has another shape.
    """
    array = _as_array(name, value)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise ValueError(f"{name} must be an array of real numbers, got one of {array.dtype}")
    if shape is not None and array.shape != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {array.shape}")
    return array.astype(np.float64, copy=False)


def as_ints(name: str, value: Any) -> Ints:
    """Return an array of integers as int64.

    Raises:
        ValueError: It is no array of integers.
    """
    array = _as_array(name, value)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be an array of integers, got one of {array.dtype}")
    return array.astype(np.int64, copy=False)


def as_positions(name: str, value: Any) -> Ints:
    """Return a one-dimensional array of integers as int64.

    Raises:
        ValueError: It has another number of dimensions, or numbers that are no integers.
    """
    array = as_ints(name, value)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one row of integers, got shape {array.shape}")
    return array


def check_floats(name: str, value: Any) -> None:
    """Check that an argument is a numpy array of floats (numpy has no bfloat16).

    Raises:
        ValueError: It is not; the message begins with ``name``.
    """
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        actual = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"{name} must be a numpy array of floats, got {actual}")


def _as_array(name: str, value: Any) -> npt.NDArray[Any]:
    """Return an argument as a numpy array, or raise a ``ValueError`` with its name."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be an array: {error}") from error


def check_flag(name: str, value: object) -> None:
    """Check that an option that switches something is ``True`` or ``False``.

    Raises:
        ValueError: It is neither, for example 1.
    """
    if not isinstance(as_python(value), bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Check that an option that names something is one of the known names.

    Raises:
        ValueError: It is not; the message lists the names.
    """
    if not any(type(value) is type(name) and value == name for name in known):
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(known)}")


def check_scale(softmax_scale: float | None, head_dim: int) -> float:
    """Return the scale of the scores as a float; ``head_dim ** -0.5`` by default.

    Raises:
        ValueError: It is no finite number.
    """
    if softmax_scale is None:
        return float(head_dim**-0.5)
    if not _is_real(softmax_scale):
        raise ValueError(f"softmax_scale must be a finite number or None, got {softmax_scale!r}")
    return float(softmax_scale)


def check_softcap(softcap: float | None) -> float | None:
    """Return the soft cap of the scores as a float, or ``None``.

    Raises:
        ValueError: It is no finite number above 0.
    """
    if softcap is not None and (not _is_real(softcap) or softcap <= 0):
        raise ValueError(f"softcap must be a finite number > 0 or None, got {softcap!r}")
    return None if softcap is None else float(softcap)


def check_dropout(dropout_p: float, dropout_seed: int | None) -> None:
    """Check dropout's probability, and that there is a seed where it is not 0.

    Raises:
        ValueError: ``dropout_p`` is not in ``[0, 1)``, or the seed is missing.
    """
    if not _is_real(dropout_p) or not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p!r}")
    if round(dropout_p * 2**32) == 2**32:
        raise ValueError(
            f"dropout_p={dropout_p!r} drops every weight: it is compared with random words of 32 bits, "
            f"so the largest is 1 - 2**-32"
        )
    if dropout_p > 0 and dropout_seed is None:
        raise ValueError(
            f"dropout_p={dropout_p} needs dropout_seed, an integer that is the same on every rank and new "
            f"in every call, so that all ranks drop the same elements"
        )


def check_seed(dropout_seed: int | None) -> None:
    """Check that dropout's seed is ``None`` or an integer in ``[0, 2**64)``.

    Traced seeds are checked elsewhere.

    Raises:
        ValueError: It is neither, or outside of this range.
    """
    if dropout_seed is not None and (
        not is_integer(dropout_seed) or not 0 <= as_python(dropout_seed) < 2**64
    ):
        raise ValueError(f"dropout_seed must be an integer in [0, 2**64), got {dropout_seed!r}")


def _is_real(value: object) -> bool:
    """Return True for a finite real number; a boolean is none."""
    number = as_python(value)
    return isinstance(number, int | float) and not isinstance(number, bool) and is_finite(number)


def with_options_of[F: Callable[..., object]](function: Callable[..., object]) -> Callable[[F], F]:
    """Make a decorator that shows a function's options in the signature of a method.

    The method takes them as ``**options``, which ``help()`` and editors would show instead.
    Keywords before the first option, ``seq_len``, such as the process group, are left out: the
    method fills them in itself.
    """
    params = [x for x in signature(function).parameters.values() if x.kind is x.KEYWORD_ONLY]
    options = params[[x.name for x in params].index("seq_len") :]

    def with_options(method: F) -> F:
        """Set the signature of ``method``: its own positional parameters, then the options."""
        method_signature = signature(method)
        positional = [
            x for x in method_signature.parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD
        ]
        method.__signature__ = method_signature.replace(  # type: ignore[attr-defined]  # read by inspect
            parameters=[*positional, *options]
        )
        return method

    return with_options


_KEY_MASK = "use segment_ids, int32 [B, T_local], -1 for padding"
_WINDOW = "use window=(left, right), where None is unbounded and never -1"
_LENGTHS = "leave it out: lengths follow from cu_seqlens"
_DROPOUT = "use dropout_p and dropout_seed"
#: Options of SDPA, flash-attn, TransformerEngine, Flax and others, and the advice what to use here.
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
    """Refuse keywords that other attention libraries use, naming the option that Ring has instead.

    Raises:
        ValueError: One of the names is such a keyword, for example SDPA's ``attn_mask``.
    """
    foreign = [name for name in names if name in FOREIGN_OPTIONS]
    if foreign:
        advice = "; ".join(f"for {name}, {FOREIGN_OPTIONS[name]}" for name in foreign)
        raise ValueError(f"no option is called {' or '.join(foreign)}. Instead: {advice}")


def refuse_foreign_options[F: Callable[..., object]](function: F) -> F:
    """Decorate a function so that keywords of other attention libraries raise a helpful error.

    See :func:`check_foreign_options`. The function's signature stays, and a keyword that no library
    has is a ``TypeError`` as Python's own, by this function's name, whatever it passes options to.
    Options take numpy's scalars, as with :func:`numbers_as_python`, but for the seed: to a compiler
    it is a number that changes.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> object:
        # No call of another function where none is foreign or numpy's: this is a hot path.
        for name, value in kwargs.items():
            if name in FOREIGN_OPTIONS:
                check_foreign_options(kwargs)
            if isinstance(value, _NUMPY) and name != "dropout_seed":
                kwargs = {n: x if n == "dropout_seed" else as_python(x) for n, x in kwargs.items()}
                break
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            known = signature(function).parameters
            for name in kwargs:
                if name not in known:
                    near = get_close_matches(name, known, 1)
                    raise TypeError(
                        f"{function.__name__}() got an unexpected keyword argument {name!r}"
                        f"{f'. Did you mean {near[0]!r}?' if near else ''}"
                    ) from error
            raise

    return cast("F", call)


def not_none[T](x: T | None) -> T:
    """Return ``x``, which by the caller's logic is never ``None``: for the type checker."""
    assert x is not None
    return x
