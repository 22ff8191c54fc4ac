"""The kernels that read peers' memory, interpreted between processes on CPUs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from triton.runtime import interpreter

from backends.peer_memory import OnFiles
from ring_torch.transports import exchange_kernel, one_kernel


def interpret_one_kernel(patched: pytest.MonkeyPatch, folder: Path) -> None:
    """Have the kernels that read peers' memory interpreted, a program a rank, over files."""
    OnFiles.folder = folder
    patched.setattr(one_kernel, "SymmetricMemory", OnFiles)
    patched.setattr(one_kernel, "_programs", lambda _: 1)
    patched.setattr(one_kernel, "_head_programs", lambda _: 1)
    patched.setattr(one_kernel.ExchangeState, "_wait_last", lambda _: None)
    patched.setattr(exchange_kernel, "_now", _now)
    checking = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
    patched.setattr(interpreter.interpreter_builder, "options", checking)


def _now() -> int:
    """Nanoseconds; who waits leaves its core to those it waits for."""
    time.sleep(1e-3)
    return time.monotonic_ns()
