"""Test selection: marks for nightly builds and for refused models, and tests of transformers.

`@pytest.mark.nightly` on a test, or as `marks` of a `pytest.param`, leaves it to nightly builds.
With names of backends it does so in their runs alone. Of a parametrized test, `unless=` lists the
ids of the parameters that run per change, and `only=` the ids of those that do not:

    @pytest.mark.nightly("jax", unless=["sinks", "bias-zigzag"])

`@pytest.mark.refused_in("5.14", "T5For", ...)` says that this release of transformers has models
which are refused: where it is installed, tests whose ids begin so have to fail.

With `--transformers` only files run that import transformers, themselves or by a module of the
tests or examples. Other releases of transformers than the pinned one are tested with these.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

#: Modules that import transformers: Ring's, and those of other packages that tests use.
_TRANSFORMERS = re.compile(r"(transformers|trl|peft|ring_torch\.hf|ring_torch\.compat\.hf)(\.|$)")
#: Imports, also within functions and in text, which tests run in other processes.
_IMPORTS = re.compile(
    r"^ *from ([\w.]+) import [(]?([\w, ]*)|^ *import ([\w.]+)|import_module\([\"']([\w.]+)|from (transformers) import",
    re.MULTILINE,
)
#: Folders from which tests import modules of this repository.
_IMPORT_ROOTS = (Path(__file__).parent, Path(__file__).parents[1] / "examples")


@cache
def imports_transformers(path: Path) -> bool:
    """Return True if a file imports transformers, or a module of tests or examples that does."""
    visited, waiting = set[Path](), {path}
    while waiting:
        visited.add(current := waiting.pop())
        names: set[str] = set()
        for module, members, *others in _IMPORTS.findall(current.read_text()):
            names |= {module, *(f"{module}.{x.strip()}" for x in members.split(",")), *others}
        if any(map(_TRANSFORMERS.match, names)):
            return True
        files = (root / f"{name.replace('.', '/')}.py" for name in names for root in _IMPORT_ROOTS)
        waiting |= {file for file in files if file.is_file()} - visited
    return False


def runs_nightly(item: pytest.Item, backend: str) -> bool:
    """Return True if the marks of a test leave it to nightly builds of this backend."""
    name = _param_id(item)
    return any(
        (not mark.args or backend in mark.args)
        and (
            name not in mark.kwargs["unless"]
            if "unless" in mark.kwargs
            else name in mark.kwargs.get("only", [name])
        )
        for mark in item.iter_markers("nightly")
    )


def check_marks(items: Iterable[pytest.Item]) -> None:
    """Raise UsageError if a mark has unknown arguments, or ids that its test does not have."""
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
    """Expect failures of tests whose models are refused in the installed transformers."""
    from ring_torch.local import LocalRankError  # other backends' tests run without torch

    installed = version("transformers")
    for item in items:
        for mark in item.iter_markers("refused_in"):
            release, *beginnings = mark.args
            of_it = installed.startswith(f"{release}.")
            if of_it and (not beginnings or _param_id(item).startswith(tuple(beginnings))):
                reason = f"transformers {release}: refused"
                # A refusal is a ValueError, or a LocalRankError about one. Others are our bugs.
                refusals = (ValueError, AssertionError, LocalRankError)
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True, raises=refusals))


def _param_id(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else str(callspec.id)
