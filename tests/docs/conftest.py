"""Which files of this folder run for which backend."""

from __future__ import annotations

from pathlib import Path

import pytest

ONLY = {
    "test_docstrings.py": "core",
    "test_pages.py": "core",
    "test_performance.py": "torch",
    "test_versions.py": "core",
    "test_gallery.py": "core",
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what one backend alone runs, where that is another."""
    only = ONLY.get(collection_path.name)
    return True if only not in (None, config.getoption("--backend")) else None
