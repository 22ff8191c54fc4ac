"""Processes that cannot become ranks report why."""

from __future__ import annotations

import pytest
import torch

from ring_torch.local import LocalRankError, LocalRanks


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can be had")
def test_no_gpu() -> None:
    with (
        LocalRanks(2, cuda=True) as ranks,
        pytest.raises(LocalRankError, match=r"rank 0: Traceback(.|\n)*(CUDA|NVIDIA)"),
    ):
        ranks.run(int)
