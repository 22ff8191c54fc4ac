"""Write tables and charts of measurements into pages: ``python -m benchmarks.common.pages``.

A page marks the place of each, and names its result file::

    <!-- table of benchmarks/results/models.json#h200x4 -->
    <!-- end of table -->

Behind ``#`` stands a part of a file, which holds several measurements of one machine.

``python -m benchmarks.common.pages FILE ...`` prints files of results instead: the command that
measured, what has to be known beside it, and the table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.chart import chart, legend
from benchmarks.common.report import parts_of, rows_of
from benchmarks.common.tables import table

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]

MARKED = re.compile(r"(<!-- (table|chart) of (\S+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)

#: Functions that make the text of a mark, from the rows of its file.
MAKERS: dict[str, Callable[[Sequence[dict[str, Any]]], str]] = {
    "table": table,
    "chart": lambda rows: f"```text\n{chart(rows)}\n```\n\n{legend(rows)}",
}


def rendered(page: str) -> str:
    """Return the text of a page with every marked table and chart made anew."""

    def made(mark: re.Match[str]) -> str:
        begin, what, file, end = mark.groups()
        name, _, part = file.partition("#")
        return f"{begin}{MAKERS[what](rows_of(ROOT / name, part))}\n{end}"

    return MARKED.sub(made, page)


def files_shown() -> set[str]:
    """Return the files of results that some page shows."""
    marks = (mark for page in PAGES for mark in MARKED.findall(page.read_text()))
    return {file.partition("#")[0] for _, _, file, _ in marks}


def printed(path: Path) -> str:
    """Return how each part of a file of results was measured, and its table."""
    return "\n\n".join(
        f"{path.name} {part}\n$ {x['about']['command']}\n{x['about']['note']}\n\n{table(x['rows'])}"
        for part, x in parts_of(path).items()
    )


def main(files: Sequence[str]) -> None:
    """Print files of results, or write the pages if there are none."""
    for file in files:
        print(printed(Path(file)), end="\n\n")
    for path in () if files else PAGES:
        path.write_text(rendered(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
