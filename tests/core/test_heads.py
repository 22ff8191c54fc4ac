"""Head plans of Ulysses: every head gets its slots, and all ranks together are exact."""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np
import pytest

from ring_core import Mask, head_plan, make_plan, reference
from ring_core.programs.heads import PADDING
from ring_core.reference.heads import run_heads

MOST = 16
#: Query heads, K/V heads and ranks: all that can trade.
ALL = [
    (kv_heads * group, kv_heads, ranks)
    for kv_heads in range(1, MOST + 1)
    for group in range(1, MOST // kv_heads + 1)
    for ranks in range(1, kv_heads * group + 1)
]


@pytest.mark.parametrize("ranks", range(1, MOST + 1))
def test_every_head_has_its_places(ranks: int) -> None:
    for q_heads, kv_heads, _ in (x for x in ALL if x[2] == ranks):
        plan, group = head_plan(q_heads, kv_heads, ranks), q_heads // kv_heads
        assert len(plan.q) == len(plan.kv) == ranks
        assert plan.q.dtype == plan.kv.dtype == np.int32
        assert sorted(plan.q[plan.q != PADDING]) == [*range(q_heads)]
        for places, filled in ((plan.q, plan.q_filled), (plan.kv, plan.kv_filled)):
            np.testing.assert_array_equal(filled[places != PADDING], places[places != PADDING])
        assert (plan.q.ravel()[plan.q_slots] == np.arange(q_heads)).all()
        assert (plan.kv.ravel()[plan.kv_slots] == np.arange(kv_heads)[:, None]).all()
        assert plan.copies * kv_heads == np.count_nonzero(plan.kv != PADDING)
        served = plan.q_filled.reshape(ranks, plan.kv.shape[1], -1)
        assert (served // group == plan.kv_filled[..., None]).all()
        for row in plan.kv:
            assert len({*row} - {PADDING}) == np.count_nonzero(row != PADDING), "no copy twice"


def test_heads_that_ranks_divide_stay_side_by_side() -> None:
    for q_heads, kv_heads, ranks in ALL:
        if kv_heads % ranks == 0:
            plan = head_plan(q_heads, kv_heads, ranks)
            assert (plan.q.ravel() == np.arange(q_heads)).all()
            assert (plan.kv.ravel() == np.arange(kv_heads)).all()
            assert plan.describe() == ""
            assert plan.padding_share == 0


def test_padding_is_never_more_than_that_of_copies_to_a_common_multiple() -> None:
    """Padding is also at most that of whole groups if there are more K/V heads than ranks."""
    for q_heads, kv_heads, ranks in ALL:
        group, copies = q_heads // kv_heads, ranks // gcd(ranks, kv_heads)
        most = kv_heads * copies * -(-group // copies)
        if kv_heads > ranks:
            most = -(-kv_heads // ranks) * ranks * group
        assert head_plan(q_heads, kv_heads, ranks).q.size <= most


@pytest.mark.parametrize(
    ("heads", "q_places", "copies", "first"),
    [
        ((40, 8, 16), 48, 2, [0, 1, 2]), ((28, 4, 8), 32, 2, [0, 1, 2, 3]), ((7, 7, 4), 8, 1, [0, 1]),
        ((12, 3, 4), 12, 4, [0, 4, 8]), ((16, 1, 4), 16, 4, [0, 1, 2, 3]), ((6, 3, 4), 8, 1, [0, 1]),
    ],
)  # fmt: skip
def test_some(heads: Any, q_places: int, copies: int, first: list[int]) -> None:
    plan = head_plan(*heads)
    assert (plan.q.size, plan.copies, plan.q[0].tolist()) == (q_places, copies, first)
    assert plan.padding_share == pytest.approx(1 - heads[0] / q_places)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="q has 4 heads, so at most 4 ranks can split them, not 8"):
        head_plan(4, 2, 8)
    with pytest.raises(ValueError, match="kv_heads must divide q_heads, got 3 and 4"):
        head_plan(4, 3, 2)
    with pytest.raises(ValueError, match="ranks"):
        head_plan(4, 2, 0)


def test_equal_plans_are_one_that_nobody_can_change() -> None:
    plan = head_plan(40, 8, 16)
    assert plan is head_plan(40, 8, 16)
    for heads in (plan.q, plan.kv, plan.q_filled, plan.kv_filled, plan.q_slots, plan.kv_slots):
        with pytest.raises(ValueError, match="read-only"):
            heads[0] = 0


#: Head counts that run per change: each number of query heads and of ranks occurs.
SOME = [
    "-".join(map(str, heads)) for heads in ALL
    if heads in {(n, n, n) for n in range(1, MOST + 1)}
    | {(16, 1, n) for n in range(2, 17)} | {(12, 3, n) for n in range(2, 13)}
    | {(7, 7, 4), (15, 5, 4), (16, 4, 13), (14, 7, 3), (16, 8, 15), (10, 2, 4)}
]  # fmt: skip


@pytest.mark.nightly(unless=SOME)
@pytest.mark.parametrize("heads", ALL, ids=lambda heads: "-".join(map(str, heads)))
def test_ranks_are_exact(heads: tuple[int, int, int]) -> None:
    """Results and all gradients are exact with every option that belongs to single heads."""
    q_heads, kv_heads, ranks = heads
    rng, length, keys = np.random.default_rng(sum(heads)), 2 * ranks, 4 * ranks
    q, dout = (rng.standard_normal((2, length, q_heads, dim)) for dim in (3, 2))
    k, v = (rng.standard_normal((2, keys, kv_heads, dim)) for dim in (3, 2))
    dlse = rng.standard_normal((2, q_heads, length))
    bias_heads = q_heads if sum(heads) % 2 else 1
    options: Any = {
        "sinks": rng.standard_normal((q_heads, 2)), "alibi_slopes": rng.random((2, q_heads)),
        "bias": rng.standard_normal((1, bias_heads, length, keys)), "dropout_p": 0.3, "dropout_seed": 2**40 + 7,
        "segment_ids": tuple(rng.integers(-1, 2, (2, n)) for n in (length, keys)),
    }  # fmt: skip
    plan = make_plan(
        Mask(causal=True), seq_len=length, kv_seq_len=keys, cp_size=ranks, layout="zigzag"
    )
    results = run_heads(plan, head_plan(*heads), q, k, v, dout=dout, dlse=dlse, **options)
    options["causal"] = True
    out, lse = reference.attention(q, k, v, **options)
    expected = reference.attention_grads(dout, q, k, v, dlse=dlse, **options)
    for name, x in {"out": out, "lse": lse, **expected._asdict()}.items():
        np.testing.assert_allclose(getattr(results, name), x, rtol=1e-11, atol=1e-12, err_msg=name)
