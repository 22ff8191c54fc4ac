"""The rows of ``gpu_options.py`` as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WAYS = ("forward", "both")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Milliseconds of ours and of the others, and the ratio to the best of these."""
    lines = [
        "| | ours | forward, ms | others | ours to the best | forward + backward, ms | others | ours to the best | goal | met |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        cells = [row["row"], f"`{row['kernel']}`"]
        for way in WAYS:
            cells += _cells(row, way)
        met = ["yes" if row["met"][way] else "no" for way in WAYS if way in row["met"]]
        goal = "" if row["goal"] is None else f"{row['goal']:.2f}"
        cells += [goal, ", ".join(dict.fromkeys(met) if len(set(met)) == 1 else met)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(row: dict[str, Any], way: str) -> list[str]:
    """Ours, each of the others, and the quartiles of the ratio to the best of them."""
    took, best = row["milliseconds"][way], row["best"][way]
    others = [
        f"{name} {took[name][1]:.2f}" if name in took else f"{name} none"
        for name in row["error"] if name != "ring"
    ]  # fmt: skip
    ours = f"{took['ring'][1]:.2f}" if "ring" in took else "none"
    ratio = row["ratio"][way].get(best)
    shown = "" if ratio is None else f"{ratio[0]:.2f} **{ratio[1]:.2f}** {ratio[2]:.2f}"
    return [ours, "<br>".join(others), shown]
