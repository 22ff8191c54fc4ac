"""How programs share what is left for a last round."""

from __future__ import annotations

import pytest

from ring_jax_gpu._roles import helped_tiles, shared_tiles

PROGRAMS = 132


@pytest.mark.parametrize(
    ("tiles", "length", "expected"),
    [
        (132, 32, (0, 0, 1)),  # all even
        (1024, 32, (0, 0, 1)),  # 100 left, which the others cannot help enough
        (2048, 64, (68, 42, 3)),
        (4096, 128, (4, 13, 10)),  # none of the others has more than one part
        (66, 16, (66, 8, 2)),
        (68, 11, (0, 0, 1)),
    ],
)
def test_examples(tiles: int, length: int, expected: tuple[int, int, int]) -> None:
    assert shared_tiles(tiles, length, PROGRAMS) == expected


@pytest.mark.parametrize("programs", [1, 5, 78, 132])
def test_what_is_shared_is_shorter(programs: int) -> None:
    for tiles in range(1, 3 * programs):
        for length in (1, 4, 12, 33, 256):
            split, own, each = shared_tiles(tiles, length, programs)
            if split == 0:
                continue
            assert split == tiles % programs and each > 1 and 0 < own < length
            rounds = -(-split * (each - 1) // (programs - split))
            assert max(own, rounds * -(-(length - own) // (each - 1))) < length


@pytest.mark.parametrize("programs", [1, 5, 78, 132])
def test_who_helps_has_as_much_as_who_is_helped(programs: int) -> None:
    """In the backward, but for what a part costs besides its blocks."""
    for tiles in range(1, 3 * programs):
        for length in (1, 4, 12, 33, 512):
            split, own, helpers = helped_tiles(tiles, length, programs)
            if split == 0:
                continue
            assert split == tiles % programs and split + helpers <= programs and 0 < own < length
            helped = split * (length - own) / helpers
            assert helped <= own <= helped + 5 * (split / helpers + 1)


def test_examples_of_the_backward() -> None:
    assert helped_tiles(132, 512, PROGRAMS) == (0, 0, 0)
    assert helped_tiles(512, 512, PROGRAMS) == (116, 454, 16)
    assert helped_tiles(1024, 1024, PROGRAMS) == (100, 779, 32)
    assert helped_tiles(4, 512, PROGRAMS) == (4, 129, 12)  # no more than three help one
    assert helped_tiles(12, 4, PROGRAMS) == (12, 2, 36)
