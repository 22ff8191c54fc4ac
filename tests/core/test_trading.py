"""``strategy="auto"`` chooses between Ulysses and a gather by the bytes that each moves."""

from __future__ import annotations

import pytest

from ring_core import LayoutName, Mask, make_plan
from ring_core.choose.trading import MOST_TRADED, trades_heads, untraded_reason
from ring_core.cost import Model, bytes_sent

CAUSAL = Mask(causal=True)


@pytest.mark.parametrize(
    ("mask", "ranks", "heads", "trades"),
    [
        (CAUSAL, 4, (32, 32), True),
        (Mask(), 4, (24, 24), True),
        (CAUSAL, 8, (32, 16), True),
        (CAUSAL, 4, (32, 8), False),  # a gather moves less
        (CAUSAL, 8, (32, 8), False),  # a gather moves more, but not twice as much
        (CAUSAL, 2, (32, 32), False),  # a gather moves as much
        (Mask(causal=True, window=(63, 0)), 4, (32, 32), False),  # a gather moves few keys
        (CAUSAL, 4, (30, 30), False),  # heads would be padded
        (CAUSAL, 8, (32, 4), False),  # K/V heads would be copied
    ],
)
def test_ranks_trade_where_that_moves_few_bytes(
    mask: Mask, ranks: int, heads: tuple[int, int], trades: bool
) -> None:
    plan = make_plan(mask, seq_len=4096, cp_size=ranks, layout="zigzag")
    assert trades_heads(plan, q_heads=heads[0], kv_heads=heads[1]) == trades
    traded, gathered = (
        max(bytes_sent(plan, Model(*heads, 128), way, backward=False))
        for way in ("ulysses", "gather")
    )
    if not any(n % ranks for n in heads):
        assert (traded <= MOST_TRADED * gathered) == trades


def test_padding_changes_nothing() -> None:
    plan = make_plan(CAUSAL, seq_len=4000, cp_size=4, layout="zigzag", pad_to=(4096, 4096))
    assert trades_heads(plan, q_heads=32, kv_heads=32)


def test_what_cannot_be_gathered_is_left_to_a_ring() -> None:
    plan = make_plan(CAUSAL, seq_len=64, cp_size=4, layout="striped")
    assert not trades_heads(plan, q_heads=4, kv_heads=4)


@pytest.mark.parametrize(("end", "trades"), [(40, False), (41, True)])
def test_launches_span_no_more_documents_than_elsewhere(end: int, trades: bool) -> None:
    """Ulysses is not chosen if its launches would span more documents than a gather's.

    Kernels that take one document per launch could not run them.
    """
    mask = Mask(causal=True, cu_seqlens=(0, end, 64))
    plan = make_plan(mask, seq_len=64, cp_size=8)
    assert trades_heads(plan, q_heads=8, kv_heads=8) == trades
    reason = untraded_reason(plan, q_heads=8, kv_heads=8)
    assert trades or "would span several documents" in str(reason)


@pytest.mark.parametrize(
    ("mask", "layout", "heads", "words"),
    [
        (CAUSAL, "zigzag", (32, 32), None),
        (CAUSAL, "zigzag", (32, 8), "at least 125 % of the bytes of a gather, and 'auto' takes it up to 55 %"),
        (Mask(causal=True, window=(63, 0)), "zigzag", (32, 32), " 1220 % of the bytes"),
        (Mask(causal=True, cu_seqlens=tuple(range(0, 4097, 1024))), "contiguous", (32, 32), "fetch no keys"),
        (CAUSAL, "striped", (32, 32), "layout 'striped' assigns tokens one by one"),
        (CAUSAL, "zigzag", (30, 30), "30 and 30 of K/V on 4 ranks"),
    ],
)  # fmt: skip
def test_why_ranks_do_not_trade_is_said(
    mask: Mask, layout: LayoutName, heads: tuple[int, int], words: str | None
) -> None:
    plan = make_plan(mask, seq_len=4096, cp_size=4, layout=layout)
    reason = untraded_reason(plan, q_heads=heads[0], kv_heads=heads[1])
    assert reason is None if words is None else words in str(reason)
