"""``python -m ring_core``: look at a plan, compare layouts, estimate what they cost.

``plan`` shows one plan or compares all layouts; ``doctor`` shows versions and tests what is
installed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from ring_core import __version__, viz
from ring_core.base.arguments import check_size
from ring_core.base.config import RING_STRATEGIES, RingStrategy
from ring_core.choose.balance import ALL_LAYOUTS, layout_for
from ring_core.cost import HARDWARE, Cost, Model, compare, hardware
from ring_core.masks.mask import Mask
from ring_core.plan.plan import make_plan
from ring_core.programs.ring import RingProgram, ring_program
from ring_core.programs.steps import pairs_of, plain_ring, ring_of
from ring_core.tools import advice, doctor
from ring_core.tools.commands import add_command
from ring_core.tools.sizes import add_each, add_mask_options, integer, mask_of

#: Defaults of ``--heads``, ``--kv-heads`` and ``--head-dim``.
MODEL_OPTIONS = {"heads": 32, "kv_heads": 8, "head_dim": 128}
_MODEL_WORDS = {"heads": "query heads", "kv_heads": "key/value heads", "head_dim": "head dim"}
DEFAULT_HARDWARE = "h200-nvlink"
DEFAULT_LAYOUT = "zigzag"  # that of ``ContextParallel``
_VERSION = f"ring-core {__version__}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code.

    It is 2 for a mistake of the user's, 1 if the doctor finds something wrong, else 0.
    """
    args = _parser().parse_args(argv)
    if args.command == "doctor":
        diagnosis = doctor.diagnose()
        print(doctor.report(diagnosis, doctor.shown, as_json=args.json))
        return 0 if diagnosis.healthy else 1
    try:
        print(_plan(args))
    except (ValueError, ImportError, OSError) as error:
        print(f"ring_core: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    """Make the parser of ``python -m ring_core``."""
    parser = argparse.ArgumentParser(
        prog="python -m ring_core",
        description="Look at how attention is divided over ranks, without any hardware.",
        epilog="example: python -m ring_core plan --seq-len 64k --cp 8",
    )
    parser.add_argument("--version", action="version", version=_VERSION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    plan = add_command(
        commands, "plan", "Show which rank computes what, and when.",
        example="python -m ring_core plan --seq-len 64k --cp 8 --layout all --window 4096,0",
        version=_VERSION,
    )  # fmt: skip
    add_mask_options(plan)
    add_each(plan, {
        "--cp": {
            "required": True, "metavar": "P", "help": "number of ranks; several to compare: 2,4,8",
        },
        "--layout": {
            "metavar": "NAME",
            "help": f"{', '.join(ALL_LAYOUTS)}, or all for a table; default: {DEFAULT_LAYOUT}",
        },
        "--strategy": {
            "choices": RING_STRATEGIES, "default": plain_ring().name, "help": "default: %(default)s",
        },
        "--png": {
            "metavar": "FILE",
            "help": "also draw the plan, or with --advise the costs, to a .png, .svg or .pdf file",
        },
        "--color": {
            "choices": ("auto", "always", "never"), "default": "auto",
            "help": "colour the ranks; default: in a terminal",
        },
        "--advise": {"action": "store_true", "help": "estimate time and memory of every layout"},
        **{
            f"--{option.replace('_', '-')}": {
                "type": int, "metavar": "N",
                "help": f"{_MODEL_WORDS[option]} of the model to estimate; default: {default}",
            }
            for option, default in MODEL_OPTIONS.items()
        },
        "--hardware": {
            "metavar": "NAME",
            "help": f"devices to estimate for: {', '.join(HARDWARE)}; default: {DEFAULT_HARDWARE}",
        },
        "--ranks-per-host": {
            "type": int, "metavar": "N",
            "help": "with --advise, also which strategy to take on hosts of so many ranks, and what each sends",
        },
    })  # fmt: skip
    report = add_command(
        commands, "doctor", "Show versions, and test what is installed.",
        example="python -m ring_core doctor --json", version=_VERSION,
    )  # fmt: skip
    report.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _plan(args: argparse.Namespace) -> str:
    """Return the text of the ``plan`` command; with ``--png`` also draw to that file."""
    named = args.layout not in (None, "all")
    ranks = [integer("--cp", n) for n in args.cp.split(",")]
    _check_options(args, named=named, several=len(ranks) > 1)
    mask = mask_of(args)
    parts = []
    if named or not (args.advise or args.layout):
        program = _one_program(args, mask, ranks[0], args.layout or DEFAULT_LAYOUT, args.strategy)
        parts.append(viz.describe(program, color=_has_color(args.color)))
        if args.png:
            viz.plot(program, args.png)
    if args.layout == "all":
        parts += [_layout_table(args, mask, n) for n in ranks]
    if args.advise:
        parts.append(_cost_text(args, mask, ranks, draw=not named))
    return "\n\n".join(parts)


def _check_options(args: argparse.Namespace, *, named: bool, several: bool) -> None:
    """Refuse options that would have no effect beside the others.

    Args:
        args: The arguments of the command line.
        named: True if ``--layout`` names one layout.
        several: True if ``--cp`` has several numbers of ranks.

    Raises:
        ValueError: An option has no effect; the message says what to do.
    """
    names = *MODEL_OPTIONS, "hardware", "ranks_per_host"
    advising = [name for name in names if getattr(args, name) is not None]
    if advising and not args.advise:
        option = f"--{advising[0].replace('_', '-')}"
        raise ValueError(
            f"{option} has no effect without --advise; add that, or leave {option} out"
        )
    if not ring_of(args.strategy).is_plain and (
        args.layout == "all" or (args.advise and not named)
    ):
        raise ValueError(
            "--strategy is that of one plan, and a table of layouts has a row for every strategy; leave "
            "it out, or name one --layout"
        )
    if args.png and args.layout == "all" and not args.advise:
        raise ValueError(
            f"--png draws one plan, or costs; pass --layout {', '.join(ALL_LAYOUTS)}, or --advise"
        )
    if several and (named or not (args.advise or args.layout)):
        raise ValueError(
            f"a plan has one number of ranks, got --cp {args.cp}; to compare several, add --layout "
            f"all or --advise"
        )


#: Explains the columns of :func:`_layout_table`.
_COLUMNS = """\
imbalance is the busiest rank's (query, key) pairs over the mean; by step, if ranks wait for each
other after each step. In offloaded steps ranks also compute for others. K/V messages are those
that each rank sends in the forward."""

#: Explains the columns of :func:`_cost_table`.
_COST_COLUMNS = """\
time is compute + exposed: the slowest rank of each step, and messages that nothing hides.
Messages and MiB are per rank; memory is that beyond the caller's tensors."""


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
        "layout/strategy",
        "imbalance",
        "imbalance by step",
        "steps with work",
        "offloaded steps",
        "K/V messages",
    )
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


def _cost_text(args: argparse.Namespace, mask: Mask, ranks: Sequence[int], *, draw: bool) -> str:
    """Return a table of costs for each number of ranks; with ``draw`` and ``--png`` draw them."""
    heads, kv_heads, head_dim = (
        default if getattr(args, name) is None else getattr(args, name)
        for name, default in MODEL_OPTIONS.items()
    )
    device = hardware(DEFAULT_HARDWARE if args.hardware is None else args.hardware)
    model = Model(heads, kv_heads, head_dim)
    costs = {
        n: compare(
            mask, seq_len=args.seq_len, kv_seq_len=args.kv_seq_len, cp_size=n, model=model,
            hardware=device,
        )
        for n in ranks
    }  # fmt: skip
    every_cost = [cost for of_layouts in costs.values() for cost in of_layouts.values()]
    if not any(isinstance(cost, Cost) for cost in every_cost):
        raise ValueError(next(iter(costs[ranks[0]].values())))
    parts = []
    for n, of_layouts in costs.items():
        head = (
            f"{args.seq_len} tokens over {n} ranks, mask: {mask.describe()}; {heads} query and "
            f"{kv_heads} key/value heads of {head_dim}, bfloat16; forward and backward"
        )
        table = _cost_table(of_layouts)
        if args.ranks_per_host is None:
            parts.append(f"{head}\n{table}")
            continue
        strategies = _strategy_text(args, mask, n, model)
        title = "layouts under strategy ring or balanced, as if all links were of one kind"
        parts += [f"{head}\n{strategies}", f"{title}\n{table}"]
    if args.png and draw:
        viz.plot_costs(
            costs, f"{args.seq_len:,} tokens, {mask.describe()}, {device.name}, modelled", args.png
        )
    return "\n\n".join(parts) + f"\n{_COST_COLUMNS}\n{device.name}: {device.source}"


def _strategy_text(args: argparse.Namespace, mask: Mask, cp_size: int, model: Model) -> str:
    """Return which strategy to take on hosts of so many ranks, and a table of all strategies.

    Raises:
        ValueError: Hosts would have unlike numbers of ranks.
    """
    layout = DEFAULT_LAYOUT if args.layout in (None, "all") else args.layout
    size = check_size("ranks_per_host", args.ranks_per_host)
    plan = _one_program(args, mask, cp_size, layout, "ring").plan
    ways, refusals = advice.sent_by_strategy(plan, model, size)
    answer = advice.advice(ways, num_hosts=cp_size // size, ranks_per_host=size, layout=layout)
    rows = [*map(advice.cells, ways), *refusals.items()]
    return f"{answer}\n\n{_table(advice.HEADER, rows)}\n{advice.COLUMNS}"


def _cost_table(costs: Mapping[str, Cost | str]) -> str:
    """Return a table with a row for each layout and strategy, and which takes the least time."""
    times = {pair: cost.time_s for pair, cost in costs.items() if isinstance(cost, Cost)}
    fastest = min(times, key=times.__getitem__, default="none of them")
    header = (
        "layout/strategy", "time ms", "compute ms", "exposed ms", "imbalance", "steps with work",
        "messages", "sent MiB", "memory MiB",
    )  # fmt: skip
    rows = [(pair, *_cost_cells(cost)) for pair, cost in costs.items()]
    return f"{_table(header, rows)}\nleast time: {fastest}"


def _cost_cells(cost: Cost | str) -> tuple[str, ...]:
    """Return the cells of a row of costs, or the one cell that says why there are none."""
    if isinstance(cost, str):
        return (cost,)
    return (
        *(f"{1e3 * s:.3f}" for s in (cost.time_s, cost.compute_s, cost.exposed_s)),
        f"{cost.imbalance:.3f}", str(cost.active_steps), str(cost.messages),
        *(f"{n / 2**20:.1f}" for n in (cost.bytes_sent, cost.memory_bytes)),
    )  # fmt: skip


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


def _has_color(choice: str) -> bool:
    return choice == "always" or (
        choice == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    )
