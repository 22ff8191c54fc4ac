"""Tests that are functions of a rank."""

from __future__ import annotations

import os
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
    """End the process groups of earlier tests of this rank: each keeps a polling thread."""
    for group in [x for x in dist.distributed_c10d._world.pg_map if x is not dist.group.WORLD]:
        dist.destroy_process_group(group)


def _run(rank: int, module: str, name: str, parameters: dict[str, Any]) -> None:
    end_groups()
    function = getattr(import_module(module), name).__wrapped__
    numbered = {"rank": rank} if "rank" in signature(function).parameters else {}
    try:
        function(**numbered, **parameters)
    except pytest.fail.Exception as failure:  # "DID NOT RAISE" is no Exception: it would end a rank
        raise AssertionError(str(failure)) from failure


def of_first_rank(function: Callable[[], Any]) -> Any:
    """Return on all ranks what a function returns on the first one, which alone runs it."""
    result = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result)
    return result[0]


def be_started(rank: int, ranks: int, port: int = 0) -> None:
    """Set the variables that ``torchrun`` sets; with its store's port no process group is there."""
    if port:
        dist.destroy_process_group()  # the program makes its own
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ |= {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
