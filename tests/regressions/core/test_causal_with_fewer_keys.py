"""``causal=True`` with fewer keys than queries is refused: most such tensors are heads first."""

from __future__ import annotations

import numpy as np
import pytest

from ring_core import Mask
from ring_core.reference import attention, attention_grads

Q, K = np.ones((1, 8, 2, 4)), np.ones((1, 6, 2, 4))
WORDS = r"q has 8 tokens but k 6: .*x\.transpose\(1, 2\).*mask=Mask\(causal=True\)"


def test_the_oracle_refuses_it() -> None:
    with pytest.raises(ValueError, match=WORDS):
        attention(Q, K, K, causal=True)
    with pytest.raises(ValueError, match=WORDS):
        attention_grads(Q, Q, K, K, causal=True)


def test_a_mask_keeps_the_rule() -> None:
    """An explicit mask aligns the last query with the last key; here the first two see nothing."""
    out, lse = attention(Q, K, K, mask=Mask(causal=True))
    assert np.isneginf(lse[..., :2]).all() and np.isfinite(lse[..., 2:]).all()
    assert (out[:, :2] == 0).all()
    np.testing.assert_allclose(out[:, 2:], 1)


def test_as_many_keys_or_more_are_right() -> None:
    attention(Q, Q, Q, causal=True)
    attention(K, Q, Q, causal=True)
