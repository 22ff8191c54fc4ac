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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import parts_of
from benchmarks.common.tables import table

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]

_MARKED = re.compile(r"(<!-- (table|chart) of (\S+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


#: Settings in the order of the chart, as the file names them: mask, length, query and key heads.
SETTINGS = (
    "causal 8k 32/8", "causal 32k 32/8", "causal 32k 32/32", "causal 128k 32/8", "window 128k 32/8",
    "documents 128k 32/8",
)  # fmt: skip

#: Names of methods in the chart. If several have one name, the first that was timed is drawn:
#: `auto`, or the strategy that `auto` has chosen since the file was made. On two GPUs JAX's `auto`
#: takes the ring.
METHODS = {
    "zigzag/auto/auto/auto": "Ring", "zigzag/auto/ulysses/auto": "Ring", "ring": "Ring",
    "ulysses": "Ulysses", "torch-cp": "torch", "ring-flash-attn": "ring-flash-attn",
    "yunchang": "yunchang", "all-gather cudnn": "all-gather", "zigzag cudnn": "zigzag",
}  # fmt: skip

WIDTH = 40  # characters of a bar of 1.00
EIGHTHS = " ▏▎▍▌▋▊▉"


def chart(rows: Sequence[dict[str, Any]]) -> str:
    """Return a bar of scaling efficiency for each method that was timed in a setting.

    A bar of 1.00 has ``WIDTH`` block characters, and is drawn to an eighth of one.
    """
    rates = {
        (row["setting"], row["method"]): row["both"]["tflops"] for row in rows if "both" in row
    }
    lines = []
    for setting in SETTINGS:
        head, drawn = setting, set[str]()
        for method, name in METHODS.items():
            if (setting, method) in rates and name not in drawn:
                drawn.add(name)
                efficiency = rates[setting, method] / rates[setting, "one"]
                whole, eighths = divmod(round(efficiency * WIDTH * 8), 8)
                bar = ("█" * whole + EIGHTHS[eighths]).rstrip()
                lines.append(f"{head:19}  {name:15}  {bar:{WIDTH}}  {efficiency:.2f}")
                head = ""
    return "\n".join(["```text", *lines, "```"])


def rendered(page: str) -> str:
    """Return the text of a page with every marked table and chart made anew."""

    def made(mark: re.Match[str]) -> str:
        begin, kind, file, end = mark.groups()
        name, _, part = file.partition("#")
        rows = parts_of(ROOT / name)[part]["rows"]
        return f"{begin}{table(rows) if kind == 'table' else chart(rows)}\n{end}"

    return _MARKED.sub(made, page)


def printed(path: Path) -> str:
    """Return how each part of a file of results was measured, and its table."""
    texts = []
    for part, content in parts_of(path).items():
        about = content.get("about") or content["environment"]  # of a run that nobody described
        head = f"{path.name} {part}\n$ {about['command']}\n{about.get('note', '')}"
        texts.append(f"{head}\n\n{table(content['rows'])}")
    return "\n\n".join(texts)


def main(files: Sequence[str]) -> None:
    """Print files of results, or write the pages if there are none."""
    for file in files:
        print(printed(Path(file)), end="\n\n")
    for path in () if files else PAGES:
        path.write_text(rendered(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
