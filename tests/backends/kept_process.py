"""Long-lived helper processes for tests: started once, because their imports take seconds."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

Answer = list[dict[str, Any]]


def asked(program: Path, question: Any, **environment: str) -> Answer:
    """Send a JSON question to a program that runs :func:`serve`, and return its answer.

    The program compiles kernels, which a process that interprets them cannot. Another value of a
    variable of its environment starts another process.
    """
    # PYTEST_CURRENT_TEST differs in each test: it would start a new process for each.
    left_out = ("PYTEST_CURRENT_TEST", "TRITON_INTERPRET")
    kept = {name: x for name, x in os.environ.items() if name not in left_out} | environment
    kept["PYTHONPATH"] = os.pathsep.join([str(program.parents[1]), *sys.path])
    process = _started(program, tuple(sorted(kept.items())))
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, f"{program.name} ended with exit code {process.wait()}"
    answer: dict[str, Any] = json.loads(line)
    assert "failed" not in answer, answer["failed"]
    found: Answer = answer["found"]
    return found


@cache
def _started(program: Path, environment: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, str(program)],
        env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(process.communicate)
    atexit.register(process.kill)  # before; at a regular exit its libraries would warn of leaks
    return process


def serve(answer: Callable[[Any], Iterable[dict[str, Any]]]) -> None:
    """Answer each line of standard input with a line of JSON; errors are answers, too."""
    for line in sys.stdin:
        try:
            reply: dict[str, Any] = {"found": list(answer(json.loads(line)))}
        except Exception:  # noqa: BLE001 - whatever it is, who asks has to fail of it
            reply = {"failed": traceback.format_exc()}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
