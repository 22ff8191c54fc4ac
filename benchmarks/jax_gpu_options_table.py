"""The rows of ``jax_gpu_options.py`` as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

METHODS = ("ring", "triton", "cudnn")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Milliseconds of ours and of the others, and the ratio to cuDNN."""
    lines = [
        "| | ours | forward, ms | `triton` | cuDNN | ours to cuDNN | forward + backward, ms | `triton` | cuDNN | ours to cuDNN |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        cells = [row["setting"], f"`{row['kernel']}`"]
        for way in ("forward", "both"):
            took, ratio = row["milliseconds"][way], row["ratio"][way].get("cudnn")
            cells += [f"{took[name][1]:.3g}" if name in took else "none" for name in METHODS]
            cells += ["" if ratio is None else "{:.2f} **{:.2f}** {:.2f}".format(*ratio)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
