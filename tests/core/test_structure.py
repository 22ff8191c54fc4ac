"""Docstrings begin with a sentence: CONTRIBUTING names the habit."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
