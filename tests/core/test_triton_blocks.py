"""Host computations of the Triton launchers, which need no Triton."""

from __future__ import annotations

import numpy as np
import pytest

from ring_core.triton.tile_configs import parts_of_tiles, positions_aligned8


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        (range(16), True),
        (range(20), True),
        ([*range(40, 48), *range(8)], True),
        (range(4, 20), False),
        (range(0, 32, 2), False),
        ([*range(8), *range(8, 10), 12], False),
        ([*range(12), *range(16, 28)], False),
    ],
)
def test_positions_that_come_in_eights(positions: list[int], expected: bool) -> None:
    assert positions_aligned8(np.array(positions)) is expected


def test_parts_of_tiles() -> None:
    """Blocks of a tile are classified: the upper left one is full, the one below has one cell."""
    tile = np.zeros((128, 128), dtype=bool)
    tile[:64, :64] = True
    tile[127, 0] = True
    any_visible, all_visible = parts_of_tiles(
        np.packbits(tile, axis=1, bitorder="little")[None], 64, 64
    )
    assert any_visible.tolist() == [
        [[True, False], [True, False]],
        [[False] * 2] * 2,
        [[True] * 2] * 2,
    ]
    assert all_visible.tolist() == [
        [[True, False], [False] * 2],
        [[False] * 2] * 2,
        [[True] * 2] * 2,
    ]
