"""``python -m ring_core``: look at a plan, compare layouts, count what strategies send.

``plan`` shows one plan or compares all layouts; ``doctor`` shows versions and tests what is
installed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ring_core import viz
from ring_core.base.config import RING_STRATEGIES, RingStrategy
from ring_core.choose.balance import ALL_LAYOUTS, layout_for
from ring_core.cost import Model
from ring_core.masks.mask import Mask
from ring_core.plan.plan import make_plan
from ring_core.programs.ring import RingProgram, ring_program
from ring_core.programs.steps import pairs_of, plain_ring, ring_of
from ring_core.tools import advice, commands, doctor
from ring_core.tools.case import MASK_OPTIONS, Options, integers, mask_of, option

#: Options of ``--advise``, and their meanings and defaults; 0 are all ranks.
ADVISED = {
    "heads": ("query heads of the model", 32),
    "kv_heads": ("key/value heads of the model", 8),
    "head_dim": ("head dim of the model", 128),
    "ranks_per_host": ("ranks of each host, 0 for all", 0),
}
DEFAULT_LAYOUT = "zigzag"  # that of ``ContextParallel``

PLAN_OPTIONS: Options = {
    **MASK_OPTIONS,
    "--cp": option(
        "number of ranks; several to compare: 2,4,8", integers, "P", required=True
    ),
    "--layout": option(
        f"{', '.join(ALL_LAYOUTS)}, or all for a table; default: {DEFAULT_LAYOUT}", metavar="NAME"
    ),
    "--strategy": option(
        "default: %(default)s", choices=RING_STRATEGIES, default=plain_ring().name
    ),
    "--png": option("also draw the plan to a .png, .svg or .pdf file", metavar="FILE"),
    "--color": option(
        "colour the ranks; default: in a terminal", choices=("auto", "always", "never"),
        default="auto",
    ),
    "--advise": {
        "action": "store_true", "help": "which strategy to take, by the bytes that each sends",
    },
    **{
        f"--{name.replace('_', '-')}": option(
            f"with --advise, {words}; default: {default}", int, "N", default=argparse.SUPPRESS
        )
        for name, (words, default) in ADVISED.items()
    },
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code; see :func:`ring_core.tools.commands.main`."""
    return commands.main(
        "ring_core", "Look at how attention is divided over ranks, without any hardware.",
        (
            commands.Command(
                "plan", "Show which rank computes what, and when.", _plan, PLAN_OPTIONS,
                "--seq-len 64k --cp 8 --layout all --window 4096,0",
            ),
            commands.doctor_command(
                "Show versions, and test what is installed.", doctor.diagnose, starts_ranks=False
            ),
        ),
        argv,
    )  # fmt: skip


def _plan(args: argparse.Namespace, given: set[str]) -> tuple[str, int]:
    """Return the text of the ``plan`` command; with ``--png`` also draw to that file.

    Raises:
        ValueError: An option would have no effect beside the others, or there is no such plan.
    """
    one_plan = args.layout not in (None, "all") or not (args.advise or args.layout)
    if (advising := given & {*ADVISED}) and not args.advise:
        option = f"--{min(advising).replace('_', '-')}"
        raise ValueError(
            f"{option} has no effect without --advise; add that, or leave {option} out"
        )
    if not one_plan and (args.png or not ring_of(args.strategy).is_plain):
        raise ValueError(
            f"--png and --strategy are of one plan, and a table has many; leave them out, or pass "
            f"--layout {', '.join(ALL_LAYOUTS)}"
        )
    if one_plan and len(args.cp) > 1:
        raise ValueError(
            "a plan has one number of ranks; to compare several, add --layout all or --advise"
        )
    mask, parts = mask_of(args), []
    if one_plan:
        layout = args.layout or DEFAULT_LAYOUT
        program = _one_program(args, mask, args.cp[0], layout, args.strategy)
        in_color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        color = in_color if args.color == "auto" else args.color == "always"
        parts.append(viz.describe(program, color=color))
        if args.png:
            viz.plot(program, args.png)
    if args.layout == "all":
        parts += [_layout_table(args, mask, n) for n in args.cp]
    if args.advise:
        values = {name: default for name, (_, default) in ADVISED.items()} | vars(args)
        parts += [_advice(argparse.Namespace(**values), mask, n) for n in args.cp]
    return "\n\n".join(parts), 0


#: Explains the columns of :func:`_layout_table`.
_COLUMNS = """\
imbalance is the busiest rank's (query, key) pairs over the mean; by step, if ranks wait for each
other after each step. In offloaded steps ranks also compute for others. K/V messages are those
that each rank sends in the forward."""


def _one_program(
    args: argparse.Namespace, mask: Mask, cp_size: int, layout: str, strategy: RingStrategy
) -> RingProgram:
    """Make the program of one layout, by its name, and one strategy."""
    sizes = {"seq_len": args.seq_len, "cp_size": cp_size, "kv_seq_len": args.kv_seq_len}
    return ring_program(
        make_plan(mask, layout=layout_for(layout, mask, **sizes), **sizes), strategy
    )


def _layout_table(args: argparse.Namespace, mask: Mask, cp_size: int) -> str:
    """Return a table with a row for each layout and strategy, and a line that explains columns."""
    header = (
        "layout/strategy", "imbalance", "imbalance by step", "steps with work", "offloaded steps",
        "K/V messages",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    errors: list[ValueError] = []
    for layout, strategy in pairs_of(ALL_LAYOUTS):
        try:
            program = _one_program(args, mask, cp_size, layout, strategy)
        except ValueError as error:
            errors.append(error)
            rows.append((f"{layout}/{strategy}", str(error)))
            continue
        rows.append((
            f"{layout}/{strategy}", f"{program.imbalance:.3f}",
            f"{program.imbalance_by_step:.3f}", f"{program.num_steps} of {cp_size}",
            str(sum(step.offload != "none" for step in program.steps)),
            str(viz.kv_messages(program)),
        ))  # fmt: skip
    if len(errors) == len(rows):
        raise errors[0]
    return f"{_table(header, rows)}\n{_COLUMNS}"


def _advice(args: argparse.Namespace, mask: Mask, cp_size: int) -> str:
    """Return which strategy to take, and a table of what each sends."""
    model = Model(args.heads, args.kv_heads, args.head_dim)
    size = args.ranks_per_host or cp_size
    layout = DEFAULT_LAYOUT if args.layout in (None, "all") else args.layout
    plan = _one_program(args, mask, cp_size, layout, plain_ring().name).plan
    ways, refusals = advice.sent_by_strategy(plan, model, size)
    answer = advice.advice(ways, num_hosts=cp_size // size, ranks_per_host=size, layout=layout)
    rows = [*(way.cells for way in ways), *refusals.items()]
    return (
        f"{args.seq_len} tokens over {cp_size} ranks, mask: {mask.describe()}; {args.heads} query and "
        f"{args.kv_heads} key/value heads of {args.head_dim}, bfloat16\n{answer}\n\n"
        f"{_table(advice.HEADER, rows)}\n{advice.COLUMNS}"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of aligned columns; a row of two cells is a name and a remark."""
    full = [row for row in rows if len(row) == len(header)]
    sizes = [max(map(len, column)) for column in zip(header, *full, strict=True)]
    sizes[0] = max(len(row[0]) for row in (header, *rows))
    lines = []
    for row in (header, *rows):
        cells = row[1:]
        if len(row) == len(header):
            cells = [cell.rjust(width) for cell, width in zip(cells, sizes[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(sizes[0]), *cells]))
    return "\n".join(lines)
