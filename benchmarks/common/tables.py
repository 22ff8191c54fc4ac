"""Markdown tables of measurements, as the pages show them, and rows as lines to print."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.common.cases import OURS, PASSES

Row = dict[str, Any]
IN_LAYERS = "/layers"  # at its end: one of several calls in a row, as a model's layers make


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown table of a benchmark's rows, whose keys say which benchmark it was."""
    for key, of_rows in KINDS.items():
        if any(key in row or key in row.get("both", ()) for row in rows):
            return of_rows(rows)
    return plain(rows)


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of a head and lines of cells."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def scaling(rows: Sequence[Row]) -> str:
    """Return TFLOP/s per GPU with scaling efficiency: the rate over one GPU's on the same sequence.

    A setting that one GPU did not run alone is compared with its rate at 128k tokens.
    """
    several = len({row["gpus"] for row in rows}) > 1
    one_gpu = {(row["gpus"], row["setting"]): row for row in rows if row["method"] == "one"}

    def cells(row: Row) -> list[str]:
        auto = " (`auto`)" * (row["method"].removesuffix(", chunks") == row.get("auto"))
        bound = f", {row['processors']} processors each" if "processors" in row else ""
        head = [str(row["gpus"])] * several + [row["setting"], f"`{row['method']}`{auto}{bound}"]
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

    head = ["GPUs"] * several + ["mask, length, heads", "method"]
    return markdown([*head, "forward", "forward + backward", "GiB"], map(cells, rows))


_STRATEGIES = ("gather", "ring", "ulysses", "hybrid")


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
        columns = ("<br>".join(cells.get(name, ["none"])) for name in _STRATEGIES)
        lines.append([setting, *_best_cells(ours, others), *columns])
    head = ["mask, length, heads", "Ring's best", "best other (Ring's over it)"]
    return markdown([*head, *(f"`{name}`" for name in _STRATEGIES)], lines)


def _best_cells(ours: dict[str, Row], others: dict[str, Row]) -> tuple[str, str]:
    """Return the cells of our fastest method and of the fastest other, a line per pass."""
    best, best_other = [], []
    for way in PASSES:
        (rate, name), (rate_of_other, other) = (
            max(((row[way]["tflops"], name) for name, row in rows.items()), default=(0.0, "none"))
            for rows in (ours, others)
        )
        best.append(f"{name} {rate:.0f}")
        ratio = f"{rate / rate_of_other:.2f}" if rate_of_other else ""
        ratio = f"**{ratio}**" if ratio.startswith("0") else ratio
        best_other.append(f"{other} {rate_of_other:.0f} ({ratio})" if rate_of_other else "none")
    return "<br>".join(best), "<br>".join(best_other)


def options(rows: Sequence[Row]) -> str:
    """Return milliseconds of ours and others, the ratio to the best other, and the goal."""

    def beside_others(row: Row, way: str) -> str:
        took, ratio = row["milliseconds"][way], row["ratio"][way].get(row["best"][way])
        ours = f"**{took[OURS][1]:.2f}**" if OURS in took else "**none**"
        others = (
            f"{name} {took[name][1]:.2f}" if name in took else f"{name} none"
            for name in row["error"] if name != OURS
        )  # fmt: skip
        return "<br>".join([ours if ratio is None else f"{ours} ({ratio[1]:.2f})", *others])

    def cells(row: Row) -> list[str]:
        missed = ", missed" * (not all(row["met"].values()))
        goal = "" if row["goal"] is None else f"{row['goal']:.2f}{missed}"
        return [row["row"], f"`{row['kernel']}`", *(beside_others(row, x) for x in PASSES), goal]

    return markdown(["", "ours", "forward, ms", "forward + backward, ms", "goal"], map(cells, rows))


MOST_COLUMNS = 7
#: Keys that are not shown: errors that were allowed, and figures of which others are the summary.
NOT_SHOWN = ("errors", "error", "of_ranks", "each", "losses", "rounds")


def plain(rows: Sequence[Row]) -> str:
    """Return all figures of rows, a column for each key; those beyond seven share the last one."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in NOT_SHOWN))
    first, rest = keys[: MOST_COLUMNS - 1], keys[MOST_COLUMNS - 1 :]

    def cells(row: Row) -> list[str]:
        more = "; ".join(f"{key} {_shown(row[key])}" for key in rest if key in row)
        return [*(_shown(row.get(key, "")) for key in first), *[more] * bool(rest)]

    return markdown([*first, *["more"] * bool(rest)], map(cells, rows))


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


#: Table makers by a key that some of their rows have; the first match makes it.
KINDS: dict[str, Callable[[Sequence[Row]], str]] = {
    "goal": options,
    "every_strategy": strategies,
    "tflops": scaling,
}
