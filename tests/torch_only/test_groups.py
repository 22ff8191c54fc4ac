"""Into how many groups heads are cut: by the work they are, and the keys that travel for it."""

from __future__ import annotations

import pytest

from ring_core import Mask, make_plan, ring_program
from ring_core.checks import Sizes
from ring_torch.buffers import ONE_GROUP, HeadGroups
from ring_torch.strategies.gather import head_groups_of

K = 1024


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "expected"),
    [
        (8 * K, 8, ONE_GROUP),  # too little work for more launches
        (8 * K, 32, ONE_GROUP),
        (
            32 * K,
            8,
            HeadGroups(1, 1, before_last_item=True),
        ),  # few keys: what travels is hidden as it is
        (32 * K, 32, HeadGroups(2, 2, before_last_item=True)),
        (128 * K, 32, HeadGroups(4, 4, before_last_item=True)),
        (128 * K, 8, HeadGroups(1, 1, before_last_item=True)),
    ],
)
def test_groups_of_a_causal_ring_of_four(tokens: int, kv_heads: int, expected: HeadGroups) -> None:
    assert groups(tokens, 32, kv_heads) == expected


def test_groups_divide_the_heads_of_keys() -> None:
    assert groups(128 * K, 31, 31).forward == 1
    assert groups(128 * K, 30, 30).forward == 3


def groups(tokens: int, q_heads: int, kv_heads: int) -> HeadGroups:
    """Of bfloat16 sequences with head dim 128."""
    program = ring_program(make_plan(Mask(causal=True), seq_len=tokens, cp_size=4, layout="zigzag"))
    local = tokens // 4
    return head_groups_of(program, Sizes(1, local, local, q_heads, kv_heads, 128, 128), itemsize=2)
