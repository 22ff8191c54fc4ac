"""Options named as in other libraries are refused, with the name of the equivalent option here."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from ring_core.base.arguments import FOREIGN_OPTIONS, refuse_foreign_options
from ring_core.reference import attention, attention_grads


def ours(*, mask: object = None, causal: bool = False) -> tuple[object, bool]:
    return mask, causal


def test_words_name_the_option_here() -> None:
    call = refuse_foreign_options(ours)
    with pytest.raises(
        ValueError, match=r"attn_mask or is_causal.*use mask, .*; for is_causal, use causal"
    ):
        call(attn_mask=None, is_causal=True)  # type: ignore[call-arg]  # wrong on purpose
    with pytest.raises(TypeError, match="nonsense"):
        call(nonsense=1)  # type: ignore[call-arg]  # wrong on purpose
    assert call(causal=True) == (None, True)
    assert inspect.signature(call) == inspect.signature(ours)


def test_no_name_is_an_option_here() -> None:
    """No foreign name is an option here: a right call would be refused."""
    assert not FOREIGN_OPTIONS.keys() & inspect.signature(attention).parameters.keys()


def test_the_oracle_refuses_them() -> None:
    x = np.zeros((1, 4, 2, 8))
    with pytest.raises(ValueError, match="for scale, use softmax_scale"):
        attention(x, x, x, scale=1.0)  # type: ignore[call-arg]  # wrong on purpose
    with pytest.raises(ValueError, match="for enable_gqa, leave it out"):
        attention_grads(x, x, x, x, enable_gqa=True)  # type: ignore[call-arg]  # wrong on purpose
