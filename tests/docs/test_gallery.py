"""Every mask of the gallery is computed as the oracle does, in every layout."""

from __future__ import annotations

import numpy as np
import pytest
from pages import ROOT, Page

from ring_core import LAYOUTS, LayoutName, Mask, make_plan, reference, ring_program

EXPRESSIONS = [
    block.code.partition("\n")[2]  # below its :alt:
    for block in Page.read(ROOT / "docs" / "masks-and-options.md").blocks
    if block.language == "{picture}"
]
TOKENS, RANKS = 32, 4


def masks() -> list[Mask]:
    """Return the masks that the gallery's pictures show."""
    return [eval(expression, {"Mask": Mask}) for expression in EXPRESSIONS]


def test_all_masks_differ_and_no_query_is_blind() -> None:
    tokens = np.arange(TOKENS)
    seen = [mask.dense(tokens, tokens) for mask in masks()]
    assert len({dense.tobytes() for dense in seen}) == len(seen) > 10
    assert all(dense.any(axis=1).all() for dense in seen)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_exact(layout: LayoutName) -> None:
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, TOKENS, 2, 8))
    for mask in masks():
        out, lse = reference.attention(q, k, v, mask=mask)
        grads = reference.attention_grads(dout, q, k, v, mask=mask)[:3]
        plan = make_plan(mask, seq_len=TOKENS, cp_size=RANKS, layout=layout)
        results = reference.simulate(ring_program(plan), q, k, v, dout=dout)
        for result, expected in zip(results, (out, lse, *grads), strict=True):
            np.testing.assert_allclose(result, expected, atol=1e-12)
