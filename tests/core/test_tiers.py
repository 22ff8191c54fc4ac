"""Per change at least two cases of each kind run: of each mask, option, layout and so on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

import pytest
from cases import CASES, Case

from ring_core import ChunkLayout, Mask


def kinds(case: Case) -> Iterator[str]:
    """Yield what a case has: rules of its mask, options, where its tokens are."""
    rules = [rule.name for rule in fields(Mask) if rule.init and getattr(case.mask, rule.name)]
    yield from (f"mask: {rule}" for rule in rules or ["full"])
    yield f"layout: {'chunks' if isinstance(case.layout, ChunkLayout) else case.layout}"
    yield f"strategy: {case.strategy}"
    yield f"dtype: {case.dtype}"
    yield f"ranks: {case.cp_size}"
    heads, kv_heads = case.heads
    yield f"heads: {'alike' if heads == kv_heads else 'of one key' if kv_heads == 1 else 'grouped'}"
    for name in ("softmax_scale", "softcap", "bias", "alibi", "dropout_p", "segments", "poison"):
        if getattr(case, name):
            yield f"option: {name}"
    if case.sinks is not None:
        yield f"sinks: {'[H, n]' if case.sinks else '[H]'}"
    if case.keys != case.seq_len:
        yield "other number of keys than of queries"
    if case.dims[0] != case.dims[1]:
        yield "other head dim of values than of keys"
    if case.lse_grad:
        yield "gradient through lse"


@pytest.mark.parametrize("run", ["torch", "again", "jax", "jax-cuda"])
def test_two_of_each_kind_run_per_change(run: str) -> None:
    cases = [case for case in CASES.values() if run != "again" or case.cp_size > 1]
    every = {kind for case in cases for kind in kinds(case)}
    ran = Counter(kind for case in cases if run not in case.nightly for kind in kinds(case))
    assert len(every) > 30
    assert {kind: ran[kind] for kind in every if ran[kind] < 2} == {}
