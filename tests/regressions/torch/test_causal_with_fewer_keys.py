"""``causal=True`` with fewer keys than queries is refused: most such tensors are heads first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ring_core import Mask, reference
from ring_torch import ContextParallel, compat, ring_attention

CP = ContextParallel(layout="contiguous")
torch.manual_seed(0)
Q, K = (torch.randn(1, n, 2, 4) for n in (8, 6))
WORDS = r"q has 8 tokens but k 6: .*x\.transpose\(1, 2\).*mask=Mask\(causal=True\)"


def compiled(*x: Any, **options: Any) -> Any:
    return torch.compile(ring_attention, backend="eager", fullgraph=True)(*x, **options)


CALLS: dict[str, Callable[..., Any]] = {
    "ring_attention": ring_attention, "ContextParallel": CP.attention, "compiled": compiled,
}  # fmt: skip


@pytest.mark.parametrize("call", [*CALLS.values(), CP.explain], ids=[*CALLS, "explain"])
@pytest.mark.parametrize("mask", [None, torch.ones(8, 6, dtype=torch.bool)], ids=["alone", "mask"])
def test_it_is_refused(call: Callable[..., Any], mask: Any) -> None:
    with pytest.raises(Exception, match=WORDS) as error:
        call(Q, K, K, causal=True, mask=mask)
    assert call is compiled or type(error.value) is ValueError


def expected() -> Any:
    return reference.attention(*(x.numpy() for x in (Q, K, K)), mask=Mask(causal=True))[0]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_mask_keeps_the_rule(call: Callable[..., Any]) -> None:
    np.testing.assert_allclose(call(Q, K, K, mask=Mask(causal=True)), expected(), atol=2e-6)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_as_many_keys_or_more_are_right(call: Callable[..., Any]) -> None:
    for q in (K, K[:, :5]):
        assert torch.equal(call(q, K, K, causal=True), call(q, K, K, mask=Mask(causal=True)))


@pytest.mark.parametrize("mask_first", [False, True])
def test_a_call_before_does_not_decide(mask_first: bool) -> None:
    """The cache of prepared calls tells the option from an equal mask, whichever comes first."""
    q, k = (x[:, :, :1].contiguous() for x in (Q, K))
    for _ in range(2):
        if mask_first:
            ring_attention(q, k, k, mask=Mask(causal=True))
        with pytest.raises(ValueError, match=WORDS):
            ring_attention(q, k, k, causal=True)
        ring_attention(q, k, k, mask=Mask(causal=True))


def test_calls_of_other_libraries_keep_their_meaning() -> None:
    out = compat.ring_flash_attn_func(Q, K, K, causal=True)
    np.testing.assert_allclose(out, expected(), atol=2e-6)
