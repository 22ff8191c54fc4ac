"""Print how much there is to read and to run: words, lines, statements by part, tests, results.

``nox -s size`` runs it. A word is what stands between spaces, also in tables and in code of a page.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from sweep import page

ROOT = Path(__file__).parents[1]
FOLDERS = ("packages", "tests", "benchmarks", "examples", "docs")
OTHERS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "packages")


def words(paths: Iterable[Path]) -> dict[str, int]:
    """Return the number of words by file."""
    return {str(path.relative_to(ROOT)): len(path.read_text().split()) for path in paths}


def pages() -> dict[str, int]:
    """Return the words of README, pages and notes."""
    return words([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/NOTES.md")])


def others() -> dict[str, int]:
    """Return the words of what else is written for readers of the repository."""
    files = (ROOT / name for name in OTHERS)
    return words(x for file in files for x in (file.rglob("*.md") if file.is_dir() else [file]))


def python(folder: Path) -> Iterable[Path]:
    """Return the files of Python in a folder."""
    return folder.rglob("*.py")


def lines(folder: Path) -> int:
    """Return the number of lines of Python in a folder."""
    return sum(path.read_text().count("\n") for path in python(folder))


def statements(source: Path) -> Counter[str]:
    """Return the number of statements of a package by part: a folder, or the files at its top."""
    counts: Counter[str] = Counter()
    for path in python(source):
        folder = path.relative_to(source).parts[0]
        part = "" if folder.endswith(".py") else folder
        nodes = ast.walk(ast.parse(path.read_text()))
        counts[part] += sum(isinstance(node, ast.stmt) for node in nodes)
    return counts


def tests() -> int:
    """Return the number of test functions; cases of one function count once."""
    files = (path.read_text() for path in python(ROOT / "tests"))
    nodes = (node for text in files for node in ast.walk(ast.parse(text)))
    return sum(isinstance(x, ast.FunctionDef) and x.name.startswith("test_") for x in nodes)


def report() -> str:
    """Return all figures as text."""
    read, more = pages(), others()
    longest = sorted(read.items(), key=lambda item: -item[1])[:5]
    results = list((ROOT / "benchmarks" / "results").iterdir())
    text = [f"words in README, pages and notes  {sum(read.values()):,}, the longest:"]
    text += [f"  {name}  {count:,}" for name, count in longest]
    built = len(page.classes(page.read()).split())
    text += [f"words of the table of models, made when pages are built  {built:,}"]
    text += [f"words elsewhere  {sum(more.values()):,}"]
    text += [f"lines of Python in {name}  {lines(ROOT / name):,}" for name in FOLDERS]
    for source in sorted(ROOT.glob("packages/*/src/*")):
        counts = statements(source)
        text += [f"statements in {source.name}  {counts.total():,}"]
        text += [f"  {part or 'at its top'}  {count:,}" for part, count in counts.most_common()]
    text += [f"test functions  {tests():,}", f"files of results  {len(results)}"]
    return "\n".join(text)


if __name__ == "__main__":
    print(report())
