"""Runs the kernels that read peers' memory in the interpreter, between CPU processes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from triton.runtime import interpreter

from backends.peer_memory import OnFiles
from ring_torch.transports import exchange_kernel, one_kernel


def interpret_one_kernel(patched: pytest.MonkeyPatch, folder: Path) -> None:
    """Patch the one-kernel transport: interpreted, one program per rank, memory in files."""
    OnFiles.folder = folder
    patched.setattr(one_kernel, "SymmetricMemory", OnFiles)
    patched.setattr(one_kernel, "_programs", lambda _: (1, 1))
    patched.setattr(one_kernel.ExchangeState, "_wait_last", lambda _: None)
    patched.setattr(exchange_kernel, "_now", _now)
    checking = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
    patched.setattr(interpreter.interpreter_builder, "options", checking)


def _now() -> int:
    """Return the time in nanoseconds, after a sleep that lets the awaited ranks run."""
    time.sleep(1e-3)
    return time.monotonic_ns()
