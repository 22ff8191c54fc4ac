"""Checks of the arguments of recurrent layers, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from math import inf
from typing import Any, Literal, Protocol, TypedDict

import torch
from torch import Tensor

from ring_core.base.arguments import as_python, is_finite
from ring_core.checks import FLOATS, check_flag
from ring_torch.sharding import Sharding
from ring_torch.tensor_specs import check_local

KernelName = Literal["auto", "eager", "fla", "triton"]


class SplitsSequences(Protocol):
    """Object that splits sequences over ranks, as a ``ContextParallel`` does."""

    @property
    def _sharding(self) -> Sharding:
        """Sharding of the code that runs."""


class StateOptions(TypedDict, total=False):
    """Options of :func:`~ring_torch.recurrent.linear_recurrence`, for type checkers."""

    initial_state: Tensor | None
    cu_seqlens: Sequence[int] | None
    seq_len: int | None


class LinearOptions(StateOptions, total=False):
    """Options of layers with queries, keys and values, for type checkers."""

    scale: float | None
    use_qk_l2norm: bool
    kernel: KernelName


class SsdOptions(TypedDict, total=False):
    """Options of :func:`~ring_torch.recurrent.ssd`, for type checkers."""

    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    dt_softplus: bool
    dt_limit: tuple[float, float]
    initial_states: Tensor | None
    cu_seqlens: Sequence[int] | None
    seq_len: int | None
    kernel: KernelName


def sharding_of(cp: SplitsSequences) -> Sharding:
    """Return the sharding of a ``ContextParallel``.

    Raises:
        ValueError: It is something else.
    """
    sharding = getattr(cp, "_sharding", None)
    if not isinstance(sharding, Sharding):
        raise ValueError(f"cp must be a ContextParallel, got {type(cp).__name__}")
    return sharding


def sizes_of(
    required: dict[str, Tensor], axes: dict[str, tuple[str, ...]],
    groups: tuple[str, str] = ("H", "HV"), **optional: Tensor | None,
) -> dict[str, int]:  # fmt: skip
    """Check tensors, and return the size of each axis by its name.

    Args:
        required: Tensors by their names.
        axes: Names of each tensor's axes.
        groups: Axes of which the first divides the second, if there are such.
        **optional: Tensors that may be ``None``.

    Raises:
        ValueError: One is no dense tensor of floating point, on another device than the first, or
            its shape does not fit the others'; or heads of keys do not divide those of values.
    """
    sizes: dict[str, int] = {}
    device: torch.device | None = None
    given = {name: x for name, x in optional.items() if x is not None}
    for name, x in {**required, **given}.items():
        check_tensor(name, x)
        device = x.device if device is None else device
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, and others on {device}: move one")
        expected = [sizes.get(axis, n) for axis, n in zip(axes[name], x.shape, strict=False)]
        if x.ndim != len(axes[name]) or list(x.shape) != expected:
            raise ValueError(
                f"{name} must be [{', '.join(axes[name])}], got {list(x.shape)} beside "
                f"{', '.join(f'{axis}={n}' for axis, n in sizes.items())}"
            )
        sizes |= zip(axes[name], x.shape, strict=True)
    if any(n == 0 for n in sizes.values()):
        raise ValueError(f"no axis may be empty, got {sizes}")
    few, many = groups
    if few in sizes and sizes[many] % sizes[few]:
        raise ValueError(
            f"{many}, the {sizes[many]} heads or channels of values, must be a multiple of {few}, the "
            f"{sizes[few]} of keys"
        )
    return sizes


def check_tensor(name: str, x: object) -> None:
    """Check that an argument is a dense tensor of this rank's own, of floating point."""
    dtype = check_local(name, x, has_numbers=True).dtype
    if str(dtype).removeprefix("torch.") not in FLOATS:
        raise ValueError(f"{name} must be {', '.join(FLOATS[:-1])} or {FLOATS[-1]}, got {dtype}")


def checked_flag(name: str, value: bool) -> bool:
    """Return an option that switches something, as Python's ``bool``."""
    check_flag(name, value)
    return bool(value)


def checked_real(name: str, value: object, *, infinite: bool = False) -> float:
    """Return an option that is a number as Python's ``float``.

    Raises:
        ValueError: It is none, NaN, or infinite where that is not allowed.
    """
    number = as_python(value)
    if isinstance(number, int | float) and not isinstance(number, bool):
        if is_finite(number):
            return float(number)
        if infinite and number in (inf, -inf):
            return float(number)
    raise ValueError(f"{name} must be a finite number, got {value!r}")


class Explained(Exception):  # noqa: N818 - no error: it ends a call that is only described
    """The text of a call that would be made, raised in its place.

    Args:
        text: The text.
        sent: Bytes that a rank sends to each other in the forward.
    """

    def __init__(self, text: str, sent: int) -> None:
        super().__init__(text)
        self.sent = sent


#: True while a call is only described.
EXPLAINS: ContextVar[bool] = ContextVar("ring_torch.recurrent.explains", default=False)


def explains() -> bool:
    """Return True while a layer is explained, and computes nothing; never in a compiled graph."""
    # Torch 2.11's compiler knows no context variables.
    return not torch.compiler.is_compiling() and EXPLAINS.get()


def explained(
    function: Callable[..., Any], cp: SplitsSequences, *args: Any, **kwargs: Any
) -> Explained:
    """Return what a recurrent layer would do with these arguments; nothing is sent or computed."""
    token = EXPLAINS.set(True)
    try:
        function(cp, *args, **kwargs)
    except Explained as call:
        return call
    finally:
        EXPLAINS.reset(token)
    raise AssertionError("a layer describes its call")
