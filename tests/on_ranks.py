"""Tests that are functions of a rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import pytest
from torch import distributed as dist


def on_ranks(function: Callable[..., None], *, ranks: int | None = None) -> Callable[..., None]:
    """Make a test of a function that each rank of the fixture ``pool`` runs, or so many ranks.

    An argument ``rank`` is the rank; the others are the test's parameters.
    """
    module, name = function.__module__, function.__name__
    fixture = "pool" if ranks is None else "pools"

    @wraps(function)
    def test(**parameters: Any) -> None:
        pool = parameters.pop(fixture)
        (pool if ranks is None else pool[ranks]).run(_run, module, name, parameters)

    names = [x for x in signature(function).parameters.values() if x.name != "rank"]
    names.append(Parameter(fixture, Parameter.POSITIONAL_OR_KEYWORD))
    test.__signature__ = signature(function).replace(parameters=names)  # type: ignore[attr-defined]  # for pytest
    return test


on_two_ranks, on_three_ranks, on_four_ranks = (partial(on_ranks, ranks=n) for n in (2, 3, 4))


def end_groups() -> None:
    """End the process groups that earlier tests of this rank have made: each keeps a polling thread."""
    for group in [x for x in dist.distributed_c10d._world.pg_map if x is not dist.group.WORLD]:  # noqa: SLF001 - torch has no other list
        dist.destroy_process_group(group)


def _run(rank: int, module: str, name: str, parameters: dict[str, Any]) -> None:
    end_groups()
    function = getattr(import_module(module), name).__wrapped__
    numbered = {"rank": rank} if "rank" in signature(function).parameters else {}
    try:
        function(**numbered, **parameters)
    except pytest.fail.Exception as failure:  # "DID NOT RAISE" is no Exception: it would end a rank
        raise AssertionError(str(failure)) from failure
