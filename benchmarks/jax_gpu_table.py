"""The table of figures of one GPU: ``python benchmarks/jax_gpu_table.py FILE``, as docs show it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEAD = """| tokens | forward | cuDNN | | forward + backward | cuDNN | |
|---|---|---|---|---|---|---|"""
PLAYED = """| ranks | tokens | strategy | forward, ms | scaling efficiency | forward + backward, ms | scaling efficiency |
|---|---|---|---|---|---|---|"""


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Ours beside cuDNN's, TFLOP/s and their ratio; of ranks that one GPU emulated the slowest."""
    if "ranks" in rows[0]:
        return "\n".join([PLAYED, *map(_of_ranks, rows)])
    return "\n".join([HEAD, *map(_row, rows)])


def _row(row: dict[str, Any]) -> str:
    cells = [f"{row['length']:,} {_mask(row)}"]
    for kind in ("forward", "both"):
        ours, theirs = row["triton"][kind], row["cudnn"][kind]
        cells += [f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}"]
    return f"| {' | '.join(cells)} |"


def _of_ranks(row: dict[str, Any]) -> str:
    cells = [f"{row['ranks']}", f"{row['length']:,}", f"`{row['strategy']}`"]
    for kind in ("forward", "both"):
        cells += [f"{max(row[f'ms {kind}'].values()):.2f}", f"{row[f'eta {kind}']:.2f}"]
    return f"| {' | '.join(cells)} |"


def _mask(row: dict[str, Any]) -> str:
    if "window" in row:
        return f"window {row['window']:,}"
    return "causal" if row["causal"] else "full"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())["rows"]))
