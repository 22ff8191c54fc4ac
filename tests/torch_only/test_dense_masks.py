"""A mask given as an array of booleans: what is computed of it, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ring_core import KernelConfig, checks
from ring_torch import ContextParallel, ring_attention
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


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(T, T), "array of booleans, got one of float32"),
        (torch.ones(T, T, dtype=torch.int32), "array of booleans, got one of int32"),
        (torch.zeros(T, T + 1) > 0, rf"shape \[{T}, {T}\]"),
        (torch.zeros(3, 1, T, T) > 0, "got"),
        (torch.zeros(T) > 0, "got"),
        (torch.zeros(T, T, device="meta") > 0, "mask is on meta"),
    ],
)
def test_what_is_no_such_mask_is_refused(mask: Tensor, message: str) -> None:
    qkv = _qkv()
    with pytest.raises(ValueError, match=message):
        ring_attention(*qkv, mask=mask)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ([0.0], "bias must be a torch.Tensor"),
        (torch.zeros(T, T), "bias must have shape"),
        (torch.zeros(1, 1, 1, T), "bias must have shape"),
        (torch.zeros(1, 1, T, T + 1), "bias must have shape"),
        (torch.zeros(1, 1, T, T, dtype=torch.int64), "bias must be floating point"),
        (torch.zeros(1, 1, T, T, device="meta"), "bias must be on cpu"),
    ],
)
def test_a_malformed_bias_is_refused_beside_a_mask_as_without_one(bias: Any, message: str) -> None:
    qkv = _qkv()
    options: list[dict[str, Any]] = [{}, {"mask": MASK}]
    for kwargs in options:
        with pytest.raises(ValueError, match=message):
            ring_attention(*qkv, bias=bias, **kwargs)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_no_tensor_is_refused_beside_a_mask(name: str) -> None:
    qkv = _qkv()
    kwargs: Any = dict(zip("qkv", qkv, strict=True)) | {name: [0.0]}
    with pytest.raises(ValueError, match=f"{name} must be a torch.Tensor"):
        ring_attention(**kwargs, mask=MASK)


def test_what_is_too_large_is_told_what_to_use() -> None:
    mask = checks.Tensor((1 << 13, (1 << 13) + 1), "bool", "cpu")
    with pytest.raises(ValueError, match=r"at most 64 MiB .*Mask\(predicate"):
        checks.check_dense_mask(mask, (1, 1 << 13, 1, 8), (1 << 13) + 1, "cpu")
    fits = checks.Tensor((1 << 13, 1 << 13), "bool", "cpu")
    checks.check_dense_mask(fits, (1, 1 << 13, 1, 8), 1 << 13, "cpu")


def test_explain_takes_it() -> None:
    qkv = _qkv()
    assert "kernel" in ContextParallel().explain(*qkv, mask=MASK)
