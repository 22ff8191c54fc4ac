"""Time of runs on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds_of(run: Callable[[], object], calls: int, device: str) -> float:
    """Return the mean seconds of ``calls`` calls, without waiting for the GPU between them.

    It waits for the GPU before the first call and after the last one, and warms nothing up.
    """
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls
