"""Counts of bytes agree with sums done by hand, and decide between Ulysses and a gather."""

from __future__ import annotations

from typing import Any

import pytest

from ring_core import LayoutName, Mask, StrategyConfig, make_plan
from ring_core.choose.trading import MOST_TRADED, trades_heads, untraded_reason
from ring_core.cost import Model, bytes_by_link, bytes_sent
from ring_core.cost.sent import bytes_held

# B=3, H=2, K=1, D=4, Dv=6, 2 bytes.
MODEL = Model(num_q_heads=2, num_kv_heads=1, head_dim=4, v_head_dim=6, batch=3)
KV, SUM = 3 * 4 * 1 * 10 * 2, 3 * 4 * 1 * 10 * 4  # bytes of four tokens of K/V, and of dK/dV


def test_a_ring_by_hand() -> None:
    plan = make_plan(Mask(causal=True), seq_len=8, cp_size=2)
    assert bytes_sent(plan, MODEL, "ring", backward=False) == (KV, KV)
    # Backward, dK/dV go home; K/V are those that arrived last.
    assert bytes_sent(plan, MODEL, "ring") == (KV + SUM, KV + SUM)
    more_keys = make_plan(Mask(), seq_len=8, cp_size=2, kv_seq_len=32)
    assert bytes_sent(more_keys, MODEL, "ring", backward=False) == (4 * KV, 4 * KV)
    longer = make_plan(Mask(), seq_len=16, cp_size=4)
    # Forward 3 K/V; backward 2 K/V, as the last to arrive is kept, and 3 dK/dV.
    assert bytes_sent(longer, MODEL, "ring") == (5 * KV + 3 * SUM,) * 4
    alone = make_plan(Mask(causal=True), seq_len=8, cp_size=1)
    assert {bytes_sent(alone, MODEL, x) for x in ("ring", "gather", "ulysses")} == {(0,)}


def test_a_balanced_ring_by_hand() -> None:
    plan = make_plan(Mask(causal=True), seq_len=8, cp_size=2, layout="contiguous")
    # Rank 1 hands two of its rows to rank 0, which is idle in the second step.
    rows = 2 * 3 * 2
    out, lse, q, dout, dq = rows * 6 * 4, rows * 4, rows * 4 * 2, rows * 6 * 2, rows * 4 * 4
    helped = q + (q + 2 * dout + lse), out + lse + dq
    sent = bytes_sent(plan, MODEL, "balanced")
    assert sorted(x - KV - SUM for x in sent) == sorted(helped)


GROUPS = (StrategyConfig("hybrid"), StrategyConfig("hybrid", ulysses_size=2, outer="gather"))


@pytest.mark.parametrize("strategy", ["ring", "gather", "ulysses", *GROUPS])
def test_bytes_by_link_are_those_sent(strategy: Any) -> None:
    plan = make_plan(Mask(causal=True), seq_len=64, cp_size=8, layout="zigzag")
    model = Model(9, 3, 4)
    one_host = bytes_by_link(plan, model, strategy, ranks_per_host=8)
    assert one_host.within_host == bytes_sent(plan, model, strategy)
    assert not any(one_host.between_hosts)
    alone = bytes_by_link(plan, model, strategy, ranks_per_host=1)
    assert not any(alone.within_host)


def test_only_the_last_rank_of_a_host_sends_a_ring_to_the_next() -> None:
    plan = make_plan(Mask(), seq_len=64, cp_size=8)
    sent = bytes_by_link(plan, Model(6, 3, 4), "ring", ranks_per_host=4, backward=False)
    assert [x > 0 for x in sent.between_hosts] == [False, False, False, True] * 2


@pytest.mark.parametrize("outer", ["ring", "gather"])
def test_groups_of_a_host_send_the_second_step_alone_to_others(outer: Any) -> None:
    """Hosts exchange only the outer step: each rank sends like a ring of two, for its heads."""
    plan, halves = (make_plan(Mask(), seq_len=64, cp_size=n, layout="zigzag") for n in (8, 2))
    hybrid = StrategyConfig("hybrid", outer=outer)
    sent = bytes_by_link(plan, Model(8, 4, 4), hybrid, ranks_per_host=4)
    assert sent.between_hosts == bytes_sent(halves, Model(2, 1, 4), outer) * 4


def test_held_bytes_are_not_guessed() -> None:
    """Held bytes of ``balanced`` are refused: nothing counts the rows that helpers borrow."""
    plan = make_plan(Mask(causal=True), seq_len=8, cp_size=2)
    assert bytes_held(plan, MODEL, "ring") == 120 * (2 * 2 + 3 * 4) + 4 * 6 * 4 * 4
    with pytest.raises(ValueError, match="'balanced'"):
        bytes_held(plan, MODEL, "balanced")


CAUSAL = Mask(causal=True)
WINDOW = Mask(causal=True, window=(63, 0))
DOCUMENTS = Mask(causal=True, cu_seqlens=tuple(range(0, 4097, 1024)))


@pytest.mark.parametrize(
    ("mask", "ranks", "heads", "layout", "words"),
    [
        (CAUSAL, 4, (32, 32), "zigzag", None),
        (Mask(), 4, (24, 24), "zigzag", None),
        (CAUSAL, 8, (32, 16), "zigzag", None),
        (CAUSAL, 4, (32, 8), "zigzag", "at least 125 % of the bytes of a gather, and 'auto' takes it up to 55 %"),
        (CAUSAL, 8, (32, 8), "zigzag", "of the bytes of a gather"),  # which moves more, but not twice as much
        (CAUSAL, 2, (32, 32), "zigzag", "of the bytes of a gather"),  # which moves as much
        (WINDOW, 4, (32, 32), "zigzag", " 1220 % of the bytes"),  # a gather moves few keys
        (DOCUMENTS, 4, (32, 32), "contiguous", "fetch no keys"),
        (CAUSAL, 4, (32, 32), "striped", "layout 'striped' assigns tokens one by one"),
        (CAUSAL, 4, (30, 30), "zigzag", "30 and 30 of K/V on 4 ranks"),  # heads would be padded
        (CAUSAL, 8, (32, 4), "zigzag", "32 and 4 of K/V on 8 ranks"),  # K/V heads would be copied
    ],
)  # fmt: skip
def test_ranks_trade_where_that_moves_few_bytes(
    mask: Mask, ranks: int, heads: tuple[int, int], layout: LayoutName, words: str | None
) -> None:
    plan = make_plan(mask, seq_len=4096, cp_size=ranks, layout=layout)
    reason = untraded_reason(plan, q_heads=heads[0], kv_heads=heads[1])
    assert trades_heads(plan, q_heads=heads[0], kv_heads=heads[1]) == (words is None)
    assert reason is None if words is None else words in str(reason)
    padded = make_plan(mask, seq_len=4096, cp_size=ranks, layout=layout, pad_to=(4160, 4160))
    assert trades_heads(padded, q_heads=heads[0], kv_heads=heads[1]) == (words is None)
    if layout == "zigzag" and not any(n % ranks for n in heads):
        traded, gathered = (
            max(bytes_sent(plan, Model(*heads, 128), way, backward=False))
            for way in ("ulysses", "gather")
        )
        assert (traded <= MOST_TRADED * gathered) == (words is None)


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
