"""Imports of optional dependencies, which may be missing: Triton."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Return True if Triton can be imported. Builds of torch for GPUs on Linux bring it."""
    return find_spec("triton") is not None
