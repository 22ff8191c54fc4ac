"""Tests that are functions of a rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from ring_torch.local import LocalRanks


def on_ranks(function: Callable[..., None]) -> Callable[..., None]:
    """Make a test of a function that each rank of the fixture ``pool`` runs.

    An argument ``rank`` is the rank; the others are the test's parameters.
    """
    module, name = function.__module__, function.__name__

    @wraps(function)
    def test(pool: LocalRanks, **parameters: Any) -> None:
        pool.run(_run, module, name, parameters)

    names = [x for x in signature(function).parameters.values() if x.name != "rank"]
    pool = Parameter("pool", Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = signature(function).replace(parameters=[pool, *names])  # type: ignore[attr-defined]  # for pytest
    return test


def _run(rank: int, module: str, name: str, parameters: dict[str, Any]) -> None:
    function = getattr(import_module(module), name).__wrapped__
    numbered = {"rank": rank} if "rank" in signature(function).parameters else {}
    function(**numbered, **parameters)
