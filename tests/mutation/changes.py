"""What a mutant changes, in words that outlive its number."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Change:
    """A mutant: in which function it changes what to what."""

    function: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.function}: {self.before} -> {self.after}"


def changes(path: Path) -> dict[str, Change]:
    """Those of all mutants in a module that mutmut has written, by their names there."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and "__mutmut_" in node.name:
            _, _, number = node.name.rpartition("__mutmut_")
            found[node.name] = ast.unparse(node).replace(f"__mutmut_{number}(", "(", 1)
    result = {}
    for name, text in found.items():
        origin, _, number = name.rpartition("__mutmut_")
        if number != "orig":
            before, after = _first_difference(found[f"{origin}__mutmut_orig"], text)
            function = origin[2:].replace("ǁ", ".")  # x_function, or xǁClassǁmethod
            result[name] = Change(function, before, after)
    return result


def _first_difference(before: str, after: str) -> tuple[str, str]:
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0))[3:]
    old = " ".join(line[1:].strip() for line in lines if line.startswith("-"))
    new = " ".join(line[1:].strip() for line in lines if line.startswith("+"))
    return old, new
