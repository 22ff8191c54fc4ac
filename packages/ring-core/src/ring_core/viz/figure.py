"""Draw to a file which rank computes, holds and does what in a ring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ring_core.base.arguments import check_kind
from ring_core.plan.plan import Plan
from ring_core.programs.ring import RingProgram
from ring_core.programs.steps import ring_of
from ring_core.viz.cells import (
    NOBODY,
    WRONG,
    count_pieces,
    kv_messages,
    rank_and_index,
    ranks_of_cells,
)
from ring_core.viz.text import SHOWN_CELLS, SHOWN_RANKS, SHOWN_STEPS, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_CELLS, _MOST_SHOWN, _MOST_LABELS = 192, 256, 16


def plot(program: RingProgram, path: str | Path) -> None:
    """Draw a ring's program to a file: which rank computes what, holds what, and works when.

    >>> from ring_core import Mask, make_plan, ring_program, viz
    >>> program = ring_program(make_plan(Mask(causal=True), seq_len=64, cp_size=4))
    >>> viz.plot(program, "ring.svg")  # doctest: +SKIP

    The format follows the name (``.png``, ``.svg``, ``.pdf``); equal plans give equal SVG files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    check_kind("program", program, RingProgram)
    if not isinstance(path, str | Path):
        raise ValueError(f"path must be text or a Path, got {type(path).__name__}")
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot needs matplotlib: pip install matplotlib, or 'ring-core[viz]'; from a clone: pip "
            "install 'packages/ring-core[viz]'"
        ) from error
    svg = Path(path).suffix.lower() in (".svg", ".svgz")
    with mpl.rc_context({"svg.hashsalt": "ring", "font.size": 9, "axes.titlesize": 10}):
        figure = Figure(figsize=(11, 6), layout="constrained")
        _draw_program(program, figure)
        figure.savefig(path, dpi=144, metadata={"Date": None} if svg else None)


def _draw_program(program: RingProgram, figure: Figure) -> None:
    """Draw the layout above the mask on the left, and the work of every step on the right."""
    from matplotlib import colormaps, colors

    plan = program.plan
    # Ranks have pale colors, so that black text reads on all of them. WRONG, a number below all
    # ranks, is black: there plan and mask disagree.
    pale = 0.7 * colormaps["turbo"](np.linspace(0.06, 0.94, plan.cp_size)) + 0.3
    of_rank = colors.ListedColormap(pale).with_extremes(under="black")
    parts = figure.add_gridspec(1, 2, width_ratios=(1, 1.08), wspace=0.04)
    left = parts[0].subgridspec(2, 1, height_ratios=(1, 18))
    _draw_layout(plan, figure.add_subplot(left[0]), of_rank)
    _draw_mask(program, figure.add_subplot(left[1]), of_rank)
    _draw_work(program, figure.add_subplot(parts[1]))
    keys = f" against {plan.kv_seq_len:,} keys" if plan.kv_seq_len != plan.seq_len else ""
    strategy = "" if ring_of(program.strategy).is_plain else f", {program.strategy}"
    figure.suptitle(
        f"{plan.q_layout.name}{strategy}, {plan.cp_size} ranks, {plan.seq_len:,} tokens{keys}, "
        f"{plan.mask.describe()}\n"
        f"imbalance {program.imbalance:.3f}, by step {program.imbalance_by_step:.3f}, "
        f"{program.num_steps} of {plan.cp_size} steps with work, {kv_messages(program)} K/V messages per rank",
        fontsize=11,
    )


def _draw_layout(plan: Plan, axes: Axes, colors: Any) -> None:
    """Draw which rank holds which keys, as a strip."""
    layout, pieces = plan.k_layout, count_pieces(plan.k_layout)
    cells, shown, title = min(pieces, _MOST_CELLS), layout.seq_len, f"{layout.name}, all keys"
    if layout.stride > 1:
        cells = shown = min(layout.seq_len, max(1, 2 * _MOST_LABELS // pieces) * pieces)
        title = f"{layout.name}, the first {shown} keys"
    ranks = rank_and_index(layout, (2 * np.arange(cells) + 1) * shown // (2 * cells))[0]
    axes.imshow(ranks[None], cmap=colors, vmin=-0.5, vmax=plan.cp_size - 0.5, aspect="auto")
    for x, rank in enumerate(ranks.tolist() if cells <= 2 * _MOST_LABELS else []):
        axes.text(x, 0, str(rank), ha="center", va="center", fontsize=8)
    axes.set(xticks=[], yticks=[])
    axes.set_title(f"who holds what: {title}", loc="left")


def _draw_mask(program: RingProgram, axes: Axes, colors: Any) -> None:
    """Draw which rank computes which (query, key) pairs."""
    from matplotlib.patches import Patch

    plan = program.plan
    striped = plan.q_layout.stride > 1
    max_cells = min(max(plan.cp_size, SHOWN_CELLS), _MOST_CELLS) if striped else _MOST_CELLS
    ranks = ranks_of_cells(program, max_cells)
    image = axes.imshow(
        np.ma.masked_equal(ranks, NOBODY), cmap=colors, vmin=-0.5, vmax=plan.cp_size - 0.5,
        aspect="auto", interpolation="nearest", extent=(0, plan.kv_seq_len, plan.seq_len, 0),
    )  # fmt: skip
    title = "who computes what" + (" (stripes drawn wider than they are)" if striped else "")
    title += ", black: plan and mask disagree" if (ranks == WRONG).any() else ""
    axes.set_title(title, loc="left")
    for axis, length in ((axes.xaxis, plan.kv_seq_len), (axes.yaxis, plan.seq_len)):
        positions = np.unique(np.arange(5) * length // 4).tolist()
        axis.set_ticks(positions, [f"{position:,}" for position in positions])
    axes.set(xlabel="key", ylabel="query")
    if plan.cp_size > _MOST_LABELS:
        axes.figure.colorbar(image, ax=axes, location="bottom", aspect=40).set_label("rank")
        return
    if not striped:
        for layout, draw in ((plan.k_layout, axes.axvline), (plan.q_layout, axes.axhline)):
            for border in range(layout.run_length, layout.seq_len, layout.run_length):
                draw(border, color="white", linewidth=0.5)
    axes.legend(
        handles=[Patch(color=colors(rank), label=str(rank)) for rank in range(plan.cp_size)], title="rank", loc="upper center", bbox_to_anchor=(0.5, -0.11),
        ncols=min(plan.cp_size, 8), frameon=False, handlelength=1, handleheight=1,
    )  # fmt: skip


def _draw_work(program: RingProgram, axes: Axes) -> None:
    """Draw how much each rank computes in each step."""
    from matplotlib import colormaps, colors

    work, cp_size = program.work(), program.plan.cp_size
    rank_every, step_every = -(-cp_size // _MOST_SHOWN), -(-program.num_steps // _MOST_SHOWN)
    share = work[::step_every, ::rank_every].T * (100 / (work.mean() or 1))
    pale = 0.75 * colormaps["RdYlBu_r"](np.linspace(0, 1, 256)) + 0.25
    axes.patch.set(hatch="////", edgecolor="silver", linewidth=0)
    image = axes.imshow(
        np.ma.masked_equal(share, 0), cmap=colors.ListedColormap(pale), vmin=0, vmax=200,
        aspect="auto", interpolation="nearest", extent=(-0.5, program.num_steps - 0.5, cp_size - 0.5, -0.5),
    )  # fmt: skip
    axes.figure.colorbar(
        image, ax=axes, location="bottom", aspect=40, extend="max",
        label="pairs a rank and step, % of the mean of all",
    )  # fmt: skip
    if cp_size <= SHOWN_RANKS and program.num_steps <= SHOWN_STEPS:
        for (rank, step), value in np.ndenumerate(share):
            axes.text(
                step,
                rank,
                percent(float(value)) if value else "",
                ha="center",
                va="center",
                fontsize=8,
            )
    steps = (
        np.linspace(0, program.num_steps - 1, min(program.num_steps, SHOWN_STEPS))
        .astype(int)
        .tolist()
    )
    axes.set_xticks(steps, [str(program.steps[n].shift) for n in steps])
    axes.set_yticks(np.linspace(0, cp_size - 1, min(cp_size, SHOWN_RANKS)).astype(int))
    axes.set(xlabel="step s: K/V come from s ranks before", ylabel="rank")
    axes.set_title(f"who works when{' (hatched: idle)' if (share == 0).any() else ''}", loc="left")
