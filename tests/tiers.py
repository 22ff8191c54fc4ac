"""Marks of tests: what runs in nightly builds alone (`--all`), and what old releases are refused.

`@pytest.mark.nightly` on a test, or as `marks` of a `pytest.param`, leaves it to nightly builds.
With names of backends it does so in their runs alone. Of a parametrized test, `unless=` lists the
ids of the parameters that run per change, and `only=` the ids of those that do not:

    @pytest.mark.nightly("jax", unless=["sinks", "bias-zigzag"])

`@pytest.mark.refused_in("5.14", "T5For", ...)` says that this release of transformers has models
which are refused: where it is installed, tests whose ids begin so have to fail.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from importlib.metadata import version

import pytest


def runs_nightly(item: pytest.Item, backend: str) -> bool:
    """Return True if the marks of a test leave it to nightly builds of this backend."""
    return any(
        (not mark.args or backend in mark.args) and _names(mark, _param_id(item))
        for mark in item.iter_markers("nightly")
    )


def check_marks(items: Iterable[pytest.Item]) -> None:
    """Raise UsageError if a mark has arguments it does not know, or ids that its test has not."""
    ids: defaultdict[str, set[str]] = defaultdict(set)
    named: defaultdict[str, set[str]] = defaultdict(set)
    for item in items:
        test = item.nodeid.partition("[")[0]
        ids[test].add(_param_id(item))
        for mark in item.iter_markers("nightly"):
            if not {*mark.kwargs} < {"unless", "only"}:
                raise pytest.UsageError(
                    f"{test}: nightly takes unless= or only=, not {mark.kwargs}"
                )
            named[test].update(*mark.kwargs.values())
    for test, names in named.items():
        if unknown := names - ids[test]:
            raise pytest.UsageError(f"{test}: nightly names {sorted(unknown)}, which are no ids")


def expect_refusals(items: Iterable[pytest.Item]) -> None:
    """Expect tests of models to fail that the installed transformers has in a form refused."""
    from ring_torch.local import LocalRankError  # other backends' tests run without torch

    installed = version("transformers")
    for item in items:
        for mark in item.iter_markers("refused_in"):
            release, *beginnings = mark.args
            of_it = installed.startswith(f"{release}.")
            if of_it and (not beginnings or _param_id(item).startswith(tuple(beginnings))):
                reason = f"transformers {release}: refused"
                # A refusal is a ValueError; ranks tell of one in theirs. Other errors are ours.
                refusals = (ValueError, AssertionError, LocalRankError)
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True, raises=refusals))


def _names(mark: pytest.Mark, param_id: str) -> bool:
    unless: Collection[str] | None = mark.kwargs.get("unless")
    only: Collection[str] | None = mark.kwargs.get("only")
    if unless is not None:
        return param_id not in unless
    return only is None or param_id in only


def _param_id(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else str(callspec.id)
