"""The error against float64 does not grow with the ring."""

from __future__ import annotations

import pytest

from benchmarks.common import numerics
from ring_core import LayoutName
from ring_core.reference.item_kernel import Precision

PRECISIONS = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_error_is_flat_in_the_ring_size(precision: Precision, layout: LayoutName) -> None:
    table = numerics.errors(precision, layout, (1, 2, 4, 8, 16))
    assert (table > 0).all()
    assert (table <= 1.25 * table[0]).all(), f"{precision} {layout}:\n{table}"


@pytest.mark.parametrize(("precision", "most"), [("float32", 2), ("bfloat16", 1.25)])
def test_error_on_many_ranks(precision: Precision, most: float) -> None:
    """64 ranks have at most twice the error of one in float32, and 1.25 times in bfloat16."""
    one_rank, many_ranks = numerics.errors(precision, "contiguous", (1, 64))
    assert (many_ranks <= most * one_rank).all(), f"{precision}: {one_rank} {many_ranks}"


def test_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert numerics.main((1, 2)) == 0
    printed = capsys.readouterr().out
    assert all(f"{precision}, causal, zigzag" in printed for precision in PRECISIONS)
    assert printed.count("\n    2 ") == 3
