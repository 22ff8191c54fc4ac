"""Ulysses, which exchanges tokens for heads, is right for any head counts and per-head options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import CASES, Case
from on_ranks import on_four_ranks, on_ranks
from tolerances import assert_close

import ring_torch
from ring_core import Mask, RankMismatchError, UnsupportedError


@pytest.mark.parametrize("sinks", [0, 3], ids=["one a head", "several a head"])
def test_sinks_go_with_their_heads(sinks: int, backend: Any) -> None:
    case = replace(CASES["causal-zigzag-cp2"], heads=(8, 4), sinks=sinks, lse_grad=True)
    assert_close(case, backend.run(case, strategy="ulysses"))


#: Query and K/V heads on four ranks: divided, copied, padded, both, or no range of heads.
HEADS = [(8, 4), (4, 1), (7, 7), (12, 3), (14, 2), (15, 5), (5, 1), (6, 3), (4, 4), (9, 3)]


@pytest.mark.nightly(unless=["7-7", "12-3", "14-2", "6-3"])
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "-".join(map(str, heads)))
def test_heads(heads: tuple[int, int], backend: Any) -> None:
    """Results and gradients are right for each pair of head counts, with all per-head options."""
    case = Case(
        f"ulysses-{heads[0]}-{heads[1]}", Mask(causal=True), "zigzag", 4, 16, 24, 2, heads, (8, 6),
        softcap=3.0, sinks=2, bias="full" if heads[0] % 2 else "heads", alibi=2, dropout_p=0.2,
        segments="pair", lse_grad=True,
    )  # fmt: skip
    assert_close(case, backend.run(case, strategy="ulysses"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_gradients_of_copies_are_rounded_once(dtype: str, backend: Any) -> None:
    """dK/dV of a K/V head that all four ranks use are summed, then rounded once."""
    case = Case(
        f"ulysses-copies-{dtype}", Mask(causal=True), "striped", 4, 64, heads=(16, 1), dtype=dtype
    )
    assert_close(case, backend.run(case, strategy="ulysses"))


@on_four_ranks
def test_too_few_heads_are_refused() -> None:
    q, k, v = (torch.ones(1, 4, n, 8) for n in (3, 1, 1))
    with pytest.raises(UnsupportedError) as error:
        ring_torch.ring_attention(q, k, v, strategy="ulysses")
    text = str(error.value)
    assert "q has 3 heads, so at most 3 ranks can split them, not 4; groups of 2 can" in text
    assert "StrategyConfig('hybrid', ulysses_size=2)" in text


@on_four_ranks
def test_a_bias_that_is_too_large_to_gather_is_refused() -> None:
    keys = 20480
    q = torch.ones(1, 1, 1, 1).expand(1, keys // 4, 4, 8)
    bias = torch.zeros(1, 1, 1, 1).expand(1, 1, keys // 4, keys)
    message = r"each rank would gather a bias of 1.6 GiB(.|\n)*at most 1 GiB"
    with pytest.raises(UnsupportedError, match=message):
        ring_torch.ring_attention(q, q, q, strategy="ulysses", bias=bias)


@on_ranks
def test_unlike_numbers_of_heads_are_named(rank: int) -> None:
    q, k, v = (torch.ones(1, 4, heads, 8) for heads in (4 + 2 * rank, 2, 2))
    with pytest.raises(RankMismatchError) as error:
        ring_torch.ring_attention(q, k, v, strategy="ulysses")
    there, here = ("4", "6") if rank else ("6", "4")
    assert f"q is [1, 4, {there}, 8, 'float32'] there and [1, 4, {here}, 8" in str(error.value)


@on_four_ranks
def test_explain_shows_padding_and_copies() -> None:
    for heads, shown in (((14, 2), True), ((8, 4), False)):
        q, k, v = (torch.ones(1, 4, n, 8) for n in (heads[0], heads[1], heads[1]))
        text = ring_torch.ContextParallel().explain(q, k, v, strategy="ulysses")
        words = "14 query heads in 16 places (12% padding), 2 K/V heads in 4"
        assert (words in text) == ("places" in text) == shown


@pytest.mark.parametrize("grad", [True, False])
@on_ranks
def test_compiled(rank: int, grad: bool) -> None:
    torch.manual_seed(rank)
    shapes = ((5, 16), (1, 16), (1, 24), (5, 24))
    ids, bias = torch.tensor([[0] * 5 + [1] * 7]).int(), torch.randn(1, 5, 12, 24)
    options: Any = {"segment_ids": ids, "dropout_p": 0.3, "dropout_seed": 2**40}
    *qkv, dout = (torch.randn(1, 12, *shape) for shape in shapes)
    leaves = [x.requires_grad_(grad) for x in (*qkv, bias)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> Any:
        return ring_torch.ring_attention(
            q, k, v, causal=True, layout="zigzag", strategy="ulysses", bias=b, **options
        )

    results = []
    for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = function(*leaves)
        results.append([out.detach(), *(torch.autograd.grad(out, leaves, dout) if grad else ())])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@on_ranks
def test_compiled_for_any_length(rank: int) -> None:
    """A graph of dynamic length, with a bias for padded heads."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> Any:
        ids = torch.arange(q.shape[1])[None].int() // 5
        return ring_torch.ring_attention(q, k, v, strategy="ulysses", bias=b, segment_ids=ids)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (6, 8):
        torch.manual_seed(rank)
        leaves = [torch.randn(1, length, heads, 16).requires_grad_() for heads in (5, 1, 1)]
        leaves.append(torch.randn(1, 5, length, 2 * length).requires_grad_())
        outs = [function(*leaves) for function in (attend, compiled)]
        grads = [torch.autograd.grad(out.square().sum(), leaves) for out in outs]
        torch.testing.assert_close(*zip(outs, grads, strict=True), rtol=0, atol=0)
