"""``python -m ring_core``: look at a plan, compare layouts, estimate what they cost.

``plan`` shows one plan or compares all; ``doctor`` shows versions and tests what is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ring_core import __version__, viz
from ring_core.base.config import RING_STRATEGIES, RingStrategy, pairs_of
from ring_core.choose.balance import ALL_LAYOUTS, layout_for
from ring_core.cost import HARDWARE, Cost, Model, compare, hardware
from ring_core.masks.mask import Mask, Window
from ring_core.plan.plan import make_plan
from ring_core.programs.ring import RingProgram, ring_program
from ring_core.tools import doctor
from ring_core.tools.sizes import size

MODEL_OPTIONS = {"heads": 32, "kv_heads": 8, "head_dim": 128}
DEFAULT_HARDWARE = "h200-nvlink"
DEFAULT_LAYOUT = "zigzag"  # that of ``ContextParallel``


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for what the user got wrong.

    It is 1 where the doctor finds something wrong.
    """
    args = _parser().parse_args(argv)
    if args.command == "doctor":
        found = doctor.diagnose()
        facts: dict[str, Any] = asdict(found) | {"healthy": found.healthy}
        print(json.dumps(facts, indent=2) if args.json else doctor.shown(found))
        return 0 if found.healthy else 1
    try:
        print(_plan(args))
    except (ValueError, ImportError, OSError) as error:
        print(f"ring_core: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ring_core", description="Look at ring plans.")
    parser.add_argument("--version", action="version", version=f"ring-core {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    add = commands.add_parser("plan", help="show who computes what, and when").add_argument
    add("--seq-len", type=size, required=True, metavar="N", help="queries, e.g. 65536 or 64k")
    add("--kv-seq-len", type=size, metavar="N", help="keys, over all ranks, if not as many")
    add("--cp", required=True, metavar="P", help="ranks; several to compare: 2,4,8")
    add("--layout", help=f"{', '.join(ALL_LAYOUTS)} (default {DEFAULT_LAYOUT}), or all for a table")
    add(
        "--strategy",
        choices=RING_STRATEGIES,
        default=RING_STRATEGIES[0],
        help="default: %(default)s",
    )
    add("--causal", action=argparse.BooleanOptionalAction, default=True, help="default: causal")
    add("--window", metavar="LEFT,RIGHT", help="e.g. 4096 or 4096,0; or none")
    add("--chunk-size", type=size, metavar="N", help="queries see their own chunk only")
    add("--cu-seqlens", metavar="0,...,N", help="offsets of packed documents")
    add("--png", metavar="FILE", help="draw the plan, or the costs, as well (also .svg, .pdf)")
    add("--color", choices=("auto", "always", "never"), default="auto")
    add("--advise", action="store_true", help="what every layout would cost")
    for option, default in MODEL_OPTIONS.items():
        add(
            f"--{option.replace('_', '-')}", type=int, metavar="N",
            help=f"to advise on; default {default}",
        )  # fmt: skip
    add("--hardware", help=f"{', '.join(HARDWARE)}; default {DEFAULT_HARDWARE}")
    report = commands.add_parser("doctor", help="show versions, and test what is installed")
    report.add_argument("--json", action="store_true", help="for programs")
    return parser


def _plan(args: argparse.Namespace) -> str:
    named = args.layout not in (None, "all")
    ranks = [_integer("--cp", n) for n in args.cp.split(",")]
    _check_options(args, named=named, several=len(ranks) > 1)
    mask = Mask(
        causal=args.causal,
        window=_window(args.window),
        chunk_size=args.chunk_size,
        cu_seqlens=_offsets(args.cu_seqlens),
    )
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
    given = [name for name in (*MODEL_OPTIONS, "hardware") if getattr(args, name) is not None]
    if given and not args.advise:
        raise ValueError(f"--{given[0].replace('_', '-')} means nothing without --advise")
    if args.strategy != RING_STRATEGIES[0] and (
        args.layout == "all" or (args.advise and not named)
    ):
        raise ValueError("--strategy is of one plan; a table of layouts has every strategy")
    if args.png and args.layout == "all" and not args.advise:
        raise ValueError(
            f"--png draws one plan, or costs; pass --layout {', '.join(ALL_LAYOUTS)}, or --advise"
        )
    if several and (named or not (args.advise or args.layout)):
        raise ValueError(
            f"one plan is of one number of ranks, got --cp {args.cp}; several are compared with "
            f"--layout all or --advise"
        )


def _one_program(
    args: argparse.Namespace, mask: Mask, cp_size: int, layout: str, strategy: RingStrategy
) -> RingProgram:
    sizes = {"seq_len": args.seq_len, "cp_size": cp_size, "kv_seq_len": args.kv_seq_len}
    return ring_program(
        make_plan(mask, layout=layout_for(layout, mask, **sizes), **sizes), strategy
    )


def _layout_table(args: argparse.Namespace, mask: Mask, cp_size: int) -> str:
    header = (
        "layout/strategy",
        "imbalance",
        "lockstep imbalance",
        "live steps",
        "helped",
        "K/V messages",
    )
    rows: list[tuple[str, ...]] = []
    found: list[ValueError] = []
    for layout, strategy in pairs_of(ALL_LAYOUTS):
        try:
            program = _one_program(args, mask, cp_size, layout, strategy)
        except ValueError as error:
            found.append(error)
            rows.append((f"{layout}/{strategy}", str(error)))
            continue
        rows.append((
            f"{layout}/{strategy}", f"{program.imbalance:.3f}",
            f"{program.lockstep_imbalance:.3f}", f"{program.num_steps} of {cp_size}",
            str(sum(step.helps != "none" for step in program.steps)),
            str(viz.kv_messages(program)),
        ))  # fmt: skip
    if len(found) == len(rows):
        raise found[0]
    return _table(header, rows)


def _cost_text(args: argparse.Namespace, mask: Mask, ranks: Sequence[int], *, draw: bool) -> str:
    """A table of costs for each number of ranks; drawn as well if ``draw`` and a file is named."""
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
    if not any(isinstance(cost, Cost) for each in costs.values() for cost in each.values()):
        raise ValueError(next(iter(costs[ranks[0]].values())))
    parts = [
        f"{args.seq_len} tokens over {n} ranks, mask: {mask.describe()}; {heads} query and {kv_heads} "
        f"key/value heads of {head_dim}, bfloat16; forward and backward\n{_cost_table(of_pairs)}"
        for n, of_pairs in costs.items()
    ]
    if args.png and draw:
        viz.plot_costs(
            costs, f"{args.seq_len:,} tokens, {mask.describe()}, {device.name}, modelled", args.png
        )
    return "\n\n".join(parts) + f"\n{device.name}: {device.source}"


def _cost_table(costs: Mapping[str, Cost | str]) -> str:
    times = {pair: cost.time_s for pair, cost in costs.items() if isinstance(cost, Cost)}
    least = min(times, key=times.__getitem__, default="none of them")
    header = (
        "layout/strategy", "time ms", "compute ms", "exposed ms", "imbalance", "live steps", "messages",
        "sent MiB", "memory MiB",
    )  # fmt: skip
    rows = [(pair, *_cost_cells(cost)) for pair, cost in costs.items()]
    return f"{_table(header, rows)}\nleast time: {least}"


def _cost_cells(cost: Cost | str) -> tuple[str, ...]:
    if isinstance(cost, str):
        return (cost,)
    return (
        *(f"{1e3 * s:.3f}" for s in (cost.time_s, cost.compute_s, cost.exposed_s)),
        f"{cost.imbalance:.3f}", str(cost.active_steps), str(cost.messages),
        *(f"{n / 2**20:.1f}" for n in (cost.bytes_sent, cost.memory_bytes)),
    )  # fmt: skip


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width; a row of two cells is a name and a remark."""
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


def _window(text: str | None) -> Window | None:
    """``LEFT`` or ``LEFT,RIGHT``, keys besides a query's own."""
    if text is None:
        return None
    try:
        sides = [None if x.strip().lower() == "none" else size(x) for x in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--window: {error}") from error
    if len(sides) > 2:
        raise ValueError(
            f"--window: {text!r} is no LEFT or LEFT,RIGHT such as 4096, 4096,0 or 4096,none"
        )
    return sides[0], sides[1] if len(sides) == 2 else 0


def _offsets(text: str | None) -> tuple[int, ...] | None:
    return None if text is None else tuple(_integer("--cu-seqlens", n) for n in text.split(","))


def _integer(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{option} takes integers separated by commas, got {text!r}") from None


def _has_color(choice: str) -> bool:
    return choice == "always" or (
        choice == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    )
