"""Ignores files of this folder that another backend runs."""

from __future__ import annotations

from pathlib import Path

import pytest

ONLY = {"test_pages.py": "core", "test_performance.py": "torch"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files that only one backend runs if another one is under test."""
    only = ONLY.get(collection_path.name)
    return True if only not in (None, config.getoption("--backend")) else None
