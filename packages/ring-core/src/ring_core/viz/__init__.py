"""Pictures: who computes what in a ring, for a terminal or drawn to a file; and what layouts cost.

Those of a program show what its tables say, at sampled positions, never the mask alone: where the
two disagree, or two ranks compute the same pair, the cell is marked ``!``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ring_core.base.arguments import check_kind, check_text
from ring_core.cost import Cost
from ring_core.programs.ring import RingProgram
from ring_core.viz.cells import (
    NOBODY as NOBODY,
    WRONG as WRONG,
    computing_ranks as computing_ranks,
    kv_messages as kv_messages,
)
from ring_core.viz.text import describe as describe

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(program: RingProgram, path: str | Path) -> None:
    """Draw a ring's program to a file: who computes what, who holds what, who works when.

    The format follows the name (``.png``, ``.svg``, ``.pdf``); equal plans give equal SVG files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    check_kind("program", program, RingProgram)
    from ring_core.viz.figure import draw_program

    _save(partial(draw_program, program), (11, 6), path)


def plot_costs(costs: Mapping[int, Mapping[str, Cost | str]], title: str, path: str | Path) -> None:
    """Draw what layouts cost to a file: their time, and the memory they take beyond the inputs.

    Args:
        costs: For numbers of ranks, what :func:`ring_core.cost.compare` returned.
        title: A line above it.
        path: The file; its name gives the format, as in :func:`plot`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    check_text("title", title)
    if not isinstance(costs, Mapping) or not costs:
        raise ValueError("costs must be a mapping from numbers of ranks to what compare returned")
    for name, found in costs.items():
        check_kind(f"costs[{name!r}]", found, Mapping)
    from ring_core.viz.figure import draw_costs

    _save(partial(draw_costs, costs, title), (9, 4.5), path)


def _save(draw: Callable[[Figure], None], size: tuple[float, float], path: str | Path) -> None:
    if not isinstance(path, str | Path):
        raise ValueError(f"path must be text or a Path, got {type(path).__name__}")
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: install ring-core[viz]") from error
    svg = Path(path).suffix.lower() in (".svg", ".svgz")
    with mpl.rc_context({"svg.hashsalt": "ring", "font.size": 9, "axes.titlesize": 10}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(path, dpi=144, metadata={"Date": None} if svg else None)
