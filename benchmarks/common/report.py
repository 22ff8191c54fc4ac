"""Command-line options, result files and environments of benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.common.cases import PASSES, Setting
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
    """Rows measured so far, written to a file after each, so that a run cut short leaves some.

    Rows that the file has already are kept, and not measured again.
    """

    def __init__(self, path: Path | None, environment: Callable[[], dict[str, Any]]) -> None:
        self.path, self.environment = path, environment
        self.rows: list[dict[str, Any]] = rows_of(path) if path and path.exists() else []

    def add(self, row: dict[str, Any]) -> None:
        """Add a row, and write the file, if a path was given."""
        self.rows.append(row)
        if self.path:
            write(self.path, {"environment": self.environment(), "rows": self.rows})

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


def rates(times: dict[str, Any], setting: Setting, shares: int) -> dict[str, Any]:
    """Return times of a setting's passes with the TFLOP/s of each of the ``shares`` GPUs."""
    return {
        key: times[key] | {"tflops": flops / shares / times[key]["ms"] / 1e9}
        for key, flops in setting.flops.items()
    }


def scaling_line(row: dict[str, Any]) -> str:
    """Return a row of a table of scaling as a line to print."""
    head = f"{row['gpus']} {row['setting']:<26} {row['method']:<18}"
    if "forward" not in row:
        return f"{head} {row.get('wrong') or row.get('failed')}"
    parts = [f"{row[way]['tflops']:6.0f} TFLOP/s {row[way]['ms']:9.3f} ms" for way in PASSES]
    return f"{head} {' | '.join(parts)} | {row['both']['peak_gib']:.2f} GiB"
