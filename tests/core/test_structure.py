"""Sizes and depths of the packages' modules: CONTRIBUTING names the limits and the habits."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {path.name: path for path in ROOT.glob("packages/*/src/*") if path.is_dir()}
MOST_IN_A_CHAIN, MOST_AT_THE_TOP = 13, 20
#: Soft limits: longer files and functions are listed in a warning.
USUAL_LINES, USUAL_LINES_OF_A_FUNCTION = 400, 60
#: Kernels are often longer, and are not listed.
KERNELS = ("ring_core/triton/", "ring_jax_gpu/", "ring_jax_tpu/", "/kernels/")


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


def lines_of(function: ast.FunctionDef) -> int:
    """Count a function's own lines, without signature, docstring and nested functions."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    inner = [x for x in body if isinstance(x, ast.FunctionDef)]
    if not body:
        return 0
    return span(body[0], body[-1]) - sum(span(x, x) for x in inner)


def span(first: ast.stmt, last: ast.stmt) -> int:
    """Count the lines from the first statement's first to the last statement's last."""
    return (last.end_lineno or last.lineno) - first.lineno + 1


@pytest.mark.parametrize("package", PACKAGES)
def test_chains_of_imports_are_short(package: str) -> None:
    chain = longest_chain(package)
    assert len(chain) <= MOST_IN_A_CHAIN, " > ".join(chain)


@pytest.mark.parametrize("package", PACKAGES)
def test_few_files_lie_at_the_top(package: str) -> None:
    assert len(list(PACKAGES[package].glob("*.py"))) <= MOST_AT_THE_TOP


def long_parts(source: Path) -> Iterator[str]:
    """Describe a file, and each function in it, that is longer than usual."""
    text = source.read_text()
    if text.count("\n") > USUAL_LINES:
        yield f"{source}: {text.count('\n')} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and lines_of(node) > USUAL_LINES_OF_A_FUNCTION:
            yield f"{source}: {node.name} has {lines_of(node)} lines"


@pytest.mark.filterwarnings("default:longer than usual")
@pytest.mark.parametrize("package", PACKAGES)
def test_long_files_and_functions_are_listed(package: str) -> None:
    long = [
        line for path in modules(package).values()
        if not any(word in path.as_posix() for word in KERNELS) for line in long_parts(path)
    ]  # fmt: skip
    if long:
        warnings.warn("longer than usual: " + "; ".join(long), stacklevel=1)


def test_what_is_longer_than_usual_is_described(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("def short():\n    return 1\n" * 10)
    assert not list(long_parts(source))
    source.write_text("def long():\n" + "    print()\n" * 401)
    assert list(long_parts(source)) == [
        f"{source}: 402 lines", f"{source}: long has 401 lines",
    ]  # fmt: skip


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


def test_fragments_are_found() -> None:
    code = 'def f():\n    """Of a forward."""\nclass A:\n    """Offsets of tokens."""\n'
    assert list(fragments(code)) == ["Of a forward."]
