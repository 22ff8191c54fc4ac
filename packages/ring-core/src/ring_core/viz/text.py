"""Describe a ring's program in characters, for a terminal."""

from __future__ import annotations

import string
from collections.abc import Mapping
from itertools import islice

import numpy as np

from ring_core.base.arguments import check_kind, is_integer, numbers_as_python
from ring_core.layouts.layout import Layout
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

WIDEST = 1024
SHOWN_CELLS, SHOWN_RANKS, SHOWN_STEPS = 32, 16, 16
_MOST_LENGTHS = 3
_SYMBOLS = string.digits + string.ascii_letters
_COLORS = (75, 114, 179, 209, 140, 80, 222, 168, 110, 150, 216, 183)  # of 256 ANSI colours


@numbers_as_python
def describe(
    program: RingProgram, *, color: bool = False, width: int = 64, pictures: bool = True
) -> str:
    """Describe a ring's program in characters: who computes what, who holds what, who works when.

    >>> from ring_core import Mask, make_plan, ring_program, viz
    >>> program = ring_program(make_plan(Mask(causal=True), seq_len=8, cp_size=2))
    >>> print(viz.describe(program, pictures=False))
    seq_len=8 cp_size=2 layout=contiguous mask: causal
    imbalance          1.444  busiest rank's (query, key) pairs over the mean
    imbalance by step  1.444  of each step's busiest rank: a ring waits for it
    steps with work    2 of 2; others are skipped
    K/V messages       1 per rank in the forward

    Args:
        program: The program.
        color: Colour ranks with ANSI escapes.
        width: Characters the pictures may take, 8 to 1024; lines take up to 16 more.
        pictures: Draw pictures; otherwise there are the heading and the figures alone.

    Raises:
        ValueError: ``width`` below 8 or above 1024.
    """
    check_kind("program", program, RingProgram)
    check_kind("color", color, bool)
    check_kind("pictures", pictures, bool)
    if not is_integer(width) or not 8 <= width <= WIDEST:
        raise ValueError(f"width must be at least 8 characters and at most {WIDEST}, got {width!r}")
    title, figures = heading(program), [imbalance_line(program), *step_lines(program)]
    if not pictures:
        return "\n".join([title, *figures])
    plan = program.plan
    return "\n\n".join(
        "\n".join(lines)
        for lines in (
            [title],
            _mask_lines(program, color, min(SHOWN_CELLS, width // 2)),
            _layout_lines(plan, color, width),
            _work_lines(program, color, min(SHOWN_STEPS, width // 4)),
            figures,
        )
    )


def heading(program: RingProgram) -> str:
    """Return a line with a plan's lengths, ranks, layout and mask, and with its ring if special."""
    plan = program.plan
    lengths = f"seq_len={_length(plan.q_layout)}"
    if plan.kv_seq_len != plan.seq_len:
        lengths += f" kv_seq_len={_length(plan.k_layout)}"
    strategy = "" if ring_of(program.strategy).is_plain else f" strategy={program.strategy}"
    return (
        f"{lengths} cp_size={plan.cp_size} layout={plan.q_layout.name}{strategy} "
        f"mask: {plan.mask.describe()}"
    )


def _length(layout: Layout) -> str:
    """Return the number of tokens, and with padding if there is any."""
    padded = "" if layout.pad_to is None else f" (padded to {layout.pad_to})"
    return f"{layout.seq_len}{padded}"


def _symbol(plan: Plan, rank: int) -> str:
    """Return a character for a rank; with more ranks than characters, neighbours share one.

    A cell that nobody computes is ``.``, and one that the plan has wrong ``!``.
    """
    if rank < 0:
        return "." if rank == NOBODY else "!"
    return _SYMBOLS[rank // _ranks_a_symbol(plan)]


def _ranks_a_symbol(plan: Plan) -> int:
    return -(-plan.cp_size // len(_SYMBOLS))


def _in_color(text: str, rank: int, color: bool) -> str:
    if not color or rank == NOBODY:
        return text
    code = "97;41" if rank == WRONG else f"30;48;5;{_COLORS[rank % len(_COLORS)]}"
    return f"\x1b[{code}m{text}\x1b[0m"


def _mask_lines(program: RingProgram, color: bool, max_cells: int) -> list[str]:
    """Return a picture of which rank computes which (query, key) pairs."""
    plan, ranks = program.plan, ranks_of_cells(program, max_cells)
    q_size, k_size = plan.seq_len / ranks.shape[0], plan.kv_seq_len / ranks.shape[1]
    lines = [
        f"who computes what: queries down, keys across, a cell is {q_size:g} x {k_size:g}; . nobody"
    ]
    if _ranks_a_symbol(plan) > 1:
        lines.append(f"a character stands for {_ranks_a_symbol(plan)} ranks")
    if (ranks == WRONG).any():
        lines.append("! marks cells where the plan and the mask disagree")
    for row in ranks.tolist():
        cells = (_in_color(_symbol(plan, rank) + " ", rank, color) for rank in row)
        lines.append("".join(cells).rstrip())
    return lines


def _layout_lines(plan: Plan, color: bool, width: int) -> list[str]:
    """Return a strip that shows which rank holds which queries."""
    layout, pieces = plan.q_layout, count_pieces(plan.q_layout)
    if layout.stride > 1:
        index = np.arange(min(width, layout.seq_len))
        title = f"striped, the first {index.size} tokens"
    else:
        tokens = f"{layout.run_length} tokens"
        if plan.kv_seq_len != plan.seq_len:
            tokens = f"{layout.run_length} queries and {plan.k_layout.run_length} keys"
        title = f"{layout.name}, {pieces} pieces of {tokens}"
        columns = width // pieces * pieces or width
        index = (2 * np.arange(columns) + 1) * layout.seq_len // (2 * columns)
    ranks = rank_and_index(layout, index)[0].tolist()
    cells = "".join(_in_color(_symbol(plan, rank), rank, color) for rank in ranks)
    return [f"who holds what: {title}", cells]


def _work_lines(program: RingProgram, color: bool, max_steps: int) -> list[str]:
    """Return a table of how much each rank computes in each step."""
    work, cp_size = program.work(), program.plan.cp_size
    share = 100 / (work.mean() or 1)
    steps, ranks = min(program.num_steps, max_steps), min(cp_size, SHOWN_RANKS)
    total = work.sum(axis=0)[:ranks] * (share / program.num_steps)
    shifts = "".join(f"{step.shift:>4}" for step in islice(program.steps, steps))
    lines = [
        "who works when: 100 is the mean work of a rank in a step, - is idle;",
        "in step s a rank has the K/V of the rank s before it",
        f"step   {shifts}  total",
    ]
    for rank in range(ranks):
        name = _in_color(f"rank {rank:>2}", rank, color)
        cells = "".join(f"{percent(n * share):>4}" for n in work[:steps, rank].tolist())
        lines.append(f"{name}{cells}  {percent(float(total[rank])):>5}")
    left_out = ((cp_size - ranks, "ranks"), (program.num_steps - steps, "steps"))
    if counts := [f"{n} more {name}" for n, name in left_out if n]:
        lines.append(f"  ... {', '.join(counts)}")
    return lines


def percent(share: float) -> str:
    """Format a share in percent, in at most three characters, and never as 0 if there is work.

    >>> percent(0.2), percent(56.7), percent(2345)
    ('<1', '57', '23x')
    """
    if share <= 0:
        return "-"
    if share < 0.5:
        return "<1"
    return f"{share:.0f}" if share < 999.5 else f"{share / 100:.0f}x"


def figure(name: str, text: object) -> str:
    """Return a line with a figure, in the column below the others.

    >>> figure("steps with work", "2 of 2")
    'steps with work    2 of 2'
    """
    return f"{name:<18} {text}"


def found_again(name: str, by_length: Mapping[int, tuple[int, int]]) -> str:
    """Return a line with hits and misses of a cache by lengths, of most calls first.

    >>> found_again("prepared calls", {4096: (7, 1), 8192: (90, 2)})
    'prepared calls     found again/made by length: <=8,192 90/2, <=4,096 7/1'
    """
    most = sorted(by_length.items(), key=lambda item: -sum(item[1]))
    rows = [(f"<={length:,}", *counts) for length, counts in most[:_MOST_LENGTHS]]
    if rest := [counts for _, counts in most[_MOST_LENGTHS:]]:
        hits, made = (sum(x) for x in zip(*rest, strict=True))
        rows.append(("others", hits, made))
    text = ", ".join(f"{label} {hits:,}/{made:,}" for label, hits, made in rows) or "none"
    return figure(name, f"found again/made by length: {text}")


def imbalance_line(program: RingProgram) -> str:
    """Return a line with the imbalance of the ranks' work, in whatever steps they do it."""
    return figure(
        "imbalance", f"{program.imbalance:.3f}  busiest rank's (query, key) pairs over the mean"
    )


def step_lines(program: RingProgram) -> list[str]:
    """Return lines that hold where ranks run the program's steps: imbalance, steps, messages."""
    num_offloaded = sum(step.offload != "none" for step in program.steps)
    lines = [
        (
            f"imbalance by step  {program.imbalance_by_step:.3f}  of each step's "
            f"busiest rank: a ring waits for it"
        ),
        f"steps with work    {program.num_steps} of {program.plan.cp_size}; others are skipped",
        f"K/V messages       {kv_messages(program)} per rank in the forward",
    ]
    if num_offloaded:
        lines.append(
            f"offloaded steps    {num_offloaded}: queries travel to idle ranks, results travel back"
        )
    return lines
