"""What may be missing beside torch."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Whether Triton can be imported, as wherever torch comes with it."""
    return find_spec("triton") is not None
