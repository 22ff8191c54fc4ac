"""The tables of measurements are those of the measurements."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_tables_are_those_of_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, paste what ``python benchmarks/gpu.py --table FILE`` prints."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import gpu

    page = (ROOT / "docs" / "performance.md").read_text()
    tables = dict(
        re.findall(r"<!-- table of (\S+) -->\n(.*?)\n<!-- end of table -->", page, re.DOTALL)
    )
    measured = {str(path.relative_to(ROOT)) for path in ROOT.glob("benchmarks/results/h200*.json")}
    assert tables.keys() == measured
    for name, shown in tables.items():
        assert shown == gpu.table(json.loads((ROOT / name).read_text())["rows"])
