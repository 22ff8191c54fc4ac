"""Write tables and charts of measurements into pages: ``python -m benchmarks.common.pages``.

A page marks the place of each, and names its result file::

    <!-- table of benchmarks/results/h200x4.json -->
    <!-- end of table -->

``python -m benchmarks.common.pages FILE ...`` prints files of results instead: the command that
measured, what has to be known beside it, and the table.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.chart import chart, legend
from benchmarks.common.report import rows_of
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
        return f"{begin}{MAKERS[what](rows_of(ROOT / file))}\n{end}"

    return MARKED.sub(made, page)


def files_shown() -> set[str]:
    """Return the files of results that some page shows."""
    return {file for page in PAGES for _, _, file, _ in MARKED.findall(page.read_text())}


def printed(path: Path) -> str:
    """Return how a file of results was measured, and its table."""
    about, rows = (json.loads(path.read_text())[key] for key in ("about", "rows"))
    return f"{path.name}\n$ {about['command']}\n{about['note']}\n\n{table(rows)}"


def main(files: Sequence[str]) -> None:
    """Print files of results, or write the pages if there are none."""
    for file in files:
        print(printed(Path(file)), end="\n\n")
    for path in () if files else PAGES:
        path.write_text(rendered(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
