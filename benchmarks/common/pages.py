"""Write tables and charts of measurements into pages: ``python -m benchmarks.common.pages``.

A page marks the place of each, and names its result file::

    <!-- table of benchmarks/results/models.json#h200x4 -->
    <!-- end of table -->

Behind ``#`` stands a part of a file, which holds several measurements of one machine.

``python -m benchmarks.common.pages FILE ...`` prints files of results instead: the command that
measured, what has to be known beside it, and the table.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.cases import OURS, PASSES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
MOST_COLUMNS = 7
#: Keys that are not shown: errors that were allowed, and figures of which others are the summary.
NOT_SHOWN = ("errors", "error", "of_ranks", "each", "losses", "rounds")
IN_LAYERS = "/layers"  # at its end: one of several calls in a row, as a model's layers make
STRATEGIES = ("gather", "ring", "ulysses", "hybrid")
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
WIDTH, EIGHTHS = 40, " ▏▎▍▌▋▊▉"  # characters of a bar of 1.00, and parts of one
Row = dict[str, Any]


def parts_of(path: Path) -> dict[str, Row]:
    """Return the parts of a result file by name: several measurements of one machine, or one."""
    file = json.loads(path.read_text())
    parts: dict[str, Row] = file.get("parts", {"": file})
    return parts


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown table of a benchmark's rows, whose keys say which benchmark it was."""
    kinds = {"goal": options, "every_strategy": strategies, "tflops": scaling}
    for key, of_rows in kinds.items():
        if any(key in row or key in row.get("both", ()) for row in rows):
            return of_rows(rows)
    # All figures, a column for each key; those beyond seven share the last one.
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in NOT_SHOWN))
    first, rest = keys[: MOST_COLUMNS - 1], keys[MOST_COLUMNS - 1 :]
    lines = []
    for row in rows:
        more = "; ".join(f"{key} {_shown(row[key])}" for key in rest if key in row)
        lines.append([*(_shown(row.get(key, "")) for key in first), *[more] * bool(rest)])
    return markdown([*first, *["more"] * bool(rest)], lines)


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of a head and lines of cells."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def line(row: Row) -> str:
    """Return all figures of a row as a line to print."""
    return " | ".join(f"{key} {_shown(x)}" for key, x in row.items() if key not in NOT_SHOWN)


def _shown(x: Any) -> str:
    """Return a figure with four digits, and those of a dictionary or list in turn."""
    if isinstance(x, dict):
        return ", ".join(f"{key} {_shown(value)}" for key, value in x.items())
    if isinstance(x, list):
        return " ".join(map(_shown, x))
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def scaling(rows: Sequence[Row]) -> str:
    """Return TFLOP/s per GPU with scaling efficiency: the rate over one GPU's on the same sequence.

    A setting that one GPU did not run alone is compared with its rate at 128k tokens.
    """
    one_gpu = {(row["gpus"], row["setting"]): row for row in rows if row["method"] == "one"}

    def cells(row: Row) -> list[str]:
        auto = " (`auto`)" * (row["method"].removesuffix(", chunks") == row.get("auto"))
        bound = f", {row['processors']} processors each" if "processors" in row else ""
        head = [str(row["gpus"]), row["setting"], f"`{row['method']}`{auto}{bound}"]
        if "forward" not in row:
            return [*head, "refused or wrong", "", ""]
        at_128k = re.sub(r"\b\d+k\b", "128k", row["setting"])
        base = one_gpu.get((row["gpus"], row["setting"]), one_gpu.get((row["gpus"], at_128k), {}))
        for way in PASSES:
            rate = row[way]["tflops"]
            efficiency = f" ({rate / base[way]['tflops']:.2f})" if way in base else ""
            head.append(f"{rate:.0f}{efficiency}")
        # Peak memory of layers is that of all together, not of one call.
        of_one = not row["method"].endswith(IN_LAYERS)
        return [*head, f"{row['both']['peak_gib']:.2f}" if of_one else ""]

    head = ["GPUs", "mask, length, heads", "method", "forward", "forward + backward", "GiB"]
    return markdown(head, map(cells, rows))


def strategies(rows: Sequence[Row]) -> str:
    """Return each strategy's scaling efficiency, and Ring's best one beside the best other method.

    Cells of the best have a line for the forward and one for forward + backward, in TFLOP/s per
    GPU. Ring's rate over the other's follows it, in bold below 1. Efficiencies are forward /
    forward + backward; what ``auto`` took is marked.
    """
    by_setting: dict[str, dict[str, Row]] = {row["setting"]: {} for row in rows}
    for row in rows:
        if "forward" in row:
            by_setting[row["setting"]][row["method"]] = row
    lines = []
    for setting, methods in by_setting.items():
        one, auto = methods.pop("one", None), methods.pop("zigzag/auto/auto/auto", {})
        ours, others, cells = {}, {}, dict[str, list[str]]()
        for method, row in methods.items():
            layout, *parts = method.split("/")
            if not parts:
                others[method] = row
                continue
            name = parts[1] if layout == "zigzag" else f"{parts[1]} {layout}"
            ours[name] = row
            strategy, _, variant = name.replace(" ", "-").partition("-")
            if one is not None:
                efficiency = (f"{row[way]['tflops'] / one[way]['tflops']:.2f}" for way in PASSES)
                taken = " (`auto`)" * (name == auto.get("chosen", "").partition("/")[0])
                cell = f"{variant} {' / '.join(efficiency)}{taken}".lstrip()
                cells.setdefault(strategy, []).append(cell)
        best, best_other = [], []
        for way in PASSES:
            (rate, name), (rate_of_other, other) = (
                max(((row[way]["tflops"], name) for name, row in x.items()), default=(0.0, "none"))
                for x in (ours, others)
            )
            best.append(f"{name} {rate:.0f}")
            ratio = f"{rate / rate_of_other:.2f}" if rate_of_other else ""
            ratio = f"**{ratio}**" if ratio.startswith("0") else ratio
            best_other.append(f"{other} {rate_of_other:.0f} ({ratio})" if ratio else "none")
        columns = (best, best_other, *(cells.get(name, ["none"]) for name in STRATEGIES))
        lines.append([setting, *map("<br>".join, columns)])
    head = ["mask, length, heads", "Ring's best", "best other (Ring's over it)"]
    return markdown([*head, *(f"`{name}`" for name in STRATEGIES)], lines)


def options(rows: Sequence[Row]) -> str:
    """Return milliseconds of ours and others, the ratio to the best other, and the goal."""

    def beside_others(row: Row, way: str) -> str:
        took, ratio = row["milliseconds"][way], row["ratio"][way].get(row["best"][way])
        shown = {name: f"{took[name][1]:.2f}" if name in took else "none" for name in row["error"]}
        ours = f"**{shown.pop(OURS, 'none')}**" + ("" if ratio is None else f" ({ratio[1]:.2f})")
        return "<br>".join([ours, *(f"{name} {ms}" for name, ms in shown.items())])

    def cells(row: Row) -> list[str]:
        missed = ", missed" * (not all(row["met"].values()))
        goal = "" if row["goal"] is None else f"{row['goal']:.2f}{missed}"
        return [row["row"], f"`{row['kernel']}`", *(beside_others(row, x) for x in PASSES), goal]

    return markdown(["", "ours", "forward, ms", "forward + backward, ms", "goal"], map(cells, rows))


def chart(rows: Sequence[Row]) -> str:
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

    marked = r"(<!-- (table|chart) of (\S+) -->\n).*?(<!-- end of \2 -->)"
    return re.sub(marked, made, page, flags=re.DOTALL)


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
