"""What layouts and strategies cost, drawn side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ring_core.cost import Cost

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_costs(costs: Mapping[int, Mapping[str, Cost | str]], title: str, figure: Figure) -> None:
    """A group of bars for each number of ranks; a layout that cannot divide has none."""
    from matplotlib import colormaps

    times, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    names = list(dict.fromkeys(name for of_pairs in costs.values() for name in of_pairs))
    colors = dict(zip(names, colormaps["tab10"](range(len(names))), strict=True))
    width = 0.8 / len(names)
    for n, of_pairs in enumerate(costs.values()):
        for m, pair in enumerate(names):
            cost, x = of_pairs.get(pair), n - 0.4 + (m + 0.5) * width
            if not isinstance(cost, Cost):
                continue
            look = {"width": 0.9 * width, "color": colors[pair]}
            label = pair if n == 0 else None
            times.bar(x, 1e3 * cost.compute_s, label=label, **look)
            times.bar(
                x, 1e3 * cost.exposed_s, bottom=1e3 * cost.compute_s, hatch="////",
                edgecolor="white", **look,
            )  # fmt: skip
            memory.bar(x, cost.memory_bytes / 2**20, **look)
    for axes, what in ((times, "time, ms (hatched: exposed messages)"), (memory, "memory, MiB")):
        axes.set_title(what, loc="left")
        axes.set_xticks(range(len(costs)), [str(ranks) for ranks in costs])
        axes.set_xlabel("ranks")
        axes.margins(y=0.05)
    times.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
