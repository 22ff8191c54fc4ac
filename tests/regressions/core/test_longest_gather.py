"""Lengths of all ranks' gathered keys are found without arrays of all tokens."""

from __future__ import annotations

import tracemalloc

import pytest

from ring_core import (
    Mask,
    balanced_layout,
    gather_memory,
    gather_program,
    longest_gather,
    make_plan,
)

MASKS = {
    "full": Mask(), "causal": Mask(causal=True), "window": Mask(causal=True, window=(40, 0)),
    "both": Mask(window=(9, 17)), "chunks": Mask(chunk_size=48),
    "documents": Mask(causal=True, cu_seqlens=(0, 100, 101, 230, 512)),
}  # fmt: skip


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "chunks"])
@pytest.mark.parametrize("name", MASKS)
def test_it_is_that_of_the_gathers(name: str, layout: str, cp_size: int) -> None:
    mask = MASKS[name]
    how = balanced_layout(mask, seq_len=512, cp_size=cp_size) if layout == "chunks" else layout
    plan = make_plan(mask, seq_len=512, cp_size=cp_size, layout=how)  # type: ignore[arg-type]  # a parameter of the test
    gathers = [gather_program(plan, rank) for rank in range(cp_size)]
    assert longest_gather(plan).length == max(gather.length for gather in gathers)
    assert longest_gather(plan).in_place == any(gather.in_place for gather in gathers)


def test_it_takes_little_memory() -> None:
    """A million tokens on 256 ranks take less than a byte per token, and no lists of fetches."""
    tokens = 1 << 20
    plan = make_plan(Mask(causal=True), seq_len=tokens, cp_size=256, layout="zigzag")
    tracemalloc.start()
    try:
        gather_memory(plan, q_width=1, kv_width=1, itemsize=2)
        assert tracemalloc.get_traced_memory()[1] < tokens
    finally:
        tracemalloc.stop()
