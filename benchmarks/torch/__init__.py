"""Benchmarks of ring-torch: ``scaling`` over GPUs, ``options`` on one; ``methods`` of both.

``model`` times a whole model, ``recurrent`` recurrent layers, ``decode`` attention over pages and
``heads`` losses; ``bench_command`` keeps what ``python -m ring_torch bench`` prints.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.common.report import UsageError, environment
from ring_core.tools.doctor import installed
from ring_torch.tools.doctor import versions


def described(*libraries: str, **more: Any) -> dict[str, Any]:
    """Return the environment: the GPU, versions of torch and its libraries, and of others."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    others = {name: installed(name) or "none" for name in libraries}
    return environment(gpu, versions() | others, **more)


def check_gpus(asked: int, least: int = 1) -> None:
    """Raise a :class:`UsageError` if this machine has fewer GPUs, or too few are asked for."""
    if not least <= asked <= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UsageError(f"--gpus {asked}: there are {count}, {least} or more are needed")
