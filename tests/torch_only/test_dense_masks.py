"""A mask given as an array of booleans: exact as it is, or refused by name as too large."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ring_core import KernelConfig, checks
from ring_torch import ContextParallel, ring_attention
from ring_torch.kernels.eager import ScoreBlocks
from ring_torch.local import LocalRanks

T, HEADS = 24, 2
SHAPES: dict[str, tuple[int, ...]] = {
    "rows": (T, T), "shared": (1, 1, T, T), "by sequence": (2, 1, T, T), "by head": (1, HEADS, T, T),
    "each": (2, HEADS, T, T),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {}, "causal": {"causal": True}, "documents": {"cu_seqlens": (0, 7, T)},
    "bias": {"bias": True}, "sinks": {"sinks": torch.tensor([0.5, -1.0], dtype=torch.float64)},
}  # fmt: skip


def _given(shape: tuple[int, ...]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return q, k and v, a mask with one row that sees nothing, and a bias."""
    torch.manual_seed(0)
    qkv = [torch.randn(2, T, HEADS, 8, dtype=torch.float64) for _ in range(3)]
    mask = torch.rand(shape) < 0.4
    mask[..., 3, :] = False
    return qkv, mask, torch.randn(1, HEADS, T, T, dtype=torch.float64)


def _by_hand(
    leaves: list[Tensor], mask: Tensor, bias: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in leaves)
    scores = q @ k.transpose(2, 3) * 8**-0.5 + (bias if "bias" in options else 0)
    shown = mask.expand(2, HEADS, T, T).clone()
    positions = torch.arange(T)
    if "causal" in options:
        shown &= positions[:, None] >= positions
    if "cu_seqlens" in options:
        shown &= (positions < 7)[:, None] == (positions < 7)
    scores = scores.masked_fill(~shown, -torch.inf)
    if "sinks" in options:
        scores = torch.cat([scores, options["sinks"].view(1, -1, 1, 1).expand(2, -1, T, 1)], dim=-1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()[..., :T]
    return (weights @ v).transpose(1, 2), lse


def _compared(_: int, shape: str, name: str, compiled: bool, strategy: str) -> None:
    torch._dynamo.reset()
    cp, options = ContextParallel(), OPTIONS[name]
    qkv, mask, bias = _given(SHAPES[shape])
    whole = [x.requires_grad_() for x in (*qkv, bias)]
    expected, expected_lse = _by_hand(whole[:3], mask, whole[3], options)
    expected.square().sum().backward()
    leaves = [cp.shard(x.detach()).requires_grad_() for x in whole[:3]]
    rows = cp.shard(bias.detach(), dim=2).requires_grad_()
    kwargs = options | ({"bias": rows} if name == "bias" else {})

    def attend(mask: Tensor) -> Any:
        return cp.attention(*leaves, mask=mask, return_lse=True, strategy=strategy, **kwargs)

    call: Any = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    out, lse = call(cp.shard(mask, dim=-2))
    torch.testing.assert_close(out, cp.shard(expected.detach()))
    torch.testing.assert_close(lse, cp.shard(expected_lse.detach(), dim=2))
    out.square().sum().backward()
    pairs = list(zip(leaves, whole[:3], [1] * 3, strict=True))
    for leaf, x, dim in [*pairs, *([(rows, whole[3], 2)] if name == "bias" else [])]:
        assert leaf.grad is not None
        assert x.grad is not None
        torch.testing.assert_close(leaf.grad, cp.shard(x.grad, dim=dim))


#: Compiled with a bias and without options; other options have tests of compiled calls.
@pytest.mark.nightly(
    only=["rows-causal-True-gather", "rows-documents-True-gather", "rows-sinks-True-gather"]
)
@pytest.mark.parametrize(
    ("shape", "name", "compiled", "strategy"),
    [
        *product(SHAPES, OPTIONS, [False], ["ring"]),
        *product(["rows"], OPTIONS, [True, False], ["gather"]),
    ],
)
def test_a_dense_mask_is_exact(
    shape: str, name: str, compiled: bool, strategy: str, pool: LocalRanks
) -> None:
    pool.run(_compared, shape, name, compiled, strategy)


def test_hidden_blocks_are_not_computed() -> None:
    """Only blocks on the mask's diagonal are computed, in the forward and in the backward."""
    qkv, _, _ = _given((T, T))
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


def test_it_may_be_changed_in_place() -> None:
    qkv, mask, _ = _given((T, T))
    first = ring_attention(*qkv, mask=mask)
    mask.fill_(True)
    assert torch.equal(
        ring_attention(*qkv, mask=mask), ring_attention(*qkv, mask=torch.ones(T, T) > 0)
    )
    assert not torch.equal(first, ring_attention(*qkv, mask=mask))


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
    qkv, _, _ = _given((T, T))
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
    qkv, mask, _ = _given((T, T))
    options: list[dict[str, Any]] = [{}, {"mask": mask}]
    for kwargs in options:
        with pytest.raises(ValueError, match=message):
            ring_attention(*qkv, bias=bias, **kwargs)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_no_tensor_is_refused_beside_a_mask(name: str) -> None:
    qkv, mask, _ = _given((T, T))
    kwargs: Any = dict(zip("qkv", qkv, strict=True)) | {name: [0.0]}
    with pytest.raises(ValueError, match=f"{name} must be a torch.Tensor"):
        ring_attention(**kwargs, mask=mask)


def test_what_is_too_large_is_told_what_to_use() -> None:
    mask = checks.Tensor((1 << 13, (1 << 13) + 1), "bool", "cpu")
    with pytest.raises(ValueError, match=r"at most 64 MiB .*Mask\(predicate"):
        checks.check_dense_mask(mask, (1, 1 << 13, 1, 8), (1 << 13) + 1, "cpu")
    fits = checks.Tensor((1 << 13, 1 << 13), "bool", "cpu")
    checks.check_dense_mask(fits, (1, 1 << 13, 1, 8), 1 << 13, "cpu")


def test_explain_takes_it() -> None:
    qkv, mask, _ = _given((T, T))
    assert "kernel" in ContextParallel().explain(*qkv, mask=mask)
