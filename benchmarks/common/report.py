"""Command-line options, result files and environments of benchmarks."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.common.tables import table


def parser_of(
    description: str | None, *, json_path: Path | None = None, tables: bool = True
) -> argparse.ArgumentParser:
    """Return a parser with the options that benchmarks share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=json_path, help="write the figures here, too")
    if tables:
        text = "print the rows of a JSON as Markdown and stop"
        parser.add_argument("--table", type=Path, help=text)
    return parser


def show(path: Path) -> int:
    """Print the table of a result file; return the exit code."""
    print(table(rows_of(path)))
    return 0


def parts_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the parts of a result file by name: several measurements of one machine, or one."""
    file = json.loads(path.read_text())
    parts: dict[str, dict[str, Any]] = file.get("parts", {"": file})
    return parts


def rows_of(path: Path, part: str = "") -> list[dict[str, Any]]:
    """Return the rows of a result file, or of a part of it."""
    rows: list[dict[str, Any]] = parts_of(path)[part]["rows"]
    return rows


def write(path: Path, results: Any) -> None:
    """Write results as JSON, into a new folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


class Report:
    """Rows measured so far, written to a file after each, so that a run cut short leaves some."""

    def __init__(self, path: Path | None, environment: Callable[[], dict[str, Any]]) -> None:
        self.path, self.environment = path, environment
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Add a row, and write the file."""
        self.rows.append(row)
        self.save()

    @property
    def found(self) -> dict[str, Any]:
        """Contents of the file: the environment and the rows."""
        return {"environment": self.environment(), "rows": self.rows}

    def save(self) -> None:
        """Write the file, if a path was given."""
        if self.path:
            write(self.path, self.found)


def environment(gpu: str, *libraries: str, **more: Any) -> dict[str, Any]:
    """Return the GPU, Python's version and those of libraries, by distribution name."""
    described = {"gpu": gpu, "python": platform.python_version()}
    for name in libraries:
        try:
            described[name] = version(name)
        except PackageNotFoundError:
            described[name] = "none"
    return described | more


def reason_of(error: BaseException) -> str:
    """Return an error as one line: its type, and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
