"""Charts of scaling efficiency, forward + backward, that README and docs show."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.common.cases import mask_of

#: Settings in the order of the chart, as the file names them: mask, length, query and key heads.
SETTINGS = (
    "causal 8k 32/8", "causal 32k 32/8", "causal 32k 32/32", "causal 128k 32/8", "window 128k 32/8",
    "documents 128k 32/8",
)  # fmt: skip

#: Names of methods in the chart. If several have one name, the first that was timed is drawn:
#: `auto`, or the strategy that `auto` has chosen since the file was made.
METHODS = {
    "zigzag/auto/auto/auto": "Ring", "zigzag/auto/ulysses/auto": "Ring", "ulysses": "Ulysses",
    "torch-cp": "torch", "ring-flash-attn": "ring-flash-attn", "yunchang": "yunchang",
}  # fmt: skip

#: The same of JAX. On two GPUs `auto` takes the ring.
JAX_METHODS = {"ring": "Ring", "all-gather cudnn": "all-gather", "zigzag cudnn": "zigzag"}

#: Tokens of the settings with a window and with documents.
LONG = 128 * 1024
WIDTH = 40  # characters of a bar of 1.00
COLUMNS = 128  # of a line below the bars
EIGHTHS = " ▏▎▍▌▋▊▉"


def chart(rows: Sequence[dict[str, Any]]) -> str:
    """Return a bar of scaling efficiency for each method that was timed in a setting."""
    rates = {
        (row["setting"], row["method"]): row["both"]["tflops"] for row in rows if "both" in row
    }
    methods = _methods(rows)
    return "\n".join(line for setting in SETTINGS for line in _bars(setting, rates, methods))


def legend(rows: Sequence[dict[str, Any]]) -> str:
    """Return what rows are, and which bars are missing and why, in the words of the benchmark."""
    window, offsets = mask_of("window", LONG).window, mask_of("documents", LONG).cu_seqlens
    assert window is not None and window[0] is not None and offsets is not None
    lengths = np.diff(offsets)
    absent = []
    for method, name in _methods(rows).items():
        missing = {
            row["setting"].partition(" ")[0]: row["failed"].partition(f"{method}: ")[2]
            for row in rows
            if row["setting"] in SETTINGS and row["method"] == method and "failed" in row
        }
        if missing:
            masks = " and ".join(f"`{mask}`" for mask in missing)
            reasons = "; ".join(dict.fromkeys(reason.split(",")[0] for reason in missing.values()))
            absent.append(f"{name} in {masks} ({reasons})")
    text = (
        "A row names mask (all are causal), tokens, and query and K/V heads. `window`: a query sees "
        f"itself and {window[0]:,} keys before it. `documents`: {len(lengths)} documents of "
        f"{lengths.min():,} to {lengths.max():,} tokens, {lengths.mean():,.0f} on average, packed "
        "into one sequence."
    )
    if absent:
        text += f" Without a bar: {', '.join(absent)}."
    return textwrap.fill(text, COLUMNS, break_on_hyphens=False)


def _methods(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    return JAX_METHODS if any(row["method"] in JAX_METHODS for row in rows) else METHODS


def _bars(
    setting: str, rates: dict[tuple[str, str], float], methods: dict[str, str]
) -> Iterator[str]:
    head, drawn = setting, set[str]()
    for method, name in methods.items():
        if (setting, method) in rates and name not in drawn:
            drawn.add(name)
            efficiency = rates[setting, method] / rates[setting, "one"]
            yield f"{head:19}  {name:15}  {bar(efficiency):{WIDTH}}  {efficiency:.2f}"
            head = ""


def bar(efficiency: float) -> str:
    """Return a bar of block characters, ``WIDTH`` for 1.00, to an eighth of a character."""
    whole, eighths = divmod(round(efficiency * WIDTH * 8), 8)
    return ("█" * whole + EIGHTHS[eighths]).rstrip()
