"""Print how much there is to read and to run: words, lines, statements by part, tests, results.

``nox -s size`` runs it. A word is what stands between spaces, also in tables and in code of a page.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sweep import page

ROOT = Path(__file__).parents[1]
FOLDERS = ("packages", "tests", "benchmarks", "examples", "docs")
OTHERS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def words(*paths: Path) -> Counter[str]:
    """Return the number of words by file."""
    return Counter({str(x.relative_to(ROOT)): len(x.read_text().split()) for x in paths})


def nodes(folder: Path) -> Iterator[tuple[Path, ast.AST]]:
    """Yield the syntax of a folder's files of Python, each node with its file."""
    for path in folder.rglob("*.py"):
        yield from ((path.relative_to(folder), x) for x in ast.walk(ast.parse(path.read_text())))


def report() -> str:
    """Return all figures as text; cases of one test function count once."""
    read = words(ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/NOTES.md"))
    more = words(*(ROOT / name for name in OTHERS), *(ROOT / "packages").rglob("*.md"))
    built = len(page.classes(page.read()).split())
    text = [f"words in README, pages and notes  {read.total():,}, the longest:"]
    text += [f"  {name}  {count:,}" for name, count in read.most_common(5)]
    text += [f"words of the table of models, made when pages are built  {built:,}"]
    text += [f"words elsewhere  {more.total():,}"]
    for name in FOLDERS:
        lines = sum(path.read_text().count("\n") for path in (ROOT / name).rglob("*.py"))
        text += [f"lines of Python in {name}  {lines:,}"]
    for source in sorted(ROOT.glob("packages/*/src/*")):
        parts = ((x.parts[0], node) for x, node in nodes(source) if isinstance(node, ast.stmt))
        counts = Counter("at its top" if part.endswith(".py") else part for part, _ in parts)
        text += [f"statements in {source.name}  {counts.total():,}"]
        text += [f"  {part}  {count:,}" for part, count in counts.most_common()]
    functions = (x.name for _, x in nodes(ROOT / "tests") if isinstance(x, ast.FunctionDef))
    text += [f"test functions  {sum(name.startswith('test_') for name in functions):,}"]
    results = [*(ROOT / "benchmarks" / "results").iterdir()]
    return "\n".join([*text, f"files of results  {len(results)}"])


if __name__ == "__main__":
    print(report())
