"""How programs share what is left for a last round."""

from __future__ import annotations

import pytest

from ring_jax_gpu._roles import shared_tiles

PROGRAMS = 132


@pytest.mark.parametrize(
    ("tiles", "length", "expected"),
    [
        (132, 32, (0, 1)),  # all even
        (1024, 32, (0, 1)),  # 100 left: parts of them would take as long
        (2048, 64, (68, 3)),  # two rounds of thirds for one of wholes
        (4096, 128, (4, 16)),
        (12, 16, (12, 4)),  # no more parts than there are groups of four blocks
        (12, 7, (0, 1)),
        (66, 16, (66, 2)),
        (68, 11, (0, 1)),
    ],
)
def test_examples(tiles: int, length: int, expected: tuple[int, int]) -> None:
    assert shared_tiles(tiles, length, PROGRAMS) == expected


@pytest.mark.parametrize("programs", [1, 5, 78, 132])
def test_what_is_shared_is_shorter(programs: int) -> None:
    for tiles in range(1, 3 * programs):
        for length in (1, 4, 12, 33, 256):
            split, each = shared_tiles(tiles, length, programs)
            if split == 0:
                continue
            assert split == tiles % programs and 1 < each <= length // 4
            rounds = -(-split * each // programs)
            assert rounds < each, "of parts, in blocks of keys fewer than a whole tile has"
