"""Attributes that are replaced on one instance, and set back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MISSING = object()


def replace_attribute(owner: Any, name: str, value: object) -> Callable[[], object]:
    """Set an attribute of an instance; returns what sets it back."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    if before is _MISSING:
        return lambda: delattr(owner, name)
    return lambda: setattr(owner, name, before)
