"""Small pictures of masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from ring_core import Mask

TOKENS = 16
Rule = Mask | npt.NDArray[np.bool_]


def masks(rules: Mapping[str, Rule], *, keys: int = TOKENS) -> Callable[[Path], None]:
    """Masks side by side, with their titles: 16 queries down, the keys across, visible is dark.

    With other numbers of keys the last query stands at the last key.
    """

    def draw(path: Path) -> None:
        with mpl.rc_context({"svg.hashsalt": "ring", "font.size": 9, "axes.titlesize": 9}):
            size = (2.3 * len(rules) * max(1.0, keys / TOKENS), 2.4)
            figure = Figure(figsize=size, layout="constrained")
            for n, (title, rule) in enumerate(rules.items()):
                axes = figure.add_subplot(1, len(rules), n + 1)
                colors = ListedColormap(["#f2f2f2", "#2b6cb0"])
                axes.imshow(_dense(rule, keys), cmap=colors, vmin=0, vmax=1)
                axes.set_xticks(np.arange(-0.5, keys), minor=True)
                axes.set_yticks(np.arange(-0.5, TOKENS), minor=True)
                axes.grid(which="minor", color="white", linewidth=0.6)
                axes.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
                axes.set(title=title, xlabel="keys", ylabel="queries")
            figure.savefig(path, metadata={"Date": None})

    return draw


def _dense(rule: Rule, keys: int) -> npt.NDArray[np.bool_]:
    if isinstance(rule, Mask):
        rule = rule.dense(np.arange(TOKENS) + keys - TOKENS, np.arange(keys))
    assert rule.shape == (TOKENS, keys)
    return rule


def segments(*ids: int) -> npt.NDArray[np.bool_]:
    """What ``segment_ids`` show: equal ids see each other, negative ones nothing."""
    row = np.array(ids)
    return np.asarray((row[:, None] == row[None, :]) & (row >= 0)[:, None])
