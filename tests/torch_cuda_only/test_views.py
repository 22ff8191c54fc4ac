"""Compiled calls with views on a GPU; others are cases of the table, which every kernel runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from backends.torch_ranks import Arrays, gather, run_rank
from cases import CASES, Case
from tolerances import assert_close

import ring_torch


def _compiled(rank: int, case: Case, kernel: str) -> Arrays:
    torch._dynamo.reset()
    call = torch.compile(ring_torch.ring_attention, fullgraph=True)
    with patch.object(ring_torch, "ring_attention", call):
        return run_rank(rank, case, (kernel, "auto", "auto"), None, cuda=True)


@pytest.mark.parametrize("turn", range(1, 8))
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("triton", "float32"), ("triton", "bfloat16"), ("auto", "bfloat16")]
)
def test_compiled(kernel: str, dtype: str, turn: int, backend: Any) -> None:
    """Results have the strides that the graph expects; Triton's kernels are exact in float32."""
    inputs = "" if kernel == "triton" else "-few"
    case = replace(CASES[f"views{turn}{inputs}-zigzag"], cp_size=1, dtype=dtype, dims=(64, 64))
    parts = backend.pool(1).run(_compiled, replace(case), kernel)
    assert_close(case, gather(case, case.plan, parts))
