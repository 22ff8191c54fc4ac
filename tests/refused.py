"""Expects the error of a call in a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refused(
    message: str, call: Callable[..., Any], *args: Any, error: Any = ValueError, **kwargs: Any
) -> None:
    """Check that a call raises an error whose message has a match of a pattern."""
    with pytest.raises(error, match=message):
        call(*args, **kwargs)
