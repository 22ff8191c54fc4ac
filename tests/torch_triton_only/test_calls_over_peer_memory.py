"""What a repeated call over peers' memory costs the host, in calls of Python functions.

Those of torch and of Python's frozen modules are left out: other releases have other ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType

from benchmarks.common.cases import Setting
from benchmarks.torch.host_causes import SETTINGS, STUBBED_TOKENS, Repeated
from benchmarks.torch.host_stubs import as_stubbed_rank

#: The most calls of a repeated forward, and of its backward, by setting.
MOST = ((74, 71), (79, 73))


def counted(setting: Setting) -> tuple[int, int]:
    """Return the calls of one more forward like those before, and of its backward."""
    call, calls = Repeated(setting, "cpu"), 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        name = frame.f_code.co_filename
        calls += event == "call" and "/torch/" not in name and not name.startswith("<frozen")

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
        counts = as_stubbed_rank(1, 4, run)
        assert counts[0] <= most[0] and counts[1] <= most[1], (setting, counts)
