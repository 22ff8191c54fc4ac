"""Time old and new code in turns, each in processes of its own, on the same GPUs.

Both stay alive and wait while the other is timed, so rounds are short and a GPU that slows down
slows both. Every other round begins with the new code. Results are compared with float32 attention
before a row is timed; a ratio is new over old, of the same round::

    python -m benchmarks.development.old_and_new --old ../before --gpus 4 --json turns.json

``--old`` is a checkout, with ``packages`` and the benchmarks of its time. ``--one-gpu`` adds the
table of options, on one GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.cases import PASSES, ROWS
from benchmarks.common.report import Report, UsageError, command, reason_of
from benchmarks.common.turns import quartiles
from benchmarks.development import timed_rows
from benchmarks.torch.methods import described

HERE = Path(__file__).parents[2]
OVER_GPUS = ("causal 8k 32/8", "causal 32k 32/8", "causal 128k 32/8")
METHOD = "zigzag/auto/auto/auto"
Timed = Callable[[dict[str, Any]], dict[str, float]]


def process_of(path: Path, script: str, argument: str) -> subprocess.Popen[str]:
    """Start a script of this tree, with the sources of another in ``PYTHONPATH``.

    Raises:
        UsageError: The path is no checkout.
    """
    sources = [str(x) for x in sorted(path.glob("packages/*/src"))]
    if not sources:
        raise UsageError(f"--old: {path} is no checkout: it has no packages/*/src")
    others = filter(None, [os.environ.get("PYTHONPATH")])  # paths of libraries come last
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sources, str(path), *others])}
    return subprocess.Popen(
        [sys.executable, "-P", script, argument], env=environment, cwd=path,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


class Tree:
    """A source tree and the process that times its rows."""

    def __init__(self, path: Path, ranks: int) -> None:
        self._process = process_of(path, timed_rows.__file__, str(ranks))

    def time(self, request: dict[str, Any]) -> dict[str, float]:
        """Return milliseconds of the passes of a row.

        Raises:
            RuntimeError: The process has ended, or could not time the row.
            OSError: The process had ended before.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:  # libraries may print there, too
            if line.startswith(timed_rows.ANSWER):
                result = json.loads(line.removeprefix(timed_rows.ANSWER))
                if "failed" in result:
                    raise RuntimeError(result["failed"])
                times: dict[str, float] = result["ms"]
                return times
        raise RuntimeError("the process has ended")

    def close(self) -> None:
        """End the process: it has no more requests."""
        self._process.communicate()


def commit_of(path: Path) -> str:
    """Return the commit of a checkout; ``no commit`` for any other folder, even within one."""
    command = ["git", "-C", str(path), "rev-parse", "--show-toplevel", "--short=8", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    top, _, commit = done.stdout.strip().partition("\n")
    return commit if commit and Path(top) == path.resolve() else "no commit"


def in_turns(old: Timed, new: Timed, request: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Time a row in both trees; return quartiles of each one's times and of their ratios."""
    trees = {"old": old, "new": new}
    with ThreadPoolExecutor() as pool:  # kernels are compiled, and results compared
        list(pool.map(lambda timed: timed(request | {"first": True}), trees.values()))
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for n in range(rounds):
        for name in trees if n % 2 == 0 else reversed(trees):
            taken[name].append(trees[name](request | {"first": False}))
    row: dict[str, Any] = {"row_in_turns": request["row"], "rounds": rounds}
    for way in PASSES:
        times = {name: [x[way] for x in by_round] for name, by_round in taken.items()}
        ratios = [b / a for a, b in zip(times["old"], times["new"], strict=True)]
        row[way] = {name: quartiles(x) for name, x in (*times.items(), ("ratio", ratios))}
        row[way]["ratios"] = sorted(ratios)
    return row


def body(options: Any) -> int:
    """Time each row; return the exit code, 1 if a row could not be timed."""
    paths = {"old": options.old.resolve(), "new": HERE}
    commits = {name: commit_of(path) for name, path in paths.items()}
    report = Report(options.json, partial(described, gpus=options.gpus, **commits))
    trees = {name: Tree(path, options.gpus) for name, path in paths.items()}
    for name in (*options.rows, *(row.name for row in ROWS if options.one_gpu)):
        request = {"row": name, "method": options.method, "seconds": options.seconds}
        try:
            row = in_turns(trees["old"].time, trees["new"].time, request, options.rounds)
        except (RuntimeError, OSError) as error:
            row = {"row_in_turns": name, "failed": reason_of(error)}
        report.add(row)
    for tree in trees.values():
        tree.close()
    return int(any("failed" in row for row in report.rows))


def main(argv: list[str] | None = None) -> int:
    """Time the rows asked for; return the exit code."""
    default = OVER_GPUS if torch.cuda.is_available() else (timed_rows.ON_CPU,)
    arguments: dict[str, dict[str, Any]] = {
        "--old": {"type": Path, "required": True, "help": "a checkout of the old code"},
        "--gpus": {"type": int, "default": torch.cuda.device_count() or 2, "help": "ranks"},
        "--rows": {"nargs": "*", "default": default, "metavar": "NAME"},
        "--one-gpu": {"action": "store_true", "help": "the table of options, too"},
        "--method": {"default": METHOD},
        "--rounds": {"type": int, "default": 12},
        "--seconds": {"type": float, "default": 0.4, "help": "for each figure of a round"},
    }
    return command(__doc__, arguments, body, argv)


if __name__ == "__main__":
    sys.exit(main())
