"""Triton's kernels of pages and of selective scans compute what torch computes."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ring_core import UnsupportedError, checks
from ring_torch import ContextParallel
from ring_torch.recurrent import libraries
from ring_torch.serving import KVCache, kernels, merging, paged, paged_kernel, state, step_kernels
from ring_torch.serving.paged import PagedKeys, Rules
from ring_torch.training import part, softmax_kernel, token_log_probs

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


def rules(dim: int, slopes: Tensor | None = None, **options: Any) -> Rules:
    softcap = options.pop("softcap", None)
    mask = {"window": None, "chunk_size": None, "cu_seqlens": None} | options
    return Rules(checks.check_mask(None, causal=True, **mask), dim**-0.5, softcap, slopes)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, (torch.float32, torch.float16)[n % 2]) for n, case in enumerate(CASES)),
        ("one new token", torch.float16), ("many new tokens", torch.float32),
    ],
)  # fmt: skip
def test_it_computes_what_torch_computes(case: str, dtype: torch.dtype) -> None:
    (batch, n, heads, kv_heads, dim, value_dim, page_size, owner, ranks), options = CASES[case]
    torch.manual_seed(len(case))
    width, pages = 260 // page_size // ranks + 1, 64
    # Lengths of all kinds: none, pages that end within, and the most there are.
    most = width * ranks * page_size
    positions = torch.tensor([most, n, most // 2 + 3][:batch])[:, None] + torch.arange(-n, 0)
    table = torch.stack([torch.randperm(pages)[:width] for _ in range(batch)]).int()
    k = torch.randn(pages, page_size, kv_heads, dim).to(dtype)
    v = torch.randn(pages, page_size, kv_heads, value_dim).to(dtype)
    if case == "latents":
        v = k[..., :value_dim]
    q = torch.randn(batch, n, heads, dim).to(dtype)
    if "slopes" in options:
        options = {"slopes": torch.rand(options["slopes"], heads) / 8}
    keys, call = PagedKeys(k, v, table, owner, ranks), (range(width), rules(dim, **options))
    results = paged_kernel.attend(q, positions, keys, *call)
    wide = keys._replace(k=k.double(), v=v.double())
    expected = paged.attend(q.double(), positions, wide, *call)
    limit = {torch.float32: 2e-6, torch.float16: 2e-3}[dtype]
    for name, x, y in zip(("out", "lse"), results, expected, strict=True):
        torch.testing.assert_close(x, y.float(), rtol=limit, atol=limit, msg=f"{name}: {x} for {y}")


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_reach_the_rows_that_see_them(number: float) -> None:
    k, v = torch.randn(2, 8, 16, 1, 16).unbind(0)
    keys = PagedKeys(k, v, torch.arange(6, dtype=torch.int32)[None], 0, 1)
    q, positions = torch.randn(1, 4, 2, 16), torch.arange(76, 80)[None]
    v[4, 14], k[5], v[5] = number, torch.nan, torch.nan  # position 78; a page behind the last
    out, lse = paged_kernel.attend(q, positions, keys, range(6), rules(16))
    assert out[:, :2].isfinite().all()
    assert out[:, 2:].isnan().all()
    assert lse.isfinite().all()


def cache_of(dim: int, **options: Any) -> tuple[KVCache, tuple[int, ...]]:
    """Return a cache with two requests."""
    cache = KVCache(
        ContextParallel(), num_layers=1, num_kv_heads=2, head_dim=dim, max_requests=4, max_tokens=512,
        dtype=torch.float32, **options,
    )  # fmt: skip
    return cache, cache.add(2)


def test_decode_and_prefill_take_it_where_it_can() -> None:
    cp, results = ContextParallel(), []
    for kernel, reason in (("eager (no)", "no"), ("triton", "")):
        torch.manual_seed(0)
        with patch.object(kernels, "reason_against_triton", lambda _, reason=reason: reason):
            cache, (first, second) = cache_of(16, page_size=16)
            cache.extend([first], 22)
            q, k, v = torch.randn(1, 22, 8, 16).split([4, 2, 2], 2)
            prefilled = cp.prefill(q, k, v, cache, layer=0, request=first, window=(12, 0))
            cache.extend([second, first], 3)
            q, k, v = torch.randn(2, 3, 8, 16).split([4, 2, 2], 2)
            cache.write(k, v, layer=0)
            text = cp.explain_serving("decode", q, cache, layer=0)
            assert f"kernel {kernel}: each rank" in text
            results.append([prefilled, cp.decode(q, cache, layer=0)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    with pytest.raises(UnsupportedError, match="kernel='triton': the kernel in Triton needs CUDA"):
        cp.decode(q, cache, layer=0, kernel="triton")


@pytest.mark.parametrize("is_latent", [False, True])
@pytest.mark.parametrize("owner", [0, 1])
def test_rows_are_written_as_torch_writes_them(owner: int, is_latent: bool) -> None:
    pools = []
    k, v = torch.randn(3, 5, 2, 700), None if is_latent else torch.randn(3, 5, 2, 24)
    for step in (None, step_kernels):
        cache, (first, second) = cache_of(700, v_head_dim=24, page_size=4)
        held: Any = cache._state
        with (
            patch.object(state, "step_kernels", lambda _, x=step: x),
            patch.object(step_kernels, "on_device", side_effect=lambda _: nullcontext()) as entered,
        ):
            cache.extend([first], 14)
            cache.extend([second, first], 5)
            # Rows as of a rank among two, which has every other page; the last is padding.
            held._ranks = SimpleNamespace(rank=owner, size=2)
            cache.write(k, v, layer=0)
        pools.append([x[0][:-1] for x in (held._k, held._v or held._k)])
    for ours, theirs in zip(*pools, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.any()
    entered.assert_called_once_with(k.device)  # the keys' device, whatever the current one is


def test_partials_are_merged_as_torch_merges_them() -> None:
    parts = torch.randn(3, 2, 4, 5, 8)
    parts[:, 0, 0, 0, -1] = -torch.inf
    parts[:, 0, 0, 0, :-1] = 0
    parts[1, 1, :, :, -1], parts[1, 1, :, :, :-1] = -torch.inf, 0
    parts[0, 0, 1, 1, -1], parts[2, 0, 2, 2, 3] = torch.nan, torch.nan
    expected = merging.combine(parts)
    torch.testing.assert_close(step_kernels.combine(parts), expected, equal_nan=True)


def inputs(tokens: int, channels: int, groups: int, numbers: int) -> list[Tensor]:
    """Draw u, delta, A, of which every other channel decays to 0 in float32, B and C."""
    torch.manual_seed(channels)
    u, delta = torch.randn(2, 2, tokens, channels).unbind(0)
    projections = torch.randn(2, 2, tokens, groups, numbers).unbind(0)
    rates = torch.tensor([[3.0], [300.0]]).repeat(channels // 2, 1)
    return [u, delta.abs(), -torch.rand(channels, numbers) * rates, *projections]


@pytest.mark.parametrize(
    ("documents", "tokens", "sizes"),
    [
        (None, 160, (4, 1, 4)),
        ((0, 5, 46, 47, 78), 78, (6, 1, 3)),  # chunks of short documents, padding, odd sizes
        (None, 37, (12, 2, 2)),
    ],
    ids=["chunks", "documents", "groups"],
)
@on_ranks
def test_its_runs_are_those_of_torch(
    documents: tuple[int, ...] | None, tokens: int, sizes: tuple[int, int, int]
) -> None:
    cp, whole = ContextParallel(), inputs(tokens, *sizes)
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
    given, cp = inputs(8, 4, 1, 4), ContextParallel()
    assert "kernel eager: torch's operations" in cp.explain_recurrent("selective_scan", *given)
    with patch.object(libraries, "reasons_against_triton", lambda *_: iter(())):
        assert "kernel triton: Ring's own" in cp.explain_recurrent("selective_scan", *given)
    q, k, v = torch.randn(3, 1, 8, 2, 4).unbind(0)
    message = "Ring has a kernel of selective_scan, and none of simple_gla"
    with pytest.raises(ValueError, match=message):
        cp.simple_gla(q, k, v, kernel="triton")


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "cap": {"softcap": 0.7}, "large cap": {"softcap": 300.0},
    "temperature": {"temperature": 0.6}, "weight": {"weight": True},
    "both, bias": {"softcap": 2.0, "temperature": 1.7, "bias": True},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options", "dtype"),
    [
        *product(["loss"], OPTIONS, [torch.float32, torch.bfloat16]),
        *product(["log_probs"], OPTIONS, [torch.float32]),
        *product(["loss", "log_probs"], ["both, bias"], [torch.float16]),
    ],
)
def test_losses_by_the_kernel(kind: str, options: str, dtype: torch.dtype) -> None:
    torch.manual_seed(len(options))
    kwargs = dict(OPTIONS[options])
    if kind == "log_probs" and kwargs.pop("weight", None):
        kwargs["temperature"] = 2.0
    tensors = {"hidden": torch.randn(1, 11, 16), "head": torch.randn(70, 16) / 2}
    labels = torch.randint(0, 70, (1, 11))
    labels[0, ::4] = -100
    kwargs |= {name: torch.rand(70).to(dtype) for name in kwargs.keys() & {"bias", "weight"}}
    grad = torch.randn(1, 11)
    if "bias" in kwargs:
        tensors["bias"] = kwargs.pop("bias")
    rounded = {name: x.to(dtype) for name, x in tensors.items()}

    def results(dtype: torch.dtype) -> list[Tensor]:
        x = {name: x.to(dtype).requires_grad_() for name, x in rounded.items()}
        more: dict[str, Any] = kwargs | {"tokens_at_once": 4}
        if "weight" in more:  # of classes
            more["weight"] = more["weight"].to(torch.promote_types(dtype, torch.float32))
        if kind == "loss":
            arrays = x["hidden"][0], x["head"], x.get("bias"), labels[0]
            out = loss = part.linear_loss(*arrays, **more)
        else:
            more |= {"bias": x["bias"]} if "bias" in x else {}
            out = token_log_probs(ContextParallel(), x["hidden"], x["head"], labels, **more)
            loss = (out * grad).sum()
        return [out.detach(), *torch.autograd.grad(loss, [*x.values()])]

    exact = results(torch.float64)
    with patch.object(softmax_kernel, "_BLOCK", 32):
        with patch.object(part, "_fused_log_probs", lambda _: softmax_kernel.log_probs_):
            got = results(dtype)
        plain = results(dtype)
    for x, y, z in zip(got, plain, exact, strict=True):
        assert x.dtype == y.dtype
        most = torch.finfo(dtype).eps * z.abs().max() + 2 * (y.double() - z).abs().max()
        assert (x.double() - z).abs().max() <= most


def test_what_rows_hold() -> None:
    """A row that does not count gets zeros, whatever it holds; a label of no class gets NaN."""
    logits = torch.tensor([[1.0, 2.0], [torch.nan, 0.0], [1.0, 2.0]])
    own = torch.tensor([1.0, 0.0, 1.0])
    log_probs = softmax_kernel.log_probs_(logits, torch.tensor([0, 1, 2]), own, 1.0, None)
    p = torch.tensor([1.0, 2.0]).softmax(0)
    torch.testing.assert_close(log_probs[0], p[0].log())
    torch.testing.assert_close(logits[0], torch.stack([1 - p[0], -p[1]]))
    assert (logits[1] == 0).all()
    assert log_probs[2].isnan()


@pytest.mark.parametrize("hip", [None, "7.0"])
def test_rocm_has_no_products_of_another_dtype(hip: str | None) -> None:
    with FakeTensorMode(), patch.object(torch.version, "hip", hip), patch("torch.addmm") as wide:
        hidden, head, logits = (
            torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            for shape in ((4, 16), (70, 16), (4, 70))
        )
        part._Gradients(hidden, head, torch.float32, trains_hidden=False, trains_head=True).add(
            logits, None, hidden, slice(4)
        )
    assert wide.called == (hip is None)
