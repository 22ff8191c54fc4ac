"""Small pictures of masks, and of who computes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ring_core import LAYOUTS, Layout, Mask, head_plan, make_plan, ring_program
from ring_core.programs.grid import rank_grid
from ring_core.viz import NOBODY, computing_ranks

TOKENS = 16  # of the picture of hybrid
GALLERY, RANKS = 32, 4  # tokens and ranks of a picture in the gallery
HIDDEN, VISIBLE = "#f2f2f2", "#2b6cb0"
OF_RANKS = ("#4477aa", "#ccbb44", "#228833", "#ee6677")


def gallery(mask: Mask) -> Callable[[Path], None]:
    """A mask over 32 tokens, and which of 4 ranks computes each pair, in every layout."""

    def draw(path: Path) -> None:
        with mpl.rc_context({"svg.hashsalt": "ring", "font.size": 9, "axes.titlesize": 9}):
            figure = Figure(figsize=(10, 2.7), layout="constrained")
            panels = iter(figure.subplots(1, 1 + len(LAYOUTS)))
            tokens, axes = np.arange(GALLERY), next(panels)
            colors = ListedColormap([HIDDEN, VISIBLE])
            axes.imshow(mask.dense(tokens, tokens), cmap=colors, vmin=0, vmax=1)
            _label(axes, "who sees what", GALLERY, GALLERY)
            for layout, axes in zip(LAYOUTS, panels, strict=True):
                plan = make_plan(mask, seq_len=GALLERY, cp_size=RANKS, layout=layout)
                program = ring_program(plan)
                ranks = np.ma.masked_equal(computing_ranks(program, tokens, tokens), NOBODY)
                by_rank = ListedColormap(OF_RANKS).with_extremes(bad=HIDDEN)
                axes.imshow(ranks, cmap=by_rank, vmin=0, vmax=RANKS - 1)
                _label(axes, f"{layout}, imbalance {program.imbalance:.2f}", GALLERY, GALLERY)
                axes.set(ylabel="")
            handles = [Patch(color=color, label=str(n)) for n, color in enumerate(OF_RANKS)]
            figure.legend(
                handles=handles,
                title="computed by rank",
                ncols=RANKS,
                loc="outside lower right",
                frameon=False,
            )
            figure.savefig(path, metadata={"Date": None})

    return draw


def hybrid(*, ulysses_size: int) -> Callable[[Path], None]:
    """What each of 4 ranks holds under ``hybrid`` in ``zigzag``: tokens across, heads down.

    Before the trade it has its tokens of all heads; after it the tokens of its group, of a part of
    the heads; the ring or gather between groups brings the keys of all tokens, of that part.
    """
    grid, heads = rank_grid(RANKS, RANKS, "zigzag", ulysses_size=ulysses_size), RANKS
    layout = Layout("zigzag", TOKENS, RANKS)
    own, group, seen = (np.zeros((RANKS, heads, TOKENS), bool) for _ in range(3))
    for rank in range(RANKS):
        own[rank][:, layout.positions(rank)] = True
        part = head_plan(heads, heads, ulysses_size).q[rank % ulysses_size]
        for peer in grid.inner_ranks(rank):
            group[rank][np.ix_(part, layout.positions(peer))] = True
        seen[rank][part] = True

    def draw(path: Path) -> None:
        with mpl.rc_context({"svg.hashsalt": "ring", "font.size": 9, "axes.titlesize": 9}):
            figure = Figure(figsize=(9, 4.2), layout="constrained")
            panels = figure.subplots(RANKS, 3)
            titles = "own tokens", "after the trade in its group", "keys of the ring or gather"
            for n, (title, held) in enumerate(zip(titles, (own, group, seen), strict=True)):
                for rank, axes in enumerate(panels[:, n]):
                    axes.imshow(
                        held[rank], cmap=ListedColormap([HIDDEN, OF_RANKS[rank]]), vmin=0, vmax=1
                    )
                    _label(axes, title if rank == 0 else "", heads, TOKENS)
                    axes.set(xlabel="tokens" if rank == RANKS - 1 else "", ylabel="")
                    if n == 0:
                        axes.set_ylabel(f"rank {rank}\nheads")
            figure.savefig(path, metadata={"Date": None})

    return draw


def _label(axes: Axes, title: str, queries: int, keys: int) -> None:
    axes.set_xticks(np.arange(-0.5, keys), minor=True)
    axes.set_yticks(np.arange(-0.5, queries), minor=True)
    axes.grid(which="minor", color="white", linewidth=0.6)
    axes.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    axes.set(title=title, xlabel="keys", ylabel="queries")
