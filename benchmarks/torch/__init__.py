"""Benchmarks of ring-torch: over GPUs, on one, of a model, recurrent layers and decoding."""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks.common.harness import environment
from ring_core.tools.doctor import installed
from ring_torch.tools.doctor import versions


def described(*libraries: str, **more: Any) -> dict[str, Any]:
    """Return the environment: the GPU, versions of torch and its libraries, and of others."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    others = {name: installed(name) or "none" for name in libraries}
    return environment(gpu, versions() | others, **more)


def check_gpus(asked: int, least: int = 1) -> None:
    """Exit if this machine has fewer GPUs than are asked for, or too few are."""
    if not least <= asked <= (count := torch.cuda.device_count()):
        sys.exit(f"--gpus {asked}: there are {count}, {least} or more are needed")
