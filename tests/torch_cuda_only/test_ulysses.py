"""Ulysses with head counts that GPUs do not divide, over NCCL and over peers' memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from backends.torch_ranks import Arrays, gather, run_rank
from cases import Case
from tolerances import assert_close

import ring_torch
from ring_core import Mask
from ring_torch.local import LocalRankError

#: Query and K/V heads by number of ranks: copied, padded, or both, and divided.
HEADS = {2: [(3, 1), (3, 3), (4, 2)], 4: [(16, 1), (7, 7), (12, 3), (14, 2), (8, 4)]}
PLAIN = Case("plain", Mask(causal=True), "zigzag", 2, 512, dims=(64, 64), dtype="bfloat16")
CASES = {
    f"{kind}-{ranks}-{heads[0]}-{heads[1]}": replace(
        case, name=f"cuda-{kind}-{heads[0]}-{heads[1]}", cp_size=ranks, heads=heads
    )
    for ranks, some in HEADS.items()
    for heads in some
    for kind, case in {
        "plain": PLAIN,
        "window": replace(PLAIN, mask=Mask(causal=True, window=(100, 0)), sinks=0, batch=2),
        "all": Case(
            "all", Mask(causal=True), "striped", seq_len=64, kv_seq_len=96, batch=2, dims=(16, 8),
            softcap=3.0, sinks=2, bias="shared" if heads[0] % 2 else "heads", alibi=2, dropout_p=0.2,
            segments="pair", lse_grad=True,
        ),
        "shifted": replace(PLAIN, bias="very-negative", dropout_p=0.1, seq_len=128),
    }.items()
}  # fmt: skip


def checked(rank: int, case: Case, transport: str) -> Arrays:
    """Return a rank's part of a case whose bytes and rows are checked."""
    with ring_torch.check():
        return run_rank(rank, case, ("auto", "ulysses", transport), None, True)


@pytest.mark.parametrize("transport", ["p2p", "symm_mem"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_heads(case: Case, transport: str, backend: Any) -> None:
    try:
        parts = backend.pool(case.cp_size).run(checked, case, transport)
    except LocalRankError:
        backend.discard(case.cp_size)
        raise
    assert_close(case, gather(case, case.plan, parts))
