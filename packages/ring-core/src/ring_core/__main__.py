"""``python -m ring_core``: look at a plan, compare schedules, estimate what they cost."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import cast

from ring_core import __version__, viz
from ring_core._mask import Mask, Window
from ring_core._plan import Plan, make_plan
from ring_core._schedule import SCHEDULES, ScheduleName
from ring_core.cost import HARDWARE, Cost, Hardware, Model, compare, hardware

MODEL_OPTIONS = {"heads": 32, "kv_heads": 8, "head_dim": 128}
DEFAULT_HARDWARE = "h200-nvlink"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for what the user got wrong."""
    args = _parser().parse_args(argv)
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
    plan = commands.add_parser("plan", help="show who computes what, and when")
    add = plan.add_argument
    add("--seq-len", type=int, required=True, metavar="N", help="queries, over all ranks")
    add("--kv-seq-len", type=int, metavar="N", help="keys, over all ranks, if not as many")
    add("--cp", type=int, required=True, metavar="P", help="ranks")
    add("--schedule", help=f"{', '.join(SCHEDULES)} (default plain), or all for a table")
    add("--causal", action=argparse.BooleanOptionalAction, default=True, help="default: causal")
    add("--window", metavar="LEFT,RIGHT", help="e.g. 4096,0; a side may be none")
    add("--chunk-size", type=int, metavar="N", help="queries see their own chunk only")
    add("--cu-seqlens", metavar="0,...,N", help="offsets of packed documents")
    add("--png", metavar="FILE", help="draw the plan to a file as well (also .svg, .pdf)")
    add("--color", choices=("auto", "always", "never"), default="auto")
    add("--advise", action="store_true", help="what every schedule would cost")
    for option, default in MODEL_OPTIONS.items():
        flag, words = f"--{option.replace('_', '-')}", f"to advise on; default {default}"
        add(flag, type=int, metavar="N", help=words)
    add("--hardware", help=f"{', '.join(HARDWARE)}; default {DEFAULT_HARDWARE}")
    return parser


def _plan(args: argparse.Namespace) -> str:
    """What the ``plan`` command prints."""
    named = args.schedule not in (None, "all")
    model_options = [*MODEL_OPTIONS, "hardware"]
    given = [name for name in model_options if getattr(args, name) is not None]
    if given and not args.advise:
        raise ValueError(f"--{given[0].replace('_', '-')} means nothing without --advise")
    if args.png and not named and (args.advise or args.schedule == "all"):
        raise ValueError(f"--png draws one plan; pass --schedule {', '.join(SCHEDULES)}")
    mask = Mask(
        causal=args.causal,
        window=_window(args.window),
        chunk_size=args.chunk_size,
        cu_seqlens=_offsets(args.cu_seqlens),
    )
    parts = []
    if named or not (args.advise or args.schedule):
        plan = _one_plan(args, mask, args.schedule or "plain")
        parts.append(viz.describe(plan, color=_colored(args.color)))
        if args.png:
            viz.plot(plan, args.png)
    if args.schedule == "all":
        parts.append(_schedule_table(args, mask))
    if args.advise:
        parts.append(_cost_table(args, mask))
    return "\n\n".join(parts)


def _one_plan(args: argparse.Namespace, mask: Mask, schedule: str) -> Plan:
    return make_plan(
        mask,
        seq_len=args.seq_len,
        cp_size=args.cp,
        schedule=cast("ScheduleName", schedule),  # make_plan refuses what is none
        kv_seq_len=args.kv_seq_len,
    )


def _schedule_table(args: argparse.Namespace, mask: Mask) -> str:
    header = ("schedule", "balance", "critical", "live steps", "helped", "K/V messages")
    rows: list[tuple[str, ...]] = []
    refused: list[ValueError] = []
    for schedule in SCHEDULES:
        try:
            plan = _one_plan(args, mask, schedule)
        except ValueError as error:
            refused.append(error)
            rows.append((schedule, str(error)))
            continue
        live = f"{plan.num_steps} of {plan.cp_size}"
        helped = sum(step.helps != "none" for step in plan.steps)
        figures = (f"{plan.balance:.3f}", f"{plan.critical:.3f}", live, str(helped))
        rows.append((schedule, *figures, str(viz.kv_messages(plan))))
    if len(refused) == len(SCHEDULES):
        raise refused[0]
    return _table(header, rows)


def _cost_table(args: argparse.Namespace, mask: Mask) -> str:
    given = {name: getattr(args, name) for name in MODEL_OPTIONS}
    heads, kv_heads, head_dim = (
        MODEL_OPTIONS[name] if value is None else value for name, value in given.items()
    )
    device = hardware(DEFAULT_HARDWARE if args.hardware is None else args.hardware)
    costs = _costs(args, mask, Model(heads, kv_heads, head_dim), device)
    times = {schedule: cost.time_s for schedule, cost in costs.items() if isinstance(cost, Cost)}
    if not times:
        raise ValueError(next(iter(costs.values())))
    header = (
        "schedule", "time ms", "compute ms", "exposed ms", "sent MiB", "messages", "memory MiB",
    )  # fmt: skip
    rows = [(schedule, *_cost_cells(cost)) for schedule, cost in costs.items()]
    heading = (
        f"{args.seq_len} tokens over {args.cp} ranks, mask: {mask.describe()}; {heads} query and "
        f"{kv_heads} key/value heads of {head_dim}, bfloat16; forward and backward"
    )
    least = f"least time: {min(times, key=times.__getitem__)}"
    return "\n".join((heading, _table(header, rows), least, f"{device.name}: {device.source}"))


def _costs(
    args: argparse.Namespace, mask: Mask, model: Model, device: Hardware
) -> dict[str, Cost | str]:
    return compare(
        mask,
        seq_len=args.seq_len,
        cp_size=args.cp,
        model=model,
        hardware=device,
        kv_seq_len=args.kv_seq_len,
    )


def _cost_cells(cost: Cost | str) -> tuple[str, ...]:
    if isinstance(cost, str):
        return (cost,)
    times = (f"{1e3 * s:.3f}" for s in (cost.time_s, cost.compute_s, cost.exposed_s))
    sent, memory = (f"{n / 2**20:.1f}" for n in (cost.bytes_sent, cost.memory_bytes))
    return (*times, sent, str(cost.messages), memory)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width; a row of two cells is a name and a remark."""
    full = [row for row in rows if len(row) == len(header)]
    widths = [max(map(len, column)) for column in zip(header, *full, strict=True)]
    widths[0] = max(len(row[0]) for row in (header, *rows))
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0])]
        if len(row) == len(header):
            cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        else:
            cells.append(row[1])
        lines.append("  ".join(cells))
    return "\n".join(lines)


def _window(text: str | None) -> Window | None:
    if text is None:
        return None
    words = [word.strip().lower() for word in text.split(",")]
    sides = [None if word == "none" else _integer("--window", word) for word in words]
    if len(sides) != 2:
        raise ValueError(f"--window takes LEFT,RIGHT, e.g. 4096,0 or 4096,none; got {text!r}")
    return sides[0], sides[1]


def _offsets(text: str | None) -> tuple[int, ...] | None:
    return None if text is None else tuple(_integer("--cu-seqlens", n) for n in text.split(","))


def _integer(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{option} takes integers separated by commas, got {text!r}") from None


def _colored(choice: str) -> bool:
    if choice == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return choice == "always"


if __name__ == "__main__":
    sys.exit(main())
