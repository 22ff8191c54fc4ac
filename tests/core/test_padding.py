"""Padded layouts, and the oracle's `seq_len`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import RANDOM

from ring_core import Layout, LayoutSpec, Mask, checks, make_plan, reference

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "documents": {"cu_seqlens": (0, 4, 9)},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 3},
    "predicate": {"mask": Mask(predicate=lambda i, j: (i + j) % 3 > 0)},
}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", RANDOM[3]])
@pytest.mark.parametrize("seq_len", range(1, 19))
def test_padding_is_least_and_behind_the_tokens(layout: LayoutSpec, seq_len: int) -> None:
    padded = Layout.padded(layout, seq_len, 3)
    assert 0 <= padded.padded_len - seq_len < padded.divisor
    whole = Layout(layout, padded.padded_len, 3)
    for rank in range(3):
        positions, tokens = padded.positions(rank), padded.num_tokens(rank)
        np.testing.assert_array_equal(positions, whole.positions(rank))
        assert (positions[:tokens] < seq_len).all() and (positions[tokens:] >= seq_len).all()


def test_no_padding_is_the_layout_itself() -> None:
    assert Layout.padded("zigzag", 8, 2) == Layout("zigzag", 8, 2)
    plan = make_plan(Mask(), seq_len=8, cp_size=2, pad_to=8)
    assert plan.digest == make_plan(Mask(), seq_len=8, cp_size=2).digest
    padded = make_plan(Mask(), seq_len=7, cp_size=2, pad_to=8)
    assert plan.digest != padded.digest != make_plan(Mask(), seq_len=7, cp_size=2, pad_to=10).digest


@pytest.mark.parametrize("name", OPTIONS)
def test_the_oracle_leaves_padding_out(name: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 1, 12, 2, 4))
    bias, dlse = rng.standard_normal((1, 2, 12, 9)), rng.standard_normal((1, 2, 12))
    for x in (q, k, v, bias.swapaxes(1, 2)):
        x[:, 9:] = np.nan
    sinks = rng.standard_normal(2)
    options = {"sinks": sinks, **OPTIONS[name]}
    out, lse = reference.attention(q, k, v, seq_len=9, bias=bias, **options)
    grads = reference.attention_grads(dout, q, k, v, dlse=dlse, seq_len=9, bias=bias, **options)
    short = [x[:, :9] for x in (q, k, v)]
    options["bias"] = bias[:, :, :9]
    expected = reference.attention(*short, **options)
    for actual, want, axis, fill in ((out, expected[0], 1, 0.0), (lse, expected[1], 2, -np.inf)):
        tokens, padding = np.split(actual, [9], axis=axis)
        np.testing.assert_array_equal(tokens, want)
        np.testing.assert_array_equal(padding, fill)
    whole = reference.attention_grads(dout[:, :9], *short, dlse=dlse[:, :, :9], **options)
    for part, grad, whole_grad in zip(whole._fields, grads, whole, strict=True):
        assert grad is not None and whole_grad is not None
        length = len(whole_grad) if part == "dsinks" else 9
        tokens, padding = np.split(grad, [length], axis={"dsinks": 0, "dbias": 2}.get(part, 1))
        np.testing.assert_array_equal(padding, 0.0)
        np.testing.assert_array_equal(tokens, whole_grad)


def test_other_lengths_than_the_least_are_refused() -> None:
    assert checks.check_seq_len((7, 16), 4, 8, "zigzag", 2) == (7, 16)
    with pytest.raises(ValueError, match="pads it to 4, 2 a rank, and q has 4 a rank"):
        checks.check_seq_len(3, 4, 4, "zigzag", 2)
    with pytest.raises(ValueError, match=r"pair \(queries', keys'\) where 4 queries meet 8 keys"):
        checks.check_seq_len(7, 4, 8, "zigzag", 2)
