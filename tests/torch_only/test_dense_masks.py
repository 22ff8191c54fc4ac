"""A mask given as an array of booleans: what is computed of it, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ring_core import KernelConfig, checks
from ring_torch import ring_attention
from ring_torch.kernels.eager import ScoreBlocks

T, HEADS = 24, 2


def _qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, T, HEADS, 8, dtype=torch.float64) for _ in range(3)]


MASK = torch.ones(T, T, dtype=torch.bool)


def test_hidden_blocks_are_not_computed() -> None:
    """Only blocks on the mask's diagonal are computed, in the forward and in the backward."""
    qkv = _qkv()
    chunk = torch.arange(T) // 4
    mask = chunk[:, None] == chunk
    live = mask.view(6, 4, 4, 6).any(dim=3).any(dim=1).sum()
    kernel = KernelConfig("eager", block_q=4, block_k=6)
    with patch.object(
        ScoreBlocks, "scores", autospec=True, side_effect=ScoreBlocks.scores
    ) as scores:
        ring_attention(qkv[0].requires_grad_(), *qkv[1:], mask=mask, kernel=kernel).sum().backward()
    assert live < 6 * 4
    assert scores.call_count == 2 * live


#: Options beside right ones, and the error.
REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("mask", torch.zeros(T, T), "array of booleans, got one of float32"),
    ("mask", torch.ones(T, T, dtype=torch.int32), "array of booleans, got one of int32"),
    ("mask", torch.zeros(T, T + 1) > 0, rf"shape \[{T}, {T}\]"),
    ("mask", torch.zeros(3, 1, T, T) > 0, "got"), ("mask", torch.zeros(T) > 0, "got"),
    ("mask", torch.zeros(T, T, device="meta") > 0, "mask is on meta"),
    ("bias", [0.0], "bias must be a torch.Tensor"),
    ("bias", torch.zeros(T, T), "bias must have shape"),
    ("bias", torch.zeros(1, 1, 1, T), "bias must have shape"),
    ("bias", torch.zeros(1, 1, T, T + 1), "bias must have shape"),
    ("bias", torch.zeros(1, 1, T, T, dtype=torch.int64), "bias must be floating point"),
    ("bias", torch.zeros(1, 1, T, T, device="meta"), "bias must be on cpu"),
    *((name, [0.0], f"{name} must be a torch.Tensor") for name in "qkv"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_what_is_wrong_is_refused_beside_a_mask_as_without_one(
    name: str, value: Any, message: str
) -> None:
    options: list[dict[str, Any]] = [{}, {"mask": MASK}]
    for beside in options:
        call: Any = dict(zip("qkv", _qkv(), strict=True)) | beside | {name: value}
        with pytest.raises(ValueError, match=message):
            ring_attention(**call)


def test_what_is_too_large_is_told_what_to_use() -> None:
    mask = checks.Tensor((1 << 13, (1 << 13) + 1), "bool", "cpu")
    with pytest.raises(ValueError, match=r"at most 64 MiB .*Mask\(predicate"):
        checks.check_dense_mask(mask, (1, 1 << 13, 1, 8), (1 << 13) + 1, "cpu")
    fits = checks.Tensor((1 << 13, 1 << 13), "bool", "cpu")
    checks.check_dense_mask(fits, (1, 1 << 13, 1, 8), 1 << 13, "cpu")
