"""Triton's kernels of pages and of selective scans compute what torch computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor

from ring_core import UnsupportedError, checks
from ring_torch import ContextParallel
from ring_torch.recurrent import libraries
from ring_torch.serving import KVCache, kernels, merging, paged, paged_kernel, state, step_kernels
from ring_torch.serving.paged import PagedKeys, Rules

#: Sizes (B, n, H, K, D, Dv, page size, rank, ranks), and options of a call.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one new token": ((2, 1, 4, 2, 32, 32, 16, 0, 1), {}),
    "many new tokens": ((1, 7, 4, 2, 32, 32, 8, 1, 3), {}),
    "odd widths": ((3, 2, 2, 2, 24, 40, 16, 1, 2), {}),
    "latents": ((1, 1, 8, 1, 72, 64, 16, 0, 2), {}),
    "large pages": ((2, 2, 2, 1, 16, 16, 128, 0, 2), {}),
    "blocks of rows": ((1, 40, 4, 2, 16, 16, 16, 0, 1), {}),
    "window": ((2, 3, 4, 2, 16, 16, 8, 1, 2), {"window": (70, 0)}),
    "chunks": ((2, 3, 4, 2, 16, 16, 8, 0, 2), {"chunk_size": 48}),
    "soft cap": ((2, 1, 4, 2, 16, 16, 8, 0, 1), {"softcap": 2.0}),
    "slopes": ((2, 2, 4, 2, 16, 16, 8, 0, 2), {"slopes": 2}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_torch_computes(case: str, dtype: torch.dtype) -> None:
    (batch, n, heads, kv_heads, dim, value_dim, page_size, owner, ranks), options = CASES[case]
    torch.manual_seed(len(case))
    width, pages = 260 // page_size // ranks + 1, 64
    # Lengths of all kinds: none, pages that end within, and the most there are.
    most = width * ranks * page_size
    lengths = torch.tensor([most, n, most // 2 + 3][:batch])
    positions = lengths[:, None] + torch.arange(-n, 0)
    table = torch.stack([torch.randperm(pages)[:width] for _ in range(batch)]).int()
    k = torch.randn(pages, page_size, kv_heads, dim).to(dtype)
    v = torch.randn(pages, page_size, kv_heads, value_dim).to(dtype)
    if case == "latents":
        v = k[..., :value_dim]
    q = torch.randn(batch, n, heads, dim).to(dtype)
    slopes = torch.rand(options["slopes"], heads) / 8 if "slopes" in options else None
    mask = checks.check_mask(
        None, causal=True, window=options.get("window"), chunk_size=options.get("chunk_size"),
        cu_seqlens=None,
    )  # fmt: skip
    rules = Rules(mask, dim**-0.5, options.get("softcap"), slopes)
    keys = PagedKeys(k, v, table, owner, ranks)
    results = paged_kernel.attend(q, positions, keys, range(width), rules)
    wide = keys._replace(k=k.double(), v=v.double())
    expected = paged.attend(q.double(), positions, wide, range(width), rules)
    limit = {torch.float32: 2e-6, torch.float16: 2e-3}[dtype]
    for name, x, y in zip(("out", "lse"), results, expected, strict=True):
        torch.testing.assert_close(x, y.float(), rtol=limit, atol=limit, msg=f"{name}: {x} for {y}")


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_reach_the_rows_that_see_them(number: float) -> None:
    k, v = torch.randn(2, 8, 16, 1, 16).unbind(0)
    keys = PagedKeys(k, v, torch.arange(6, dtype=torch.int32)[None], 0, 1)
    rules = Rules(
        checks.check_mask(None, causal=True, window=None, chunk_size=None, cu_seqlens=None), 1.0, None, None
    )  # fmt: skip
    q, positions = torch.randn(1, 4, 2, 16), torch.arange(76, 80)[None]
    v[4, 14], k[5], v[5] = number, torch.nan, torch.nan  # position 78; a page behind the last
    out, lse = paged_kernel.attend(q, positions, keys, range(6), rules)
    assert out[:, :2].isfinite().all()
    assert out[:, 2:].isnan().all()
    assert lse.isfinite().all()


def test_decode_and_prefill_take_it_where_it_can() -> None:
    cp = ContextParallel()
    results = []
    for kernel in ("auto", "triton"):
        torch.manual_seed(0)
        cache = KVCache(
            cp, num_layers=1, num_kv_heads=2, head_dim=16, max_requests=3, max_tokens=512,
            page_size=16, dtype=torch.float32,
        )  # fmt: skip
        with patch.object(kernels, "reason_against_triton", lambda _, k=kernel: "" if k == "triton" else "no"):  # fmt: skip
            first, second = cache.add(2)
            cache.extend([first], 70)
            q, k, v = torch.randn(1, 70, 8, 16).split([4, 2, 2], 2)
            prefilled = cp.prefill(q, k, v, cache, layer=0, request=first, window=(40, 0))
            cache.extend([second, first], 3)
            q, k, v = torch.randn(2, 3, 8, 16).split([4, 2, 2], 2)
            cache.write(k, v, layer=0)
            text = cp.explain_serving("decode", q, cache, layer=0)
            assert f"kernel {'triton' if kernel == 'triton' else 'eager (no)'}: each rank" in text
            results.append([prefilled, cp.decode(q, cache, layer=0)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    with pytest.raises(UnsupportedError, match="kernel='triton': the kernel in Triton needs CUDA"):
        cp.decode(q, cache, layer=0, kernel="triton")


@pytest.mark.parametrize("is_latent", [False, True])
@pytest.mark.parametrize("owner", [0, 1])
def test_rows_are_written_as_torch_writes_them(owner: int, is_latent: bool) -> None:
    pools, cp, entered = [], ContextParallel(), list[torch.device]()

    def entering(device: torch.device) -> AbstractContextManager[object]:
        entered.append(device)
        return nullcontext()

    k, v = torch.randn(3, 5, 2, 700), None if is_latent else torch.randn(3, 5, 2, 24)
    for step in (None, step_kernels):
        cache = KVCache(
            cp, num_layers=1, num_kv_heads=2, head_dim=700, v_head_dim=24, max_requests=4, max_tokens=128,
            page_size=4, dtype=torch.float32,
        )  # fmt: skip
        held = cache._state
        with (
            patch.object(state, "step_kernels", lambda _, x=step: x),
            patch.object(step_kernels, "on_device", entering),
        ):
            first, second = cache.add(2)
            cache.extend([first], 14)
            cache.extend([second, first], 5)
            # Rows as of a rank among two, which has every other page; the last is padding.
            held._ranks = type("Ranks", (), {"rank": owner, "size": 2})  # type: ignore[assignment]
            cache.write(k, v, layer=0)
        pools.append([x[0][:-1] for x in (held._k, held._v or held._k)])
    for ours, theirs in zip(*pools, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.any()
    assert entered == [k.device]  # the launch is on the keys' device, whatever the current one is


def test_partials_are_merged_as_torch_merges_them() -> None:
    parts = torch.randn(3, 2, 4, 5, 8)
    parts[:, 0, 0, 0, -1] = -torch.inf
    parts[:, 0, 0, 0, :-1] = 0
    parts[1, 1, :, :, -1], parts[1, 1, :, :, :-1] = -torch.inf, 0
    parts[0, 0, 1, 1, -1], parts[2, 0, 2, 2, 3] = torch.nan, torch.nan
    expected = merging.combine(parts)
    torch.testing.assert_close(step_kernels.combine(parts), expected, equal_nan=True)


def inputs(tokens: int, channels: int, groups: int, numbers: int, rate: float) -> list[Tensor]:
    """Draw u, delta, A to minus a rate, B and C."""
    torch.manual_seed(channels)
    u, delta = torch.randn(2, 2, tokens, channels).unbind(0)
    projections = torch.randn(2, 2, tokens, groups, numbers).unbind(0)
    return [u, delta.abs(), -torch.rand(channels, numbers) * rate, *projections]


@pytest.mark.parametrize(
    ("documents", "tokens", "sizes", "rate"),
    [
        (None, 160, (4, 1, 4), 3),
        ((0, 5, 70, 71, 110), 110, (6, 1, 3), 3),  # chunks of short documents, padding, odd sizes
        (None, 37, (12, 2, 2), 3),
        (None, 160, (4, 1, 4), 300),  # decays of 0 in float32, and what is left of A's gradient
    ],
    ids=["chunks", "documents", "groups", "strong decays"],
)
@on_ranks
def test_its_runs_are_those_of_torch(
    documents: tuple[int, ...] | None, tokens: int, sizes: tuple[int, int, int], rate: float
) -> None:
    cp, whole = ContextParallel(), inputs(tokens, *sizes, rate)
    results = []
    for kernel in ("triton", "eager"):
        own = [
            (x if n == 2 else cp.shard(x, pad=True, fill=torch.nan)).clone().requires_grad_()
            for n, x in enumerate(whole)
        ]
        with patch.object(libraries, "reasons_against_triton", lambda *_: iter(())):
            out = cp.selective_scan(*own, cu_seqlens=documents, seq_len=tokens, kernel=kernel)
        torch.manual_seed(2)
        grads = torch.autograd.grad(out, own, torch.randn(out.shape))
        results.append([out.detach(), *grads])
    for name, actual, expected in zip(("out", "u", "delta", "A", "B", "C"), *results, strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=1e-5, msg=f"{name}: {actual} and {expected}"
        )


def test_auto_takes_it_where_it_can() -> None:
    given = inputs(8, 4, 1, 4, 1.0)
    cp = ContextParallel()
    assert "kernel eager: torch's operations" in cp.explain_recurrent("selective_scan", *given)
    with patch.object(libraries, "reasons_against_triton", lambda *_: iter(())):
        assert "kernel triton: Ring's own" in cp.explain_recurrent("selective_scan", *given)


def test_other_layers_are_refused() -> None:
    q, k, v = torch.randn(3, 1, 8, 2, 4).unbind(0)
    with pytest.raises(
        ValueError, match="Ring has a kernel of selective_scan, and none of simple_gla"
    ):
        ContextParallel().simple_gla(q, k, v, kernel="triton")
