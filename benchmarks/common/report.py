"""Frame of a benchmark: its command line, its file of rows, and the machine that measured them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.common.tables import table


class UsageError(ValueError):
    """Error of a command line: what was asked, and what is possible."""


def command(
    doc: str | None, arguments: Mapping[str, dict[str, Any]], body: Callable[[Any], int],
    argv: Sequence[str] | None = None, json_path: Path | None = None,
) -> int:  # fmt: skip
    """Run a benchmark with the options of its command line, and return the exit code.

    All have ``--json``, and ``--table``, which prints the rows of a file instead.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, default=json_path, help="write the figures here, too")
    parser.add_argument("--table", type=Path, help="print the rows of a JSON as Markdown and stop")
    for name, argument in arguments.items():
        parser.add_argument(name, **argument)
    options = parser.parse_args(argv)
    if options.table:
        print(table(rows_of(options.table)))
        return 0
    try:
        return body(options)
    except UsageError as error:
        parser.error(str(error))


def parts_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the parts of a result file by name: several measurements of one machine, or one."""
    file = json.loads(path.read_text())
    parts: dict[str, dict[str, Any]] = file.get("parts", {"": file})
    return parts


def rows_of(path: Path, part: str = "") -> list[dict[str, Any]]:
    """Return the rows of a result file, or of a part of it."""
    rows: list[dict[str, Any]] = parts_of(path)[part]["rows"]
    return rows


class Report:
    """Rows measured so far, printed and written to a file, so that a run cut short leaves some.

    With ``keep`` rows that the file has already stay, and need not be measured again.
    """

    def __init__(
        self, path: Path | None, environment: Callable[[], dict[str, Any]],
        line_of: Callable[[dict[str, Any]], str] = json.dumps, *, keep: bool = False,
    ) -> None:  # fmt: skip
        self.path, self.environment, self.line_of = path, environment, line_of
        self.rows: list[dict[str, Any]] = []
        if keep and path and path.exists():
            self.rows = rows_of(path)

    def add(self, *rows: dict[str, Any]) -> None:
        """Add rows, print each, and write the file, into a new folder if need be."""
        self.rows += rows
        for row in rows:
            print(self.line_of(row), flush=True)
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            written = {"environment": self.environment(), "rows": self.rows}
            self.path.write_text(json.dumps(written, indent=1) + "\n")

    def has(self, **key: Any) -> bool:
        """Return True if there is a row with these values."""
        return any(key.items() <= row.items() for row in self.rows)


def environment(gpu: str, *libraries: str, **more: Any) -> dict[str, Any]:
    """Return the GPU, the processors, the command, and versions of libraries by distribution."""
    described = {"gpu": gpu, "cpu": _cpu(), "python": platform.python_version()}
    described["command"] = shlex.join(sys.orig_argv)
    for name in libraries:
        try:
            described[name] = version(name)
        except PackageNotFoundError:
            described[name] = "none"
    return described | more


def _cpu() -> str:
    """Return the model of this machine's processors, and how many this process may run on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{[*models, platform.processor()][0]}, {len(os.sched_getaffinity(0))} of them"


def reason_of(error: BaseException) -> str:
    """Return an error as one line: its type, and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
