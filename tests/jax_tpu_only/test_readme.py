"""What the README says of the kernels is what the kernels say."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import columns_of

from ring_jax.__main__ import main

README = Path(__file__).parents[2] / "README.md"


def test_support_matrix_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails, paste what ``python -m ring_jax matrix`` prints with all of them installed."""
    assert main(["matrix"]) == 0
    printed = columns_of(capsys.readouterr().out.strip())
    shown = README.read_text().split("<!-- jax support matrix -->")[1]
    columns = columns_of(shown.split("<!-- end of jax support matrix -->")[0].strip())
    assert list(columns) == ["", "`xla`", "`pallas`", "`triton`"]
    assert list(printed) == ["", "`xla`", "`pallas`"]
    for name, cells in printed.items():
        assert columns[name] == cells
        assert name == "" or all(cells)
