"""Markdown tables of measurements, as the pages show them: ``--table FILE`` prints one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks.common.cases import OURS, PASSES

Row = dict[str, Any]
IN_LAYERS = "/layers"  # at its end: one of several calls in a row, as a model's layers make


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown table of a benchmark's rows, whose keys say which benchmark it was."""
    for key, of_rows in KINDS.items():
        if any(key in row for row in rows):
            return of_rows(rows)
    return scaling(rows) if all("method" in row and "gpus" in row for row in rows) else plain(rows)


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of a head and lines of cells."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def scaling(rows: Sequence[Row]) -> str:
    """Return TFLOP/s per GPU with scaling efficiency: the rate over one GPU's on the same sequence.

    A setting that one GPU did not run alone is compared with its rate at 128k tokens.
    """
    several = len({row["gpus"] for row in rows}) > 1
    head = ["GPUs"] * several + ["mask, length, heads", "method"]
    one_gpu = {(row["gpus"], row["setting"]): row for row in rows if row["method"] == "one"}
    lines = ([str(row["gpus"])] * several + _scaling_cells(row, one_gpu) for row in rows)
    return markdown([*head, "forward", "forward + backward", "GiB"], lines)


def _scaling_cells(row: Row, one_gpu: dict[tuple[int, str], Row]) -> list[str]:
    auto = row["method"].removesuffix(", chunks") == row.get("auto")
    bound = f", {row['processors']} processors each" if "processors" in row else ""
    cells = [row["setting"], f"`{row['method']}`{' (`auto`)' * auto}{bound}"]
    if "forward" not in row:
        return [*cells, "refused or wrong", "", ""]
    at_128k = re.sub(r"\b\d+k\b", "128k", row["setting"])
    base = one_gpu.get((row["gpus"], row["setting"]), one_gpu.get((row["gpus"], at_128k)))
    for way in PASSES:
        rate = row[way]["tflops"]
        efficiency = f" ({rate / base[way]['tflops']:.2f})" if base and "forward" in base else ""
        cells.append(f"{rate:.0f}{efficiency}")
    # Peak memory of layers is that of all together, not of one call.
    of_one = not row["method"].endswith(IN_LAYERS)
    return [*cells, f"{row['both']['peak_gib']:.2f}" if of_one else ""]


def scaling_line(row: Row) -> str:
    """Return a row of a table of scaling as a line to print."""
    head = f"{row['gpus']} {row['setting']:<26} {row['method']:<18}"
    if "forward" not in row:
        return f"{head} {row.get('wrong') or row.get('failed')}"
    parts = [f"{row[way]['tflops']:6.0f} TFLOP/s {row[way]['ms']:9.3f} ms" for way in PASSES]
    return f"{head} {' | '.join(parts)} | {row['both']['peak_gib']:.2f} GiB"


def _strategies(rows: Sequence[Row]) -> str:
    """Return each strategy's scaling efficiency, and Ring's best one beside the best other method.

    Cells of the best have a line for the forward and one for forward + backward, in TFLOP/s per
    GPU. Ring's rate over the other's follows it, in bold below 1.
    """
    by_setting: dict[str, dict[str, Row]] = {}
    for row in rows:
        methods = by_setting.setdefault(row["setting"], {})
        if "forward" in row:
            methods[row["method"]] = row
    lines = []
    for setting, methods in by_setting.items():
        one, auto = methods.pop("one", None), methods.pop(_AUTO, {})
        ours = {_strategy(name): row for name, row in methods.items() if "/" in name}
        others = {name: row for name, row in methods.items() if "/" not in name}
        cells = _strategy_cells(ours, one, auto.get("chosen", "").partition("/")[0])
        lines.append([setting, *_best_cells(ours, others), *cells])
    head = ["mask, length, heads", "Ring's best", "best other (Ring's over it)"]
    return markdown([*head, *(f"`{name}`" for name in _STRATEGIES)], lines)


_AUTO = "zigzag/auto/auto/auto"
_STRATEGIES = ("gather", "ring", "ulysses", "hybrid")


def _strategy(method: str) -> str:
    """Return the strategy in a method's name, and its layout unless that is zigzag."""
    layout, _, strategy, *_ = method.split("/")
    return strategy if layout == "zigzag" else f"{strategy} {layout}"


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


def _strategy_cells(ours: dict[str, Row], one: Row | None, chosen: str) -> Iterator[str]:
    """Yield scaling efficiencies by strategy, forward / forward + backward; ``auto`` is marked."""
    for column in _STRATEGIES:
        lines = []
        for name, row in ours.items():
            strategy, _, variant = name.replace(" ", "-").partition("-")
            if strategy == column and one is not None:
                efficiency = (f"{row[way]['tflops'] / one[way]['tflops']:.2f}" for way in PASSES)
                taken = " (`auto`)" if name == chosen else ""
                lines.append(f"{variant} {' / '.join(efficiency)}{taken}".lstrip())
        yield "<br>".join(lines) or "none"


def _options(rows: Sequence[Row]) -> str:
    """Return milliseconds of ours and others, the ratio to the best other, and the goal."""
    head = ["", "ours", "forward, ms", "forward + backward, ms", "goal"]
    lines = (
        [
            row["row"],
            f"`{row['kernel']}`",
            *(_beside_others(row, way) for way in PASSES),
            _goal(row),
        ]
        for row in rows
    )
    return markdown(head, lines)


def _beside_others(row: Row, way: str) -> str:
    """Return milliseconds of ours, with the median ratio to the best other, and of others."""
    took = row["milliseconds"][way]
    others = (
        f"{name} {took[name][1]:.2f}" if name in took else f"{name} none"
        for name in row["error"] if name != OURS
    )  # fmt: skip
    ours = f"**{took[OURS][1]:.2f}**" if OURS in took else "**none**"
    ratio = row["ratio"][way].get(row["best"][way])
    return "<br>".join([ours if ratio is None else f"{ours} ({ratio[1]:.2f})", *others])


def _goal(row: Row) -> str:
    if row["goal"] is None:
        return ""
    missed = not all(row["met"].values())
    return f"{row['goal']:.2f}{', missed' * missed}"


def _causes(rows: Sequence[Row]) -> str:
    """Return host microseconds of a repeated call by cause, of the rank that takes longest."""
    lines = (
        [row["setting"], row["cause"], f"{row['forward_us']:.0f}", f"{row['backward_us']:.0f}"]
        for row in rows
    )
    return markdown(["mask, length, heads", "cause", "forward, us", "backward, us"], lines)


def _models(rows: Sequence[Row]) -> str:
    """Return seconds of a model's step by GPUs, and the rate over that of one GPU's if it ran."""
    one_gpu = {row["setting"]: row["tflops_per_gpu"] for row in rows if row["gpus"] == 1}
    head = ["model", "GPUs", "seconds a step", "each", "TFLOP/s per GPU", "GiB"]

    def cells(row: Row) -> list[str]:
        rate, base = row["tflops_per_gpu"], one_gpu.get(row["setting"])
        efficiency = f" ({rate / base:.2f})" if base else ""
        each = ", ".join(f"{x:.2f}" for x in row["each"])
        return [
            row["setting"], f"{row['gpus']}", f"{row['seconds']:.2f}", each,
            f"{rate:.0f}{efficiency}", f"{row['gib']:.1f}",
        ]  # fmt: skip

    return markdown(head, map(cells, rows))


MOST_COLUMNS = 7
#: Keys that are not shown: errors that were allowed, and figures of which others are the summary.
NOT_SHOWN = ("errors", "error", "of_ranks", "each", "rounds")


def plain(rows: Sequence[Row]) -> str:
    """Return all figures of rows, a column for each key; those beyond seven share the last one."""
    keys = [
        key for key in dict.fromkeys(key for row in rows for key in row) if key not in NOT_SHOWN
    ]
    first, rest = keys[: MOST_COLUMNS - 1], keys[MOST_COLUMNS - 1 :]

    def cells(row: Row) -> list[str]:
        more = "; ".join(f"{key} {_shown(row[key])}" for key in rest if key in row)
        return [*(_shown(row.get(key, "")) for key in first), *[more] * bool(rest)]

    return markdown([*first, *["more"] * bool(rest)], map(cells, rows))


def _shown(x: Any) -> str:
    """Return a figure with four digits, and those of a dictionary or list in turn."""
    if isinstance(x, dict):
        return ", ".join(f"{key} {_shown(value)}" for key, value in x.items())
    if isinstance(x, list):
        return " ".join(map(_shown, x))
    return f"{x:.4g}" if isinstance(x, float) else str(x)


#: Table makers by a key that some of their rows have; the first match makes it.
KINDS: dict[str, Callable[[Sequence[Row]], str]] = {
    "goal": _options,
    "cause": _causes,
    "every_strategy": _strategies,
    "tflops_per_gpu": _models,
}
