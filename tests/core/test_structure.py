"""Docstrings begin with a sentence: CONTRIBUTING names the habit."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: First words of docstrings that are no sentence: `What is timed`, `Of a forward`.
FRAGMENTS = ("What", "Whether", "Of", "Which", "Where", "How", "As", "Those", "The same")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("folder", ["packages", "benchmarks", "examples", "tests"])
def test_docstrings_begin_with_a_sentence(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        nodes = (x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, DOCUMENTED))
        texts = [ast.get_docstring(node) or "" for node in nodes]
        assert [x for x in texts if x.startswith(tuple(f"{word} " for word in FRAGMENTS))] == [], (
            path
        )
