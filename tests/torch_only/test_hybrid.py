"""Groups that trade tokens for heads, with a ring or a gather between them: the table is right."""

from __future__ import annotations

from typing import Any

import pytest
from cases import Case
from tolerances import assert_close

from ring_core import Mask, StrategyConfig

OUTER: tuple[Any, ...] = ("ring", "gather")


def hybrid(outer: Any, size: int | None = 2) -> StrategyConfig:
    """Groups of so many ranks."""
    return StrategyConfig("hybrid", ulysses_size=size, outer=outer)


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("size", [1, 2, 4, None])
def test_groups_of_every_size(size: int | None, outer: Any, backend: Any) -> None:
    case = Case("hybrid", Mask(causal=True), "zigzag", 4, 32, heads=(8, 4))
    assert_close(case, backend.run(case, strategy=hybrid(outer, size)))


#: All options at once, with query heads and K/V heads: divided, copied, padded, both.
HEADS = [(8, 4), (4, 1), (7, 7), (9, 3), (6, 2)]


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "-".join(map(str, heads)))
def test_all_options_go_together(heads: tuple[int, int], outer: Any, backend: Any) -> None:
    case = Case(
        f"hybrid-{heads[0]}-{heads[1]}", Mask(causal=True), "zigzag", 4, 16, 24, 2, heads, (8, 6),
        softcap=3.0, sinks=2, bias="full" if heads[0] % 2 else "shared", alibi=2, dropout_p=0.2,
        segments="pair", lse_grad=True,
    )  # fmt: skip
    assert_close(case, backend.run(case, strategy=hybrid(outer)))
