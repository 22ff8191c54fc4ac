"""Tables of what was measured: ``python benchmarks/gpu.py --table FILE``, as docs show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ALONE = "/alone"  # in a method's name: without its communication


def table(rows: list[dict[str, Any]]) -> str:
    """TFLOP/s per GPU, and scaling efficiency: that over one GPU's on the same sequence.

    Forward, then forward + backward. What one GPU was not asked to do alone is compared with its
    rate at 128k tokens. Where a method was timed without its communication, too, the share of
    exposed communication follows, of either.
    """
    head = "| GPUs | mask, length, heads | method |"
    head += " forward | scaling efficiency | forward + backward | scaling efficiency | GiB |"
    exposed = _exposed(rows)
    lines = [head + " exposed communication |" * bool(exposed)]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    alone = {(row["gpus"], row["setting"]): row for row in rows if row["method"] == "one"}
    for row in rows:
        head = f"| {row['gpus']} | {row['setting']} | `{row['method']}` |"
        if "forward" not in row:
            lines.append(f"{head} refused or wrong |" + " |" * (lines[0].count("|") - 5))
            continue
        mask, _, heads = row["setting"].split()
        shorter = alone.get((row["gpus"], f"{mask} 128k {heads}"))
        base = alone.get((row["gpus"], row["setting"]), shorter)
        cells = []
        for key in ("forward", "both"):
            rate = row[key]["tflops"]
            over = f"{rate / base[key]['tflops']:.2f}" if base and "forward" in base else ""
            cells.append(f"{rate:.0f} | {over}")
        line = f"{head} {' | '.join(cells)} | {row['both']['peak_gib']:.2f} |"
        if exposed:
            line += f" {exposed.get(_key(row), '')} |"
        lines.append(line)
    return "\n".join(lines)


def _key(row: dict[str, Any]) -> tuple[int, str, str]:
    return row["gpus"], row["setting"], row["method"]


def _exposed(rows: list[dict[str, Any]]) -> dict[tuple[int, str, str], str]:
    """Shares of the time, forward and forward + backward, of rows timed ``alone``, too."""
    timed = {_key(row): row for row in rows if "forward" in row}
    found = {}
    for (gpus, setting, name), without in timed.items():
        key = (gpus, setting, name.replace(ALONE, ""))
        if ALONE in name and key in timed:
            shares = (1 - without[x]["ms"] / timed[key][x]["ms"] for x in ("forward", "both"))
            found[key] = " / ".join(f"{share:.2f}" for share in shares)
    return found


def summary(rows: list[dict[str, Any]], settings: Sequence[str], methods: Sequence[str]) -> str:
    """TFLOP/s per GPU, forward / forward + backward, a line per setting."""
    by_name = {(row["setting"], row["method"]): row for row in rows}
    lines = [f"| mask, length, heads | {' | '.join(f'`{name}`' for name in methods)} |"]
    lines.append("|---" * (1 + len(methods)) + "|")
    for setting in settings:
        found = [by_name[setting, name] for name in methods]
        rates = [f"{row['forward']['tflops']:.0f} / {row['both']['tflops']:.0f}" for row in found]
        lines.append(f"| {setting} | {' | '.join(rates)} |")
    return "\n".join(lines)
