"""Arguments given by position, or as 0, where callers usually pass another form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_torch.compat import llama3_flash_attn_prepare_cu_seqlens
from ring_torch.hf.models.placeholders import ShardedMask


def test_a_cast_by_position_keeps_documents_apart() -> None:
    """Casting a model's mask to bool by position keeps its segment ids, and documents apart."""
    ids = torch.tensor([[0, 1, 2, -1]], dtype=torch.int32)
    positions = torch.arange(4)[None]
    unread: Any = None
    mask = ShardedMask(unread, (1, 4), 4, False, None, ids, 3, None, 4, positions)
    for cast in (mask.to(torch.bool), mask.to(dtype=torch.bool), mask.to("cpu", torch.bool)):
        assert cast.segment_ids is not None
        torch.testing.assert_close(cast.segment_ids, ids)


def test_no_ranks() -> None:
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 0\)"):
        llama3_flash_attn_prepare_cu_seqlens(offsets, True, 0, 0)
