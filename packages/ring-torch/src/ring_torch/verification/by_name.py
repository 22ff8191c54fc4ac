"""Preflight of what a function of a script returns, found by the function's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import signature
from operator import attrgetter
from typing import Any

from ring_torch.verification.preflight import preflight


def preflight_by_name(rank: int, name: str) -> tuple[bool, str]:
    """Return True if the step of a function passes, and the report's text, empty but on rank 0.

    Args:
        rank: Number of this rank.
        name: Name of the function, which returns the arguments of ``preflight``.

    Raises:
        ValueError: It does not.
    """
    arguments = function_of(name)()
    try:
        signature(preflight).bind(**arguments)
    except TypeError as error:
        what = [*arguments] if isinstance(arguments, Mapping) else type(arguments).__name__
        raise ValueError(
            f"{name} returns {what}, and has to return a dictionary of the arguments of "
            f"ring_torch.preflight, cp, step, model and batch: {error}"
        ) from None
    report = preflight(**arguments)
    return report.passed, str(report) * (not rank)


def function_of(name: str) -> Callable[[], Any]:
    """Return a function by ``MODULE:FUNCTION``.

    Raises:
        ValueError: There is none.
    """
    module, _, function = name.partition(":")
    try:
        found: Callable[[], Any] = attrgetter(function)(import_module(module))
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"{name!r} is no MODULE:FUNCTION as train:for_preflight: {error}"
        ) from None
    return found
