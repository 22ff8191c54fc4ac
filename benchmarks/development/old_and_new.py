"""Time old and new code in turns, each in processes of its own, on the same GPUs.

Both stay alive and wait while the other is timed, so rounds are short and a GPU that slows down
slows both. Results are compared with float32 attention before a row is timed; a ratio is new over
old, of the same round::

    python -m benchmarks.development.old_and_new --old ../before --gpus 4 --json turns.json

``--old`` is a checkout, with ``packages`` and the benchmarks of its time. ``--one-gpu`` adds the
table of options, on one GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.cases import PASSES, ROWS
from benchmarks.common.harness import Report, command, quartiles, reason_of, take_turns
from benchmarks.development import timed_rows
from benchmarks.torch import described

HERE = Path(__file__).parents[2]
OVER_GPUS = ["causal 8k 32/8", "causal 32k 32/8", "causal 128k 32/8"]
METHOD = "zigzag/auto/auto/auto"


class Tree:
    """A source tree, and a process that runs a script of this tree with the sources of that one.

    A request is a line of JSON on its stdin. The answer is one on its stdout that begins with
    ``answer: ``, as libraries may print there, too. ``commit`` is that of a checkout, or ``no
    commit`` for any other folder, even within one.
    """

    def __init__(self, path: Path, script: str, argument: str) -> None:
        sources = [str(x) for x in sorted(path.glob("packages/*/src"))]
        if not sources:
            sys.exit(f"--old: {path} is no checkout: it has no packages/*/src")
        command = ["git", "-C", str(path), "rev-parse", "--show-toplevel", "--short=8", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        top, _, commit = done.stdout.strip().partition("\n")
        self.commit = commit if commit and Path(top) == path.resolve() else "no commit"
        others = filter(None, [os.environ.get("PYTHONPATH")])  # paths of libraries come last
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sources, str(path), *others])}
        self._process = subprocess.Popen(
            [sys.executable, "-P", script, argument], env=environment, cwd=path,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def send(self, request: Any) -> None:
        """Send a request; :meth:`answer` waits for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the answer to the oldest request that has none.

        Raises:
            RuntimeError: The process has ended.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer: "):
                answer: dict[str, Any] = json.loads(line.removeprefix("answer: "))
                return answer
        raise RuntimeError(f"{self._process.args!r} has ended")

    def close(self) -> None:
        """End the process: it has no more requests."""
        self._process.communicate()


@contextmanager
def trees(options: Any, script: str, arguments: Iterable[str]) -> Iterator[list[Tree]]:
    """Start a script, with an argument for each, in the tree of ``--old`` and in this one."""
    paths = zip((options.old.resolve(), HERE), arguments, strict=True)
    both = [Tree(path, script, argument) for path, argument in paths]
    yield both
    for tree in both:
        tree.close()


def in_turns(trees: Mapping[str, Tree], request: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Time a row in both trees; return quartiles of each one's times and of their ratios.

    Raises:
        RuntimeError: A tree could not time the row.
        OSError: A process had ended before.
    """

    def times(*asked: Tree, first: bool = False) -> list[dict[str, float]]:
        for tree in asked:
            tree.send(request | {"first": first})
        answers = [tree.answer() for tree in asked]
        if failed := [x["failed"] for x in answers if "failed" in x]:
            raise RuntimeError(failed[0])
        return [x["ms"] for x in answers]

    times(*trees.values(), first=True)  # both at once: kernels are compiled, and results compared
    taken = take_turns(trees, rounds, lambda _: 1, lambda tree, _: times(tree)[0])
    row: dict[str, Any] = {"row_in_turns": request["row"], "rounds": rounds}
    for way in PASSES:
        ms = {name: [x[way] for x in by_round] for name, by_round in taken.items()}
        ratios = [b / a for a, b in zip(ms["old"], ms["new"], strict=True)]
        row[way] = {name: quartiles(x) for name, x in (*ms.items(), ("ratio", ratios))}
        row[way]["ratios"] = sorted(ratios)
    return row


OLD = {"--old": {"type": Path, "required": True, "help": "a checkout of the old code"}}


@command(
    __doc__,
    {
        **OLD,
        "--gpus": torch.cuda.device_count() or 2,
        "--rows": {"nargs": "*", "metavar": "NAME"},
        "--one-gpu": {"action": "store_true", "help": "the table of options, too"},
        "--rounds": 12,
        "--seconds": 0.4,  # for each figure of a round
    },
)
def main(options: Any) -> int:
    """Time each row; return how many could not be timed."""
    default = OVER_GPUS if torch.cuda.is_available() else [timed_rows.ON_CPU]
    with trees(options, timed_rows.__file__, [str(options.gpus)] * 2) as (old, new):
        report = Report(options, described(old=old.commit, new=new.commit))
        for name in (options.rows or default) + [row.name for row in ROWS if options.one_gpu]:
            request = {"row": name, "method": METHOD, "seconds": options.seconds}
            try:
                row = in_turns({"old": old, "new": new}, request, options.rounds)
            except (RuntimeError, OSError) as error:
                row = {"row_in_turns": name, "failed": reason_of(error)}
            report.add(row)
    return report.failed
