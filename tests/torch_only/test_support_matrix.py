"""The support matrix in the documentation is the one that the kernels print."""

from __future__ import annotations

from pathlib import Path

import pytest

from ring_torch.tools.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "support-matrix.md"


def test_support_matrix_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """The page holds the output of ``python -m ring_torch matrix``; paste it there to fix this."""
    assert main(["matrix"]) == 0
    printed = capsys.readouterr().out.strip()
    shown = PAGE.read_text().split("<!-- support matrix -->")[1]
    assert shown.split("<!-- end of support matrix -->")[0].strip() == printed
