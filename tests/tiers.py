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

import ast
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

#: Modules that import transformers: Ring's, and those of other packages that tests use.
_TRANSFORMERS = ("transformers", "trl", "peft", "ring_torch.hf", "ring_torch.compat.hf")
#: Folders from which tests import modules of this repository.
_IMPORT_ROOTS = (Path(__file__).parent, Path(__file__).parents[1] / "examples")


def imports_transformers(path: Path) -> bool:
    """Return True if a file imports transformers, itself or by a module of the tests or examples.

    Imports within functions count, and those in text, which tests run in other processes.
    """
    visited: set[Path] = set()
    waiting = {path}
    while waiting:
        visited.add(current := waiting.pop())
        names = _imported(current)
        if any(
            name == root or name.startswith(f"{root}.") for name in names for root in _TRANSFORMERS
        ):
            return True
        files = (root / f"{name.replace('.', '/')}.py" for name in names for root in _IMPORT_ROOTS)
        waiting |= {file for file in files if file.is_file()} - visited
    return False


@cache
def _imported(path: Path) -> frozenset[str]:
    """Return names of the modules that a file imports, and of what it imports from modules."""
    return frozenset(_imports_in(ast.parse(path.read_text())))


def _imports_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module=str(module), names=aliases):
                yield module
                yield from (f"{module}.{alias.name}" for alias in aliases)
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if (
                "import_module" in ast.unparse(node.func)
            ):
                yield name
            case ast.Constant(value=str(text)) if "from transformers import" in text:
                yield "transformers"


def runs_nightly(item: pytest.Item, backend: str) -> bool:
    """Return True if the marks of a test leave it to nightly builds of this backend."""
    return any(
        (not mark.args or backend in mark.args) and _names(mark, _param_id(item))
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


def _names(mark: pytest.Mark, param_id: str) -> bool:
    unless: Collection[str] | None = mark.kwargs.get("unless")
    only: Collection[str] | None = mark.kwargs.get("only")
    if unless is not None:
        return param_id not in unless
    return only is None or param_id in only


def _param_id(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else str(callspec.id)
