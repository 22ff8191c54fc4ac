"""Cases of each kind run per change; other releases of transformers run all of its tests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from cases import CASES, Case
from tiers import imports_transformers

from ring_core import ChunkLayout, Mask


def kinds(case: Case) -> Iterator[str]:
    """Yield the features of a case: mask rules, options, layout, strategy and so on."""
    rules = [rule.name for rule in fields(Mask) if rule.init and getattr(case.mask, rule.name)]
    yield from (f"mask: {rule}" for rule in rules or ["full"])
    yield f"layout: {'chunks' if isinstance(case.layout, ChunkLayout) else case.layout}"
    yield from (f"{name}: {getattr(case, name)}" for name in ("strategy", "dtype", "cp_size"))
    heads, kv_heads = case.heads
    yield f"heads: {'alike' if heads == kv_heads else 'of one key' if kv_heads == 1 else 'grouped'}"
    options = "softmax_scale softcap bias shown alibi dropout_p segments poison views lse_grad"
    yield from (f"option: {name}" for name in options.split() if getattr(case, name))
    if case.sinks is not None:
        yield f"sinks: {'[H, n]' if case.sinks else '[H]'}"
    if case.keys != case.seq_len:
        yield "other number of keys than of queries"
    if case.dims[0] != case.dims[1]:
        yield "other head dim of values than of keys"


@pytest.mark.parametrize(
    ("run", "least"), [("torch", 2), ("again", 2), ("jax", 1), ("jax-cuda", 2)]
)
def test_cases_of_each_kind_run_per_change(run: str, least: int) -> None:
    ring = [case for case in CASES.values() if case.cp_size > 1 and case.strategy == "ring"]
    cases = ring if run == "again" else [*CASES.values()]
    all_kinds = {kind for case in cases for kind in kinds(case)}
    ran = Counter(kind for case in cases if run not in case.nightly for kind in kinds(case))
    assert len(all_kinds) > 30
    assert {kind: ran[kind] for kind in all_kinds if ran[kind] < least} == {}


def test_every_file_that_imports_transformers_is_found() -> None:
    importing = r"^ *(?:from|import) .*\b(?:transformers|hf|hf_models|trl|peft|sweep)\b"
    files = {*Path(__file__).parents[1].rglob("test_*.py")} - {Path(__file__)}
    named = {path for path in files if re.search(importing, path.read_text(), re.MULTILINE)}
    marked = {path for path in files if imports_transformers(path)}
    assert len(named) > 12 and named <= marked
    assert {path.name for path in marked - named} == {"test_demo.py"}  # an example imports it
