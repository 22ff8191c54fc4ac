"""The host's cost of a repeated call over peers' memory, in calls of Python functions.

Functions of torch and of Python's frozen modules are left out: they differ between releases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import torch

from benchmarks.common.cases import Setting
from benchmarks.development import host_stubs
from benchmarks.development.host_causes import SETTINGS, STUBBED_TOKENS, Repeated

#: Folders whose functions do not count: torch's, and that of the stubs in place of launches.
LEFT_OUT = (*(str(Path(str(x.__file__)).parent) for x in (torch, host_stubs)), "<frozen")
#: The most function calls of a repeated forward, and of its backward, by setting.
MOST = ((68, 65), (75, 67))


def counted(setting: Setting) -> tuple[int, int]:
    """Return the calls of one more forward like those before, and of its backward."""
    call, calls = Repeated(setting, "cpu"), 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        name = frame.f_code.co_filename
        calls += event == "call" and not name.startswith(LEFT_OUT)

    def calls_in[T](run: Callable[[], T]) -> tuple[int, T]:
        nonlocal calls
        calls = 0
        sys.setprofile(count)
        result = run()
        sys.setprofile(None)
        return calls, result

    for _ in range(3):
        call.backward(call.forward())
    forward, out = calls_in(call.forward)
    backward, _ = calls_in(partial(call.backward, out))
    return forward, backward


def test_a_repeated_call() -> None:
    for setting, most in zip(SETTINGS, MOST, strict=True):
        run = partial(counted, replace(setting, seq_len=STUBBED_TOKENS))
        counts = host_stubs.as_stubbed_rank(1, 4, run)
        for count, limit in zip(counts, most, strict=True):
            assert count <= limit, (setting, counts)
            assert count > limit - 5, f"it makes fewer calls, {counts}: say so above"
