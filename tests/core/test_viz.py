"""Pictures show what the plan computes, and a wrong plan looks wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from cases import diagonals
from matplotlib.image import imread
from plans import all_items, place, plan_of, shown

from ring_core import Mask, RingProgram, balanced_layout, ring_program, viz
from ring_core.base.config import RingStrategy

PACKED = Mask(causal=True, cu_seqlens=(0, 5, 29, 48))


def ring(*sizes: Any, strategy: RingStrategy = "ring", **more: Any) -> RingProgram:
    return ring_program(plan_of(*sizes, **more), strategy)


PROGRAMS = [
    ring(Mask(), 8, 1),
    ring(Mask(causal=True), 48, 4),
    ring(Mask(causal=True), 48, 4, layout="zigzag"),
    ring(Mask(causal=True), 48, 4, layout="striped"),
    ring(Mask(causal=True), 48, 4, strategy="balanced"),
    ring(Mask(causal=True), 45, 5, strategy="balanced"),
    ring(Mask(window=(7, 3)), 40, 4, strategy="balanced"),
    ring(Mask(window=(5, 2), chunk_size=16), 32, 4, keys=48),
    ring(PACKED, 48, 4, layout="zigzag"),
    ring(PACKED, 48, 4, strategy="balanced"),
    ring(PACKED, 48, 4, layout=balanced_layout(PACKED, seq_len=48, cp_size=4)),
    ring(Mask(chunk_size=10), 48, 4, layout="striped"),
    ring(Mask(True, predicate=diagonals), 600, 2, strategy="balanced"),
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_picture_is_what_the_ranks_compute(program: RingProgram) -> None:
    plan = program.plan
    ranks = np.full((plan.seq_len, plan.kv_seq_len), viz.NOBODY)
    for rank, _, item in all_items(program):
        where = place(plan, item)
        ranks[where] = np.where(shown(plan, item), rank, ranks[where])
    q, k = np.arange(plan.seq_len), np.arange(plan.kv_seq_len)
    np.testing.assert_array_equal(viz.computing_ranks(program, q, k), ranks)
    assert "!" not in viz.describe(program), "no cell is in doubt"


BALANCED = """\
seq_len=8 cp_size=2 layout=contiguous strategy=balanced mask: causal

who computes what: queries down, keys across, a cell is 1 x 1; . nobody
0 . . . . . . .
0 0 . . . . . .
0 0 0 . . . . .
0 0 0 0 . . . .
1 1 1 1 1 . . .
1 1 1 1 1 1 . .
0 0 0 0 1 1 1 .
0 0 0 0 1 1 1 1

who holds what: contiguous, 2 pieces of 4 tokens
0000000011111111

who works when: 100 is the mean work of a rank in a step, - is idle;
in step s a rank has the K/V of the rank s before it
step      0   1  total
rank  0 111  89    100
rank  1 111  89    100

imbalance          1.000  busiest rank's (query, key) pairs over the mean
imbalance by step  1.000  of each step's busiest rank: a ring waits for it
steps with work    2 of 2; others are skipped
K/V messages       1 per rank in the forward
offloaded steps    1: queries travel to idle ranks, results travel back"""


def test_describe_says_it_all() -> None:
    program = ring(Mask(causal=True), 8, 2, strategy="balanced")
    assert viz.describe(program, width=16) == BALANCED
    lines = viz.describe(ring(Mask(causal=True), 65536, 64), pictures=False).splitlines()
    assert len(lines) <= 8 and max(map(len, lines)) <= 80


def test_work_shows_idle_ranks_shares_and_dropped_steps() -> None:
    # Four keys a rank, a window of one: each rank needs one key of the rank before it. 7 pairs of
    # its own each, 1 of the neighbour's: the mean of 8 cells is 31 / 8.
    text = viz.describe(ring(Mask(window=(1, 0)), 16, 4))
    rows = ["rank  0 181   -     90", *(f"rank  {n} 181  26    103" for n in (1, 2, 3))]
    assert "\n".join(["step      0   1  total", *rows]) in text
    assert "\nsteps with work    2 of 4; others are skipped\n" in text
    assert "\nK/V messages       1 per rank in the forward" in text


def test_a_thin_band_is_not_lost() -> None:
    rows = mask_rows(viz.describe(ring(Mask(window=(0, 0)), 1 << 20, 4)))
    shown = [[n for n, cell in enumerate(row.split()) if cell != "."] for row in rows]
    assert shown == [[n] for n in range(len(rows))]


def test_pictures_are_as_wide_as_is_allowed() -> None:
    text = viz.describe(ring(Mask(causal=True), 256, 128))
    assert "a character stands for 3 ranks" in text
    assert "  ... 112 more ranks, 112 more steps" in text
    # The last of 32 queries is near token 252, of rank 126: the 43rd character.
    assert mask_rows(text)[-1][0] == "G"
    assert max(map(len, text.splitlines())) <= 80
    narrow = viz.describe(ring(Mask(causal=True), 4096, 16), width=20)
    assert max(map(len, mask_rows(narrow))) <= 20
    assert "  ... 11 more steps\n" in narrow
    with pytest.raises(ValueError, match="width must be at least 8"):
        viz.describe(RIGHT, width=7)


def changed(program: RingProgram, *live: Any, **changes: Any) -> RingProgram:
    """Return a program with other live steps, other work in them, or changes in its plan."""
    wrong = replace(program, _items={}, plan=replace(program.plan, **changes))
    vars(wrong)["_live"] = *live, *(program.steps, program.work())[len(live) :]
    return wrong


RIGHT, HELPED = PROGRAMS[1], PROGRAMS[4]
ZIGZAG, WIDER = PROGRAMS[2].plan.geometry, Mask(causal=True, window=(10, 0))
WRONG = {
    "a step dropped": changed(RIGHT, RIGHT.steps[:-1], RIGHT.work()[:-1]),
    "a step twice": changed(RIGHT, (*RIGHT.steps, RIGHT.steps[1])),
    "window off by one": changed(ring(Mask(causal=True, window=(9, 0)), 64, 4), mask=WIDER),
    "bands of another layout": changed(RIGHT, geometry=ZIGZAG),
    "no help where it is due": changed(HELPED, RIGHT.steps[:3]),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_plan_looks_wrong(fault: str, tmp_path: Path) -> None:
    text = viz.describe(WRONG[fault])
    assert "! marks cells where the plan and the mask disagree" in text
    assert any("!" in row for row in mask_rows(text))
    assert "black: plan and mask disagree" in plotted_text(WRONG[fault], tmp_path)


def mask_rows(text: str) -> list[str]:
    """Return the lines of the mask's picture."""
    paragraph = text.split("\n\n")[1].splitlines()
    return [line for line in paragraph if all(len(cell) == 1 for cell in line.split())]


def test_plot_says_what_the_plan_says(tmp_path: Path) -> None:
    text = plotted_text(ring(Mask(causal=True), 4096, 4), tmp_path)
    assert "contiguous, 4 ranks, 4,096 tokens, causal" in text and "hatched: idle" in text
    assert "imbalance 1.750, by step 1.750, 4 of 4 steps with work, 3 K/V messages per rank" in text
    assert "disagree" not in text and "<dc:date>" not in text
    zigzag = ring(Mask(causal=True), 4096, 4, layout="zigzag")
    assert "hatched: idle" not in plotted_text(zigzag, tmp_path)
    viz.plot(ring(Mask(causal=True), 4096, 32, strategy="balanced"), tmp_path / "plan.png")
    picture = imread(tmp_path / "plan.png")
    assert picture.shape[:2] == (864, 1584)
    assert np.unique((255 * picture[..., :3]).round() @ [1, 256, 65536]).size > 32


def plotted_text(program: RingProgram, folder: Path) -> str:
    with mpl.rc_context({"svg.fonttype": "none"}):
        viz.plot(program, folder / "plan.svg")
    return (folder / "plan.svg").read_text()


def test_plot_needs_no_pyplot_and_leaves_settings_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without matplotlib it says how to install it from a clone, as no index has the packages."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    before = mpl.rcParams["font.size"], mpl.rcParams["svg.hashsalt"]
    viz.plot(PROGRAMS[1], tmp_path / "plan.pdf")
    assert (mpl.rcParams["font.size"], mpl.rcParams["svg.hashsalt"]) == before
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    advice = r"pip install matplotlib.*'packages/ring-core\[viz\]'"
    with pytest.raises(ImportError, match=advice):
        viz.plot(PROGRAMS[1], tmp_path / "plan.pdf")
    assert (Path(__file__).parents[2] / "packages/ring-core/pyproject.toml").exists()
