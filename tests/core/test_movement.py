"""Plans of movements and of documents' runs take little, however long the sequence is.

What they move, and what is computed of it, is compared with whole sequences in the tests of torch
and JAX.
"""

from __future__ import annotations

import pytest

from ring_core import Layout, LayoutSpec
from ring_core.movement import relayout, shift


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_a_plan_is_as_large_as_its_runs(name: LayoutSpec) -> None:
    """Plans store runs as slices: a list of the tokens of such a sequence would not fit."""
    layout = Layout(name, 1 << 39, 8)
    for movement in (shift(layout, 1), shift(layout, -12345), relayout(layout, layout)):
        for rank in range(8):
            part = movement.exchange(rank)
            assert sum(len(x.length) for x in part[:3]) <= 8
    offsets = tuple(range(0, (1 << 39) + 1, 1 << 29))
    part = shift(layout, 1, offsets).exchange(3)
    assert sum(len(x.length) for x in part[:3]) <= 2 * 1024 + 8
