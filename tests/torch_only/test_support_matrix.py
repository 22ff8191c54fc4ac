"""What the page says of the kernels is what the kernels say."""

from __future__ import annotations

from pathlib import Path

import pytest

from ring_torch.tools.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "support-matrix.md"


def test_support_matrix_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails, paste what ``python -m ring_torch matrix`` prints between the two comments."""
    assert main(["matrix"]) == 0
    printed = capsys.readouterr().out.strip()
    shown = PAGE.read_text().split("<!-- support matrix -->")[1]
    assert shown.split("<!-- end of support matrix -->")[0].strip() == printed
