"""Frame of a benchmark: its command line, its file of rows, and the machine that measured them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.tables import line


class UsageError(ValueError):
    """Error of a command line: what was asked, and what is possible."""


def command(
    doc: str | None, arguments: Mapping[str, Any]
) -> Callable[[Callable[[Any], int]], Callable[..., int]]:
    """Return a decorator of a benchmark, which gets the options of its command line.

    An argument is what ``add_argument`` takes, or its default, which says its type. All benchmarks
    have ``--json``. What is decorated returns the exit code, and takes words in place of the
    command line's.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    for name, argument in arguments.items():
        is_default = not isinstance(argument, dict)
        options = {"type": type(argument), "default": argument} if is_default else argument
        parser.add_argument(name, **options)

    def decorated(body: Callable[[Any], int]) -> Callable[..., int]:
        def main(argv: Sequence[str] | None = None) -> int:
            try:
                return body(parser.parse_args(argv))
            except UsageError as error:
                parser.error(str(error))

        return main

    return decorated


def selected(rows: Iterable[Any], names: Sequence[str] | None) -> list[Any]:
    """Return the rows of these names, in their order, or all rows without names."""
    by_name = {row.name: row for row in rows}
    if unknown := [name for name in names or () if name not in by_name]:
        raise UsageError(f"no row is named {unknown}; there are {[*by_name]}")
    return [by_name[name] for name in names or by_name]


def parts_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the parts of a result file by name: several measurements of one machine, or one."""
    file = json.loads(path.read_text())
    parts: dict[str, dict[str, Any]] = file.get("parts", {"": file})
    return parts


class Report:
    """Rows measured so far, printed and written to a file, so that a run cut short leaves some.

    With ``keep`` rows that the file has already stay, and need not be measured again. The file
    says in which environment they were measured, and with which options.
    """

    def __init__(self, options: Any, environment: dict[str, Any], *, keep: bool = False) -> None:
        self.path: Path | None = options.json
        plain = {name: x for name, x in vars(options).items() if isinstance(x, (int, float, str))}
        self.environment = environment | plain
        self.rows: list[dict[str, Any]] = []
        if keep and self.path and self.path.exists():
            self.rows = parts_of(self.path)[""]["rows"]

    def add(self, *rows: dict[str, Any]) -> None:
        """Add rows, print each, and write the file, into a new folder if need be."""
        self.rows += rows
        for row in rows:
            print(line(row), flush=True)
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            written = {"environment": self.environment, "rows": self.rows}
            self.path.write_text(json.dumps(written, indent=1) + "\n")

    def has(self, **key: Any) -> bool:
        """Return True if there is a row with these values."""
        return any(key.items() <= row.items() for row in self.rows)

    @property
    def failed(self) -> int:
        """Number of rows that were wrong, or could not be measured."""
        return sum("failed" in row for row in self.rows)


def environment(gpu: str, versions: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """Return the GPU, the processors that this process may run on, the command, and versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [text.partition(":")[2].strip() for text in lines if text.startswith("model name")]
    cpu = f"{[*models, platform.processor()][0]}, {len(os.sched_getaffinity(0))} of them"
    return {"gpu": gpu, "cpu": cpu, "command": shlex.join(sys.orig_argv), **versions, **more}


def reason_of(error: BaseException) -> str:
    """Return an error as one line: its type, and the first line of its message."""
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
