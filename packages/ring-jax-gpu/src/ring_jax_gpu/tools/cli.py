"""``python -m ring_jax_gpu``: tune the kernels in plain Triton for the GPU at hand.

``tune FILE`` times blocks of other sizes, warps and stages for the chosen rows of the table, each
checked against the table's own results first, and writes the table with the fastest ones to FILE,
where all else that was tuned before stays, and so does a row that is not beaten twice.
Set ``RING_TRITON_BLOCKS=FILE`` to use it. The kernels for Hopper have no such sizes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ring_core.tools.bench import progress
from ring_core.triton.tile_configs import PASSES, default, read, written
from ring_jax_gpu.tools import tune as _tune

_DEFAULT_KERNELS = ("fwd", "bwd_dq", "bwd_dkv")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        return _tuned(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _tuned(options: argparse.Namespace) -> int:
    where, path = _tune.device(), Path(options.file)
    table = read(str(path)) if path.exists() else default()  # what was tuned before stays
    chosen = [
        row
        for row in table
        if row.kernel in options.kernels and row.itemsize in options.itemsize
        and row.head_dim in options.head_dims and row.per_score_inputs == options.per_score_inputs
    ]  # fmt: skip
    if not chosen:
        raise ValueError("the table has no such rows; see --help for what can be chosen")
    path.write_text(written(table))  # that it can be is seen now, not after minutes
    with progress(len(chosen), "row") as bar:
        for row in chosen:
            print(f"{_tune.name_of(row)}, on {where}", flush=True)
            say = print if options.verbose else lambda _: None
            seconds = _tune.timer(table, row, options.tokens, options.rounds, say)
            best, ratio = _tune.tuned(row, seconds)
            print(f"  {row.blocks} -> {best.blocks}: {ratio:.2f} times as fast", flush=True)
            table = tuple(best if x == row else x for x in table)
            path.write_text(written(table))  # a run cut short leaves what it found
            bar.update()
    print(f"written to {path}: RING_TRITON_BLOCKS={path} uses it")
    return 0


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m ring_jax_gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = found.add_subparsers(dest="command", required=True)
    add = commands.add_parser(
        "tune", help="find the fastest blocks", description=__doc__
    ).add_argument
    add("file", metavar="FILE", help="the table, JSON; one that is there is tuned further")
    add("--kernels", nargs="+", choices=PASSES, default=_DEFAULT_KERNELS)
    add("--itemsize", nargs="+", type=int, choices=(2, 4), default=(2,))
    add("--head-dims", nargs="+", type=int, default=(64, 128), help="of rows")
    add("--per-score-inputs", action="store_true", help="rows for dropout, bias and predicates")
    add("--tokens", type=_positive, default=4096)
    add("--rounds", type=_positive, default=5)
    add("--verbose", action="store_true", help="a line for each that was tried")
    return found
