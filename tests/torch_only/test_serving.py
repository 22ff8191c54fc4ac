"""Prefill and decode over a sharded K/V cache, compared with dense attention in float64.

And faults around it: of callers, of ranks, of kernels, and those of others.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks, on_two_ranks
from served import PAGE, SIZES, World, dense
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ring_torch
from ring_core import RankMismatchError, UnsupportedError, WrongResultError
from ring_torch import ContextParallel, KVCache
from ring_torch.local import LocalRanks
from ring_torch.serving import decoding, merging, paged, prefilling, state

H, K, D = 4, 2, 8


@pytest.fixture(params=[1, 2, 3], ids="{} ranks".format)
def pool(request: Any, pools: dict[int, LocalRanks]) -> LocalRanks:
    return pools[request.param]


def new_cache(cp: ContextParallel, **changes: Any) -> KVCache:
    sizes: dict[str, Any] = {
        "num_layers": 1, "num_kv_heads": K, "head_dim": D, "max_requests": 4, "max_tokens": 256,
        "page_size": PAGE, "dtype": torch.float64,
    }  # fmt: skip
    return KVCache(cp, **sizes | changes)


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def filled(cp: ContextParallel, n: int = 13, rows: int = 2) -> tuple[KVCache, Tensor, Tensor]:
    """Return a cache of some requests of ``n`` tokens, and their keys and values."""
    cache, k, v = new_cache(cp), randn(rows, n, K, D), randn(rows, n, K, D, seed=1)
    cache.extend(cache.add(rows), n)
    cache.write(k, v, layer=0)
    return cache, k, v


# What callers do wrong.


def refused(cp: ContextParallel, cache: KVCache, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Return wrong calls, by the text of their errors."""
    q, one, fork = randn(2, 1, H, D), k[:, :1], cache.fork

    def unwritten() -> None:
        cache.extend([0, 1], 1)
        cp.decode(q, cache, layer=0)

    def forked() -> None:
        cache.extend([0], 1)
        fork(0)
        cache.write(one[:1], one[:1], layer=0)

    def truncated() -> None:
        cache.extend([0], 2)
        cache.truncate(0, cache.lengths[0] - 1)
        cache.write(one[:1], one[:1], layer=0)

    def evicted() -> None:
        cache.evict(0)
        cp.decode(q, cache, layer=0)

    def alone() -> None:
        with cp.whole():
            cp.decode(q, cache, layer=0)

    return {
        "layer 0 of request 0 was not written since the last extend": unwritten,
        "what one extend has reserved, before the request is truncated or forked": forked,
        r"have \[0\] reserved positions": truncated,
        "v=None says that values are the first 8 of 8 numbers": lambda: cache.write(k, layer=0),
        "of which one was evicted: name the requests": evicted,
        "q has 99 tokens, and request 0 only 13": lambda: cp.decode(randn(2, 99, H, D), cache, layer=0),
        "q must have a row for each of 2 requests, and up to 4 with padding, got 1 rows": (
            lambda: cp.decode(q[:1], cache, layer=0)
        ),
        "q must have a row for each of 1 requests, got 2 rows": (
            lambda: cp.decode(q, cache, layer=0, requests=[0])
        ),
        r"k must be \[2, 13, 2, 8\], a row for each reserved position": (
            lambda: cache.write(one, one, layer=0)
        ),
        "decode has no backward, and q requires a gradient": (
            lambda: cp.decode(q.clone().requires_grad_(), cache, layer=0)
        ),
        "decode has no backward, and sinks requires a gradient": (
            lambda: cp.decode(q, cache, layer=0, sinks=torch.zeros(H, requires_grad=True))
        ),
        "write has no backward, and k requires a gradient": (
            lambda: cache.write(k.clone().requires_grad_(), v, layer=0)
        ),
        "merge_partials has no backward, and out requires a gradient": (
            lambda: cp.merge_partials(q.clone().requires_grad_(), randn(2, H, 1))
        ),
        "q is torch.float32 on cpu, and the cache torch.float64": (
            lambda: cp.decode(q.float(), cache, layer=0)
        ),
        r"q must be \[1, \d+, H, D\], this rank's part of the 13 reserved tokens": (
            lambda: cp.prefill(q[:1], one[:1], one[:1], cache, layer=0, request=0)
        ),
        "no option is called scale. Instead: for scale, use softmax_scale": (
            lambda: cp.decode(q, cache, layer=0, scale=1.0)  # type: ignore[call-overload]  # wrong
        ),
        "the cache is of . ranks, and cp of another group": (
            alone if cp.cp_size > 1 else lambda: alone_elsewhere(cache, q)
        ),
    }  # fmt: skip


def alone_elsewhere(cache: KVCache, q: Tensor) -> None:
    """Call a cache of this process alone from a block in which ranks act alone."""
    cp = ContextParallel()
    with cp.whole():
        cp.decode(q, cache, layer=0)


@on_ranks
def test_what_is_refused_before_anything_is_sent() -> None:
    cp = ContextParallel()
    count = len(refused(cp, *filled(cp)))
    for n in range(count):
        text, call = list(refused(cp, *filled(cp)).items())[n]
        with pytest.raises(ValueError, match=text):
            call()
    cache, *_ = filled(cp)
    with pytest.raises(UnsupportedError, match="'symm_mem' has no exchange of partial results"):
        cp.decode(randn(2, 1, H, D), cache, layer=0, transport="symm_mem")


@on_ranks
def test_requests_may_come_in_any_form(rank: int) -> None:
    cp = ContextParallel()
    cache, *_ = filled(cp)
    forms: list[Any] = [[1, 0], (1, 0), [np.int64(1), np.int32(0)], range(1, -1, -1)]
    q = randn(2, 1, H, D)
    outs = [cp.decode(q, cache, layer=0, requests=forms[(n + rank) % len(forms)]) for n in range(4)]
    assert all(torch.equal(outs[0], x) for x in outs)


@on_ranks
def test_what_runs_out_changes_nothing() -> None:
    cp = ContextParallel()
    cache, k, v = filled(cp)
    before = cp.decode(q := randn(2, 3, H, D), cache, layer=0)
    with pytest.raises(ValueError, match="nothing was reserved"):
        cache.extend([0, 1], 200)
    assert cache.lengths == {0: 13, 1: 13}
    assert torch.equal(cp.decode(q, cache, layer=0), before)
    expected = dense(q[1], (k[1], v[1]), 0, {})[0]
    torch.testing.assert_close(before[1], expected, rtol=1e-12, atol=1e-12)


@on_ranks
def test_tables_are_those_that_torch_takes() -> None:
    cp = ContextParallel()
    cache, k, _ = filled(cp, n=2 * PAGE * cp.cp_size + 3)
    cache.truncate(1, PAGE + 1)
    counts, table = cache.seqused_k.tolist(), cache.block_table
    assert cache.seqused_k.dtype == table.dtype == torch.int32
    for row, length in enumerate(cache.lengths.values()):
        own = [t for t in range(length) if t // PAGE % cp.cp_size == cp.cp_rank]
        assert counts[row] == len(own)
        rows = cache._state._k[0][table[row].long()].flatten(0, 1)[: len(own)]
        assert torch.equal(rows, k[row, own])
    assert cache.bytes == 2 * (cache._state._table.num_pages + 1) * PAGE * K * D * 8


# Ranks that disagree, or are lost.


def extended(cache: KVCache, request: int) -> None:
    cache.extend([request], 4)
    cache.write(randn(1, 4, K, D), randn(1, 4, K, D), layer=0)


DISAGREE: dict[str, tuple[Callable[[KVCache, int], Any], str]] = {
    "a fork more": (lambda cache, rank: rank and cache.fork(1), "state of the cache"),
    "shorter": (lambda cache, rank: rank and cache.truncate(1, 5), "state of the cache"),
    "other requests": (extended, "state of the cache"),
    "grown": (lambda cache, rank: rank and cache.grow(PAGE), "pages is"),
}


def in_time(seconds: int) -> ContextParallel:
    """Return context parallelism over a group of its own with this timeout."""
    group: Any = dist.new_group(timeout=timedelta(seconds=seconds))
    return ContextParallel(group)


@pytest.mark.parametrize("name", DISAGREE)
@pytest.mark.parametrize("call", ["decode", "prefill"])
@on_two_ranks
def test_caches_that_disagree(rank: int, call: str, name: str) -> None:
    (change, message), cp = DISAGREE[name], in_time(10)
    cache, *_ = filled(cp)
    cp.decode(randn(2, 1, H, D), cache, layer=0)  # a call that was compared before
    if call == "prefill":
        cache.extend([0], 4)
    change(cache, rank)
    q, k = randn(1, 2, H, D), randn(1, 2, K, D)
    request = rank if name == "other requests" else 0
    calls: dict[str, Callable[[], Any]] = {
        "decode": lambda: cp.decode(q[:, :1], cache, layer=0, requests=[0]),
        "prefill": lambda: cp.prefill(q, k, k, cache, layer=0, request=request),
    }
    with pytest.raises(RankMismatchError, match=message):
        calls[call]()


@on_two_ranks
def test_a_lost_rank_ends_decode_on_the_others(rank: int) -> None:
    cp = in_time(3)
    cache, *_ = filled(cp)
    cp.decode(randn(2, 1, H, D), cache, layer=0)
    if rank == 1:
        return
    with pytest.raises(
        RuntimeError, match=r"call \d+ \(decode\): rank 0 waited in vain for rank 1"
    ):
        cp.decode(randn(2, 1, H, D), cache, layer=0)


# What the tripwire sees.


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def wrong_by(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    return lambda *args: change(*ATTEND(*args))


def last_query_for_all(q: Tensor, positions: Tensor, *rest: Any) -> Any:
    """Let every query see what the last one sees (vllm 50391)."""
    return ATTEND(q, positions.amax(dim=1, keepdim=True).expand_as(positions), *rest)


def merged_as_base_2(ranks: Any, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge natural logarithms as if they were of base 2 (sglang 33325)."""
    out, lse = merging.merge_over_ranks(ranks, out, lse * 0.6931471805599453)
    return out, lse / 0.6931471805599453


def gathered_twice(ranks: Any, packed: Tensor) -> Tensor:
    GATHERED(ranks, packed)
    return GATHERED(ranks, packed)


GATHERED, ATTEND = merging._gathered, paged.attend
FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "no fault": (paged, "_BLOCK_SCORES", 1, ""),
    "values": (paged, "attend", wrong_by(lambda out, lse: (out * 1.001, lse)), r"out\["),
    "lse": (paged, "attend", wrong_by(lambda out, lse: (out, lse + 0.01)), r"lse\["),
    "the last query's length": (paged, "attend", last_query_for_all, r"out\["),
    "base 2": (decoding, "merge_over_ranks", merged_as_base_2, r"out\["),
    "more bytes": (merging, "_gathered", gathered_twice, "bytes were sent, and the call states"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@on_ranks
def test_the_tripwire(name: str) -> None:
    cp = ContextParallel()
    if cp.cp_size == 1 and name != "no fault":  # one rank alone is not checked: nothing is merged
        return
    owner, attribute, value, message = FAULTS[name]
    cache, k, v = filled(cp, n=21)
    cache.extend([0], 11)
    q = randn(1, 11, H, D)

    def run() -> None:
        shards = [cp.shard(x, pad=True) for x in (q, k[:1, :11], v[:1, :11])]
        cp.prefill(
            shards[0], shards[1], shards[2], cache, layer=0, request=0, sinks=randn(H), softcap=2.0
        )
        for _ in range(4):
            cp.decode(q, cache, layer=0, requests=[0], window=(9, 0), alibi_slopes=randn(H).abs())

    with ring_torch.check(), patched(owner, attribute, value):
        if not message:
            run()
            return
        with pytest.raises(WrongResultError, match=message):
            run()


@on_ranks
def test_random_schedules_under_the_tripwire() -> None:
    with ring_torch.check(every=3):
        World(ContextParallel(), SIZES["groups"], 77).run(12)


# Partial results alone, and faults of others.


@pytest.mark.parametrize("heads", [1, 2, 5])  # fewer than ranks, too (sglang 34355)
@pytest.mark.parametrize("limit", [0, 1 << 16])
@pytest.mark.parametrize("base", ["e", "2"])
@on_ranks
def test_merge_partials(heads: int, limit: int, base: Any) -> None:
    cp, (n, keys) = ContextParallel(), (3, 12)
    q, k, v = randn(n, heads, D), randn(keys, heads, D), randn(keys, heads, D, seed=1)
    expected = torch.einsum("nhd,mhd->hnm", q, k)
    out = torch.einsum("hnm,mhd->nhd", expected.softmax(-1), v)
    ranks = cp.cp_size
    own = slice(cp.cp_rank, None, max(1, ranks - 1))  # the last rank has no key that is not ...
    if ranks > 1 and cp.cp_rank == ranks - 1:
        own = slice(0, 0)  # ... another's: it is empty, and says NaN
    scores = torch.einsum("nhd,mhd->hnm", q, k[own])
    lse = scores.logsumexp(-1) if k[own].numel() else torch.full((heads, n), -torch.inf).double()
    part = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v[own])
    part = part if k[own].numel() else torch.full_like(part, torch.nan)
    factor = 1.4426950408889634 if base == "2" else 1.0
    with patched(merging, "BY_HEAD", limit):
        got, got_lse = cp.merge_partials(part[None], lse[None] * factor, lse_base=base)
        low, low_lse = cp.merge_partials(
            part[None].float(), (lse[None] * factor).float(), lse_base=base
        )
        nothing, nowhere = cp.merge_partials(
            torch.full_like(part[None], torch.nan), torch.full_like(lse[None], -torch.inf)
        )
    torch.testing.assert_close(got[0], out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_lse[0] / factor, expected.logsumexp(-1), rtol=1e-12, atol=1e-12)
    assert low.dtype == low_lse.dtype == torch.float32
    torch.testing.assert_close(low[0].double(), out, rtol=1e-5, atol=1e-5)
    assert not nothing.any()
    assert bool((nowhere == -torch.inf).all())
    # All ranks have the same bits, so they choose the same tokens (vllm 41623).
    whole = ContextParallel(layout="contiguous").unshard(
        torch.cat([got.flatten(), low.double().flatten()])[None], dim=1
    )
    assert all(torch.equal(x, whole.chunk(ranks, 1)[0]) for x in whole.chunk(ranks, 1))


@on_ranks
def test_nan_reaches_only_those_that_see_it() -> None:
    """A key or value that is not finite is seen by later queries alone."""
    cp = ContextParallel()
    for where in ("k", "v"):
        cache, k, v = filled(cp, n=10)
        (k if where == "k" else v)[0, 8] = torch.nan
        cache.write(k, v, layer=0)
        out = cp.decode(q := randn(2, 4, H, D), cache, layer=0)  # queries at 6, 7, 8 and 9
        assert bool(out[0, 2:].isnan().all())
        assert not out[0, :2].isnan().any()
        assert not out[1].isnan().any()
        for row, keys in ((0, 8), (1, 10)):
            expected = dense(q[row, : keys - 6], (k[row, :keys], v[row, :keys]), 0, {})[0]
            torch.testing.assert_close(out[row, : keys - 6], expected, rtol=1e-12, atol=1e-12)


# Memory, and graphs.


@pytest.mark.nightly(unless=["1 ranks-600"])
@pytest.mark.parametrize("steps", [600, 10_000])
@on_ranks
def test_memory_does_not_grow(steps: int) -> None:
    cp = ContextParallel()
    cache, q, x = new_cache(cp), randn(1, 1, H, D), randn(1, 1, K, D)
    (request,) = cache.add()
    tracemalloc.start()
    sizes = []
    for n in range(steps):
        cache.extend([request], 1)
        cache.write(x, x, layer=0)
        cp.decode(q, cache, layer=0)
        if n % 50 == 49:
            fork = cache.fork(request)
            cache.evict(request)
            cache.truncate(fork, 3)
            request = fork
        if n in (steps // 2, steps - 1):
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[1] - sizes[0] < 64 << 10


class Graph(TorchDispatchMode):
    """Operations recorded as a CUDA graph does, and run again on the same tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the base has no types
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            if isinstance(result, Tensor) and result.data_ptr() != again.data_ptr():
                result.copy_(again)


def test_a_graph_serves_other_steps() -> None:
    """A recorded step is right after forks, evictions and for fewer requests than its bucket."""
    cp = ContextParallel()
    cache, (k, v, q) = new_cache(cp), (randn(3, 1, K, D), randn(3, 1, K, D), randn(3, 1, H, D))
    history: dict[int, list[Tensor]] = {}

    def new(requests: list[int], seed: int) -> None:
        for x, draw in ((k, 0), (v, 1), (q, 2)):
            x.copy_(randn(*x.shape, seed=seed * 3 + draw))
        cache.extend(requests, 1)
        for row, request in enumerate(requests):
            pair = history.setdefault(request, [torch.zeros(0, K, D).double()] * 2)
            history[request] = [torch.cat([a, b[row]]) for a, b in zip(pair, (k, v), strict=True)]

    def step() -> Tensor:
        cache.write(k, v, layer=0)
        return cp.decode(q, cache, layer=0, window=(6, 0))

    def check(out: Tensor, requests: list[int]) -> None:
        for row, request in enumerate(requests):
            expected = dense(q[row], history[request], 0, {"window": (6, 0)})[0]
            torch.testing.assert_close(out[row], expected, rtol=1e-12, atol=1e-12)
        assert not out[len(requests) :].any()

    first, second = cache.add(2)
    new([first, second], 0)
    step()
    new([first, second], 1)
    with (
        patched(state, "is_capturing", lambda: True), patched(decoding, "is_capturing", lambda: True),
        patched(paged, "is_capturing", lambda: True), Graph() as graph,
    ):  # fmt: skip
        out = step()
    check(out, [first, second])
    for n in range(2, 30):
        requests = [[first], [second, first], [second]][n % 3]
        if n == 9:
            third = cache.fork(first)
            history[third] = [*history[first]]
        if n > 9:
            requests = [*requests, third]
        if n == 20:
            cache.truncate(second, 3)
            history[second] = [x[:3] for x in history[second]]
        new(requests, n)
        graph.replay()
        check(out, requests)
    version = cache.version
    cache.grow(PAGE)
    assert cache.version == version + 1
    new([first, third], 40)
    check(step(), [first, third])


WAYS = ("False-None", "True-True", "False-False")
SCHEDULES = [
    (name, seed, by_head, queries)
    for seed, (name, by_head, queries) in enumerate(
        (name, by_head, queries)
        for name in SIZES
        for by_head, queries in ((False, None), (True, True), (False, False))
    )
]


@pytest.mark.nightly(unless=[
    *(f"{ranks} ranks-groups-{n}-{way}" for ranks in (2, 3) for n, way in enumerate(WAYS)),
    "1 ranks-groups-0-False-None", "3 ranks-one K/V head-4-True-True", "3 ranks-latents-6-False-None",
    "2 ranks-latents-8-False-False",
])  # fmt: skip
@pytest.mark.parametrize(("name", "seed", "by_head", "queries"), SCHEDULES)
@on_ranks
def test_random_schedules(name: str, seed: int, by_head: bool, queries: bool | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if by_head:  # each rank merges a part of the heads, of which there may be fewer than ranks
            patch.setattr(merging, "BY_HEAD", 0)
        if queries is not None:
            patch.setattr(prefilling._Part, "queries_travel", queries)
        World(ContextParallel(), SIZES[name], seed).run(25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks
def test_schedules_in_other_dtypes(dtype: torch.dtype) -> None:
    World(ContextParallel(), SIZES["groups"], 31, dtype).run(12)
