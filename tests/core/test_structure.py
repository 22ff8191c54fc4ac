"""Sizes and depths of the packages' modules: CONTRIBUTING names the limits and the habits."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {path.name: path for path in ROOT.glob("packages/*/src/*") if path.is_dir()}
MOST_IN_A_CHAIN, MOST_AT_THE_TOP = 13, 20


@cache
def modules(package: str) -> dict[str, Path]:
    """Return a package's modules by name."""
    source = PACKAGES[package].parent
    files: dict[str, Path] = {}
    for path in PACKAGES[package].rglob("*.py"):
        parts = path.relative_to(source).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imported(package: str, module: str) -> Iterator[str]:
    """Return the package's modules that a module imports, also in functions and for types."""
    files = modules(package)
    for node in ast.walk(ast.parse(files[module].read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in files else node.module for name in inside]
        yield from (name for name in names if name in files and name != module)


def longest_chain(package: str) -> list[str]:
    """Return the longest chain of modules of which each imports the next."""

    @cache
    def from_module(module: str) -> list[str]:
        chains = (from_module(name) for name in set(imported(package, module)))
        return [module, *max(chains, key=len, default=[])]

    return max((from_module(module) for module in modules(package)), key=len)


@pytest.mark.parametrize("package", PACKAGES)
def test_chains_of_imports_are_short(package: str) -> None:
    chain = longest_chain(package)
    assert len(chain) <= MOST_IN_A_CHAIN, " > ".join(chain)


@pytest.mark.parametrize("package", PACKAGES)
def test_few_files_lie_at_the_top(package: str) -> None:
    assert len(list(PACKAGES[package].glob("*.py"))) <= MOST_AT_THE_TOP


FOLDERS = ("packages", "benchmarks", "examples", "tests")
#: First words of docstrings that are no sentence: `What is timed`, `Of a forward`.
FRAGMENTS = ("What", "Whether", "Of", "Which", "Where", "How", "As", "Those", "The same")


def fragments(code: str) -> Iterator[str]:
    """Yield the first lines of a file's docstrings that begin a fragment, not a sentence."""
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            first = docstring.splitlines()[0]
            if any(f"{first} ".startswith(f"{word} ") for word in FRAGMENTS):
                yield first


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_sentence(folder: str) -> None:
    found = [
        f"{path}: {line}"
        for path in (ROOT / folder).rglob("*.py")
        for line in fragments(path.read_text())
    ]
    assert found == []
