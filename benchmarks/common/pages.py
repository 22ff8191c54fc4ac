"""Write tables and charts of measurements into pages: ``python -m benchmarks.common.pages``.

A page marks the place of each, and names its result file::

    <!-- table of benchmarks/results/h200x4.json -->
    <!-- end of table -->
"""

from __future__ import annotations

import re
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


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(rendered(path.read_text()))
