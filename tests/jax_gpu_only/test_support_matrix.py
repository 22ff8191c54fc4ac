"""The support matrix on the page agrees with the kernels."""

from __future__ import annotations

import pytest
from pages import check_jax_matrix

from ring_jax.tools.cli import main


def test_support_matrix_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix"]) == 0
    check_jax_matrix(capsys.readouterr().out, "triton")
