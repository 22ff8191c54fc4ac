"""The number of groups that heads are cut into, by the work and by the bytes of K/V that travel."""

from __future__ import annotations

import pytest
import torch

from ring_core import Mask, gather_program, make_plan, ring_program
from ring_torch.buffers import ONE_GROUP, HeadGroups, KVPayload
from ring_torch.strategies.gather import head_groups_of
from ring_torch.transports import symm_buffer

K = 1024
CAUSAL = Mask(causal=True)


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "expected"),
    [
        (8 * K, 8, ONE_GROUP),  # too little work for more launches
        (8 * K, 32, ONE_GROUP),
        (
            32 * K,
            8,
            HeadGroups(1, 1, before_last_item=True),
        ),  # few keys: their transfer is hidden without groups
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


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "expected"),
    [
        (128 * K, 8, HeadGroups(1, 1, before_last_item=True)),  # 256 MiB of sums
        (256 * K, 8, HeadGroups(1, 2, before_last_item=True)),
        (512 * K, 8, HeadGroups(1, 4, before_last_item=True)),
        (512 * K, 2, HeadGroups(1, 1, before_last_item=True)),
        (512 * K, 6, HeadGroups(1, 3, before_last_item=True)),
        (128 * K, 32, HeadGroups(2, 2, before_last_item=True)),  # too little work for four
    ],
)
def test_sums_of_keys_in_place_are_of_few_heads(
    tokens: int, kv_heads: int, expected: HeadGroups
) -> None:
    window = Mask(causal=True, window=(4095, 0))
    assert groups(tokens, 4 * kv_heads if kv_heads < 8 else 32, kv_heads, window) == expected


def groups(tokens: int, q_heads: int, kv_heads: int, mask: Mask = CAUSAL) -> HeadGroups:
    """Return the head groups of a bfloat16 sequence with head dim 128."""
    program = ring_program(make_plan(mask, seq_len=tokens, cp_size=4, layout="zigzag"))
    keys = KVPayload(1, tokens // 4, kv_heads, 128, 128, torch.bfloat16, segments=False)
    return head_groups_of(program, keys, q_heads)


@pytest.mark.parametrize(
    ("tokens", "heads", "v_dim", "expected"),
    [
        (8 * K, 8, 128, True),
        (4 * K, 8, 128, False),  # copies of half a MiB
        (8 * K, 9, 128, False),  # an odd number of heads
        (16 * K, 4, 131, False),  # two heads of V are no multiple of 16 bytes
    ],
)
def test_short_keys_come_in_parts(
    tokens: int, heads: int, v_dim: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symm_buffer, "_cuda", lambda: symm_buffer)
    plan = make_plan(Mask(causal=True), seq_len=tokens, cp_size=4, layout="zigzag")
    keys = KVPayload(1, tokens // 4, heads, 128, v_dim, torch.bfloat16, segments=False)
    fetches = [fetch for fetch in gather_program(plan, 0).fetches if fetch.rank != 0]
    assert symm_buffer.comes_in_parts(keys, fetches) == expected
    assert not symm_buffer.comes_in_parts(keys, [])
    monkeypatch.setattr(symm_buffer, "_cuda", lambda: None)
    assert not symm_buffer.comes_in_parts(keys, fetches)
