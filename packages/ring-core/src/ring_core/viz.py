"""Pictures of a plan: in characters for a terminal, and drawn to a file.

Both show what the plan's tables say, at sampled positions, never the mask alone: where the two
disagree, or two ranks compute the same pair, the cell is marked ``!``.
"""

from __future__ import annotations

import string
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ring_core._blocks import EMPTY, FULL, TILE
from ring_core._layout import Layout
from ring_core._plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NOBODY, WRONG = -1, -2  # stand in for the rank of a cell
_SYMBOLS = string.digits + string.ascii_letters
_BACKGROUNDS = (75, 114, 179, 209, 140, 80, 222, 168, 110, 150, 216, 183)  # of 256 ANSI colours
_CELLS, _RANKS, _STEPS = 32, 16, 16
_DRAWN_CELLS, _DRAWN, _LEGEND = 192, 256, 16


def describe(plan: Plan, *, color: bool = False, width: int = 64) -> str:
    """The plan in characters: who computes what, who holds what, who works when.

    Args:
        plan: The plan.
        color: Colour ranks with ANSI escapes.
        width: Characters the pictures may take, at least 8; lines take up to 16 more.

    Raises:
        ValueError: ``width`` below 8.
    """
    if width < 8:
        raise ValueError(f"width must be at least 8 characters, got {width}")
    keys = f" kv_seq_len={plan.kv_seq_len}" if plan.kv_seq_len != plan.seq_len else ""
    heading = (
        f"seq_len={plan.seq_len}{keys} cp_size={plan.cp_size} schedule={plan.schedule} "
        f"mask: {plan.mask.describe()}"
    )
    parts = [
        [heading],
        _mask_lines(plan, color, min(_CELLS, width // 2)),
        _layout_lines(plan, color, width),
        _work_lines(plan, color, min(_STEPS, width // 4)),
        _summary(plan),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


def kv_messages(plan: Plan) -> int:
    """K/V messages a rank sends in the forward pass."""
    return sum(stage.kv_hop is not None for stage in plan.forward)


def computing_ranks(plan: Plan, q: Ints, k: Ints) -> Ints:
    """The rank that computes each pair of queries ``q [n]`` and keys ``k [m]``, global indices.

    ``[n, m]``, read from the plan's tables; ``NOBODY`` where no rank does, ``WRONG`` where the
    tables and the mask disagree or several ranks compute the pair.
    """
    q_rank, q_local = (x[:, None] for x in _located(plan.q_layout, q))
    k_rank, k_local = (x[None, :] for x in _located(plan.k_layout, k))
    visible = plan.mask.dense(q + plan.q_offset, k)
    located = (q_rank, q_local, k_rank, k_local, _same_cell(plan, q, k))
    pairs = _Pairs(*np.broadcast_arrays(*located))
    claims, rank = np.zeros(visible.shape, dtype=np.int64), np.full(visible.shape, NOBODY)
    ahead, behind = (q_rank - k_rank) % plan.cp_size, (k_rank - q_rank) % plan.cp_size
    for n, step in enumerate(plan.steps):
        own, helped = ahead == step.shift, (behind == step.shift) & (step.helps != "none")
        if not (own.any() or helped.any()):
            continue
        table = plan.table(n)
        for by, which in ((pairs.q_rank, own), (pairs.k_rank, helped)):
            some = _Pairs(*(x[which] for x in pairs))
            shown = _shown(table[by[which]].astype(np.int64), some)
            claims[which] += shown
            rank[which] = np.where(shown > 0, by[which], rank[which])
    if plan.blocks is not None:  # a table gives the box; the tiles inside it are the plan too
        kinds = plan.blocks.kinds[q_rank, k_rank, q_local // TILE, k_local // TILE]
        claims *= (kinds == FULL) | ((kinds != EMPTY) & visible)
    return np.where((claims > 1) | ((claims > 0) != visible), WRONG, np.where(claims, rank, NOBODY))


class _Pairs(NamedTuple):
    q_rank: Ints
    q_local: Ints
    k_rank: Ints
    k_local: Ints
    same_cell: Bools


def _same_cell(plan: Plan, q: Ints, k: Ints) -> Bools:
    """Whether each pair lies in one document and chunk, ``[n, m]``."""
    if plan.boundaries is None:
        return np.ones((q.size, k.size), dtype=bool)
    q_cell = np.searchsorted(plan.boundaries, q + plan.q_offset, side="right")
    k_cell = np.searchsorted(plan.boundaries, k, side="right")
    return np.equal(q_cell[:, None], k_cell[None, :])


def _shown(rows: Ints, pairs: _Pairs) -> Ints:
    """How many of the table rows ``[n, R, C]`` show each of ``n`` pairs."""
    q_rank, kv_rank, _, q0, q1, k0, k1, lo, hi, doc_start, doc_stop = np.moveaxis(rows, -1, 0)
    q, k = pairs.q_local[:, None], pairs.k_local[:, None]
    diagonal = (q - q0) - (k - k0)
    shown = (q_rank == pairs.q_rank[:, None]) & (kv_rank == pairs.k_rank[:, None])
    shown &= (q0 <= q) & (q < q1) & (k0 <= k) & (k < k1) & (lo <= diagonal) & (diagonal <= hi)
    shown &= pairs.same_cell[:, None] | (doc_start == doc_stop)
    return np.asarray(shown.sum(axis=1), dtype=np.int64)


def _located(layout: Layout, index: Ints) -> tuple[Ints, Ints]:
    """Rank and local index of tokens."""
    starts = layout.run_positions(np.arange(layout.cp_size)).reshape(-1)
    order = np.argsort(starts)
    nearest = index % layout.stride if layout.stride > 1 else index
    run = order[np.searchsorted(starts[order], nearest, side="right") - 1]
    rank, nth = np.divmod(run, len(layout.run_starts))
    return rank, np.asarray(layout.run_starts)[nth] + (index - starts[run]) // layout.stride


def _pieces(layout: Layout) -> int:
    """Contiguous pieces the layout deals out; for ``striped``, ranks."""
    return layout.cp_size * len(layout.run_starts)


def _cells(layout: Layout, most: int) -> int:
    """Cells to sample a sequence in: where they can, each lies in one piece."""
    pieces = _pieces(layout)
    return min(most // pieces * pieces or most, layout.seq_len)


def _samples(layout: Layout, most: int) -> Ints:
    """Three indices in every cell, ``[cells, 3]``: near the middle, first, last.

    In a striped layout the first drifts from cell to cell, so that all ranks show.
    """
    cells = _cells(layout, most)
    edges = np.arange(cells + 1) * layout.seq_len // cells
    start, size = edges[:-1], np.diff(edges)
    drift = np.arange(cells) // np.maximum(1, layout.stride // size) if layout.stride > 1 else 0
    middle = start + (size // 2 + drift) % size
    return np.stack([middle, start, edges[1:] - 1], axis=1)


def _sampled(plan: Plan, most: int) -> Ints:
    """``[q_cells, k_cells]``: who computes the first visible pair sampled in each cell."""
    q, k = _samples(plan.q_layout, most), _samples(plan.k_layout, most)
    ranks = computing_ranks(plan, q.reshape(-1), k.reshape(-1))
    ranks = ranks.reshape(*q.shape, *k.shape).transpose(0, 2, 1, 3).reshape(len(q), len(k), -1)
    first = np.take_along_axis(ranks, (ranks >= 0).argmax(axis=-1)[..., None], axis=-1)[..., 0]
    return np.where((ranks == WRONG).any(axis=-1), WRONG, first)


def _symbol(plan: Plan, rank: int) -> str:
    """A character for a rank; with more ranks than characters, neighbours share one."""
    if rank < 0:
        return "." if rank == NOBODY else "!"
    return _SYMBOLS[rank // _ranks_a_symbol(plan)]


def _ranks_a_symbol(plan: Plan) -> int:
    return -(-plan.cp_size // len(_SYMBOLS))


def _painted(text: str, rank: int, color: bool) -> str:
    if not color or rank == NOBODY:
        return text
    paint = "97;41" if rank == WRONG else f"30;48;5;{_BACKGROUNDS[rank % len(_BACKGROUNDS)]}"
    return f"\x1b[{paint}m{text}\x1b[0m"


def _mask_lines(plan: Plan, color: bool, most: int) -> list[str]:
    ranks = _sampled(plan, most)
    q_size, k_size = plan.seq_len / ranks.shape[0], plan.kv_seq_len / ranks.shape[1]
    size = f"{q_size:g} x {k_size:g}"
    lines = [f"who computes what: queries down, keys across, a cell is {size}; . nobody"]
    if _ranks_a_symbol(plan) > 1:
        lines.append(f"a character stands for {_ranks_a_symbol(plan)} ranks")
    if (ranks == WRONG).any():
        lines.append("! marks cells where the plan and the mask disagree")
    for row in ranks.tolist():
        cells = (_painted(_symbol(plan, rank) + " ", rank, color) for rank in row)
        lines.append("".join(cells).rstrip())
    return lines


def _layout_lines(plan: Plan, color: bool, width: int) -> list[str]:
    layout, pieces = plan.q_layout, _pieces(plan.q_layout)
    if layout.stride > 1:
        title = f"striped, the first {min(width, layout.seq_len)} tokens"
        index = np.arange(min(width, layout.seq_len))
    else:
        tokens = f"{layout.run_length} tokens"
        if plan.kv_seq_len != plan.seq_len:
            tokens = f"{layout.run_length} queries and {plan.k_layout.run_length} keys"
        title = f"{layout.name}, {pieces} pieces of {tokens}"
        columns = width // pieces * pieces or width
        index = (2 * np.arange(columns) + 1) * layout.seq_len // (2 * columns)
    ranks = _located(layout, index)[0].tolist()
    strip = "".join(_painted(_symbol(plan, rank), rank, color) for rank in ranks)
    return [f"who holds what: {title}", strip]


def _work_lines(plan: Plan, color: bool, most: int) -> list[str]:
    """One row a rank, one column a live step."""
    work = plan.work()
    share = 100 / (work.mean() or 1)
    steps, ranks = min(plan.num_steps, most), min(plan.cp_size, _RANKS)
    totals = work.sum(axis=0)[:ranks] * (share / plan.num_steps)
    shifts = "".join(f"{step.shift:>4}" for step in islice(plan.steps, steps))
    lines = [
        "who works when: 100 is the mean of all ranks and steps, - is idle",
        f"shift {shifts}  total",
    ]
    for rank in range(ranks):
        label = _painted(f"{rank:>5}", rank, color)
        cells = "".join(f"{_percent(n * share):>4}" for n in work[:steps, rank].tolist())
        lines.append(f"{label} {cells}  {_percent(float(totals[rank])):>5}")
    more = ((plan.cp_size - ranks, "ranks"), (plan.num_steps - steps, "steps"))
    if hidden := [f"{n} more {what}" for n, what in more if n]:
        lines.append(f"  ... {', '.join(hidden)}")
    return lines


def _percent(share: float) -> str:
    """At most three characters up to a hundredfold share, and never 0 for work that is there."""
    if share <= 0:
        return "-"
    if share < 0.5:
        return "<1"
    return f"{share:.0f}" if share < 999.5 else f"{share / 100:.0f}x"


def _summary(plan: Plan) -> list[str]:
    helped = sum(step.helps != "none" for step in plan.steps)
    lines = [
        f"balance  {plan.balance:.3f}  the busiest rank's pairs over the mean",
        f"critical {plan.critical:.3f}  the slowest rank's pairs, summed over steps, over the mean",
        f"live     {plan.num_steps} of {plan.cp_size} steps",
        f"K/V      {kv_messages(plan)} messages a rank, forward",
    ]
    if helped:
        lines.append(f"helped   {helped} steps: queries travel to idle ranks, results travel back")
    return lines


def plot(plan: Plan, path: str | Path) -> None:
    """Draw a plan to a file: who computes what, who holds what, who works when.

    The format follows the name (``.png``, ``.svg``, ``.pdf``); equal plans give equal SVG files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: install ring-core[viz]") from error
    svg = Path(path).suffix.lower() in (".svg", ".svgz")
    with mpl.rc_context({"svg.hashsalt": "ring", "font.size": 9, "axes.titlesize": 10}):
        figure = Figure(figsize=(11, 6), layout="constrained")
        _draw(plan, figure)
        figure.savefig(path, dpi=144, metadata={"Date": None} if svg else None)


def _draw(plan: Plan, figure: Figure) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    turbo = colormaps["turbo"](np.linspace(0.06, 0.94, plan.cp_size))
    # Pale, so that black text reads on all of them; what lies under the ranks is WRONG.
    colors = ListedColormap(0.7 * turbo + 0.3).with_extremes(under="black")
    halves = figure.add_gridspec(1, 2, width_ratios=(1, 1.08), wspace=0.04)
    left = halves[0].subgridspec(2, 1, height_ratios=(1, 18))
    _draw_layout(plan, figure.add_subplot(left[0]), colors)
    _draw_mask(plan, figure.add_subplot(left[1]), colors)
    _draw_work(plan, figure.add_subplot(halves[1]))
    keys = f" against {plan.kv_seq_len:,} keys" if plan.kv_seq_len != plan.seq_len else ""
    figure.suptitle(
        f"{plan.schedule}, {plan.cp_size} ranks, {plan.seq_len:,} tokens{keys}, "
        f"{plan.mask.describe()}\n"
        f"balance {plan.balance:.3f}, critical {plan.critical:.3f}, {plan.num_steps} of "
        f"{plan.cp_size} steps live, {kv_messages(plan)} K/V messages a rank",
        fontsize=11,
    )


def _draw_layout(plan: Plan, axes: Axes, colors: Any) -> None:
    layout, pieces = plan.k_layout, _pieces(plan.k_layout)
    cells, shown, title = min(pieces, _DRAWN_CELLS), layout.seq_len, f"{layout.name}, all keys"
    if layout.stride > 1:
        cells = shown = min(layout.seq_len, max(1, 2 * _LEGEND // pieces) * pieces)
        title = f"{layout.name}, the first {shown} keys"
    ranks = _located(layout, (2 * np.arange(cells) + 1) * shown // (2 * cells))[0]
    axes.imshow(ranks[None], cmap=colors, vmin=-0.5, vmax=plan.cp_size - 0.5, aspect="auto")
    for x, rank in enumerate(ranks.tolist() if cells <= 2 * _LEGEND else []):
        axes.text(x, 0, str(rank), ha="center", va="center", fontsize=8)
    axes.set(xticks=[], yticks=[])
    axes.set_title(f"who holds what: {title}", loc="left")


def _draw_mask(plan: Plan, axes: Axes, colors: Any) -> None:
    from matplotlib.patches import Patch

    striped = plan.q_layout.stride > 1
    stripes = min(max(plan.cp_size, _CELLS), _DRAWN_CELLS)
    ranks = _sampled(plan, stripes if striped else _DRAWN_CELLS)
    image = axes.imshow(
        np.ma.masked_equal(ranks, NOBODY), cmap=colors, vmin=-0.5, vmax=plan.cp_size - 0.5,
        aspect="auto", interpolation="nearest", extent=(0, plan.kv_seq_len, plan.seq_len, 0),
    )  # fmt: skip
    title = "who computes what" + (" (stripes drawn wider than they are)" if striped else "")
    title += ", black: plan and mask disagree" if (ranks == WRONG).any() else ""
    axes.set_title(title, loc="left")
    for axis, length in ((axes.xaxis, plan.kv_seq_len), (axes.yaxis, plan.seq_len)):
        ticks = np.unique(np.arange(5) * length // 4).tolist()
        axis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set(xlabel="key", ylabel="query")
    if plan.cp_size > _LEGEND:
        bar = axes.figure.colorbar(image, ax=axes, location="bottom", aspect=40)
        bar.set_label("rank")
        return
    if not striped:
        for layout, line in ((plan.k_layout, axes.axvline), (plan.q_layout, axes.axhline)):
            for n in range(1, _pieces(layout)):
                line(n * layout.run_length, color="white", linewidth=0.5)
    handles = [Patch(color=colors(rank), label=str(rank)) for rank in range(plan.cp_size)]
    axes.legend(
        handles=handles, title="rank", loc="upper center", bbox_to_anchor=(0.5, -0.11),
        ncols=min(plan.cp_size, 8), frameon=False, handlelength=1, handleheight=1,
    )  # fmt: skip


def _draw_work(plan: Plan, axes: Axes) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    work = plan.work()
    rank_every, step_every = -(-plan.cp_size // _DRAWN), -(-plan.num_steps // _DRAWN)
    share = work[::step_every, ::rank_every].T * (100 / (work.mean() or 1))
    heat = colormaps["RdYlBu_r"](np.linspace(0, 1, 256))
    box = (-0.5, plan.num_steps - 0.5, plan.cp_size - 0.5, -0.5)
    axes.patch.set(hatch="////", edgecolor="silver", linewidth=0)
    image = axes.imshow(
        np.ma.masked_equal(share, 0), cmap=ListedColormap(0.75 * heat + 0.25), vmin=0, vmax=200,
        aspect="auto", interpolation="nearest", extent=box,
    )  # fmt: skip
    bar = axes.figure.colorbar(image, ax=axes, location="bottom", aspect=40, extend="max")
    bar.set_label("pairs a rank and step, % of the mean of all")
    if plan.cp_size <= _RANKS and plan.num_steps <= _STEPS:
        for (rank, step), value in np.ndenumerate(share):
            text = _percent(float(value)) if value else ""
            axes.text(step, rank, text, ha="center", va="center", fontsize=8)
    steps = np.linspace(0, plan.num_steps - 1, min(plan.num_steps, _STEPS)).astype(int).tolist()
    axes.set_xticks(steps, [str(plan.steps[n].shift) for n in steps])
    axes.set_yticks(np.linspace(0, plan.cp_size - 1, min(plan.cp_size, _RANKS)).astype(int))
    axes.set(xlabel="live step: how many ranks behind its K/V come from", ylabel="rank")
    idle = " (hatched: idle)" if (share == 0).any() else ""
    axes.set_title(f"who works when{idle}", loc="left")
