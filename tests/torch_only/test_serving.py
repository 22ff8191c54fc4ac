"""Prefill and decode over a sharded K/V cache, compared with the oracle.

And faults around it: of callers, of ranks, of kernels, and those of others.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dense import numbers
from on_ranks import on_ranks, on_two_ranks
from plain_flash import PlainFlash
from refused import refused
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ring_torch
from ring_core import LayoutName, Mask, RankMismatchError, WrongResultError
from ring_core.reference import attention
from ring_torch import ContextParallel, KVCache
from ring_torch.kernels.fa4 import library
from ring_torch.kernels.library import LaunchOptions
from ring_torch.local import LocalRanks
from ring_torch.serving import decoding, flash_pages, kernels, merging, paged, prefilling, state

H, K, D = 4, 2, 8
PAGE, LAYERS = 4, 2
LAYOUTS: tuple[LayoutName, ...] = ("contiguous", "zigzag", "striped")
randn = partial(numbers, 0)


@pytest.fixture(params=[1, 2, 3], ids="{} ranks".format)
def pool(request: Any, pools: dict[int, LocalRanks]) -> LocalRanks:
    return pools[request.param]


def new_cache(cp: ContextParallel, **changes: Any) -> KVCache:
    sizes: dict[str, Any] = {
        "num_layers": 1, "num_kv_heads": K, "head_dim": D, "max_requests": 4, "max_tokens": 256,
        "page_size": PAGE, "dtype": torch.float64,
    }  # fmt: skip
    return KVCache(cp, **sizes | changes)


def filled(cp: ContextParallel, n: int = 13, rows: int = 2) -> tuple[KVCache, Tensor, Tensor]:
    """Return a cache of some requests of ``n`` tokens, and their keys and values."""
    cache, k, v = new_cache(cp), randn(rows, n, K, D), numbers(1, rows, n, K, D)
    cache.extend(cache.add(rows), n)
    cache.write(k, v, layer=0)
    return cache, k, v


def dense(q: Tensor, kv: Sequence[Tensor], row: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    """Attend with the last queries ``[n, H, D]`` of a request to all its keys ``[L, K, D]``."""
    if (slopes := options.get("alibi_slopes")) is not None and slopes.ndim == 2:
        options["alibi_slopes"] = slopes[row]
    options = {n: x.double().numpy() if isinstance(x, Tensor) else x for n, x in options.items()}
    arrays = [x.double().numpy()[None] for x in (q, *kv)]
    out, lse = attention(arrays[0], arrays[1], arrays[2], causal=True, **options)
    return torch.from_numpy(out[0]), torch.from_numpy(lse[0])


def close(actual: Tensor, expected: Tensor, limit: float = 1e-12) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=limit, atol=limit)


# What callers do wrong.


def wrong_calls(cp: Any, cache: KVCache, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Return wrong calls, by the text of their errors."""
    q, one = randn(2, 1, H, D), k[:, :1]
    shards: Any = [cp.shard(x[:1], pad=True) for x in (randn(2, 13, H, D), k, v)]

    def decode(q: Tensor = q, **options: Any) -> None:
        cp.decode(q, cache, layer=0, **options)

    def write(rows: int = 1) -> None:
        cache.write(one[:rows], one[:rows], layer=0)

    def after(*calls: Callable[[], object]) -> Callable[[], object]:
        return lambda: [call() for call in calls]

    def alone() -> None:
        cp_of_call = cp if cp.cp_size > 1 else ContextParallel()  # there a block alone is another
        with cp_of_call.whole():
            cp_of_call.decode(q, cache, layer=0)

    return {
        "layer 0 of request 0 was not written since the last extend": after(lambda: cache.extend([0, 1], 1), decode),
        "what one extend has reserved, before the request is truncated or forked": after(lambda: cache.extend([0], 1), lambda: cache.fork(0), write),
        r"have \[0\] reserved positions": after(lambda: cache.extend([0], 2), lambda: cache.truncate(0, cache.lengths[0] - 1), write),
        "v=None says that values are the first 8 of 8 numbers": lambda: cache.write(k, layer=0),
        "nothing was reserved": lambda: cache.extend([0, 1], 200),
        "of which one was evicted: name the requests": after(lambda: cache.evict(0), decode),
        "q has 99 tokens, and request 0 only 13": lambda: decode(randn(2, 99, H, D)),
        "q must have a row for each of 2 requests, and up to 4 with padding, got 1 rows": lambda: decode(q[:1]),
        "q must have a row for each of 1 requests, got 2 rows": lambda: decode(requests=[0]),
        r"k must be \[2, 13, 2, 8\], a row for each reserved position": lambda: write(2),
        "decode has no backward, and q requires a gradient": lambda: decode(q.clone().requires_grad_()),
        "decode has no backward, and sinks requires a gradient": lambda: decode(sinks=torch.zeros(H, requires_grad=True)),
        "write has no backward, and k requires a gradient": lambda: cache.write(k.clone().requires_grad_(), v, layer=0),
        "merge_partials has no backward, and out requires a gradient": lambda: cp.merge_partials(q.clone().requires_grad_(), randn(2, H, 1)),
        "q is torch.float32 on cpu, and the cache torch.float64": lambda: decode(q.float()),
        r"q must be \[1, \d+, H, D\], this rank's part of the 13 reserved tokens": lambda: cp.prefill(q[:1], one[:1], one[:1], cache, layer=0, request=0),
        "no option is called scale. Instead: for scale, use softmax_scale": lambda: decode(scale=1.0),
        "the cache is of . ranks, and cp of another group": alone,
        "'symm_mem' has no exchange of partial results": lambda: decode(transport="symm_mem"),
        "kernel='fa4': flash-attn-4 needs CUDA": lambda: cp.prefill(*shards, cache, layer=0, request=0, kernel="fa4"),
        "kernel='fa4': it is for prefill": lambda: decode(kernel="fa4"),
    }  # fmt: skip


@on_ranks
def test_what_is_refused_before_anything_is_sent() -> None:
    cp = ContextParallel()
    for text in wrong_calls(cp, *filled(cp)):
        refused(text, wrong_calls(cp, *filled(cp))[text])


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


#: What a rank does with its cache, and a pattern of the error; the lost rank makes no call.
DISAGREE: dict[str, tuple[Callable[[KVCache, int], Any], str]] = {
    "a fork more": (lambda cache, rank: rank and cache.fork(1), "state of the cache"),
    "shorter": (lambda cache, rank: rank and cache.truncate(1, 5), "state of the cache"),
    "other requests": (
        lambda cache, rank: (cache.extend([rank], 4), cache.write(*randn(2, 1, 4, K, D), layer=0)), "state of the cache",
    ),
    "grown": (lambda cache, rank: rank and cache.grow(PAGE), "pages is"),
    "lost": (lambda *_: None, r"call \d+ \((decode|prefill)\): rank 0 waited in vain for rank 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", DISAGREE)
@pytest.mark.parametrize("call", ["decode", "prefill"])
@on_two_ranks
def test_ranks_that_disagree_or_are_lost(rank: int, call: str, name: str) -> None:
    group: Any = dist.new_group(timeout=timedelta(seconds=3))
    (change, message), cp = DISAGREE[name], ContextParallel(group)
    cache, *_ = filled(cp)
    cp.decode(randn(2, 1, H, D), cache, layer=0)  # a call that is compared
    if call == "prefill":
        cache.extend([0], 4)
    change(cache, rank)
    q, k, request = randn(1, 2, H, D), randn(1, 2, K, D), rank * (name == "other requests")
    attempt: Any = partial(cp.decode, q[:, :1], cache, requests=[0])
    if call == "prefill":
        attempt = partial(cp.prefill, q, k, k, cache, request=request)
    if name != "lost":
        refused(message, attempt, error=RankMismatchError, layer=0)
    elif rank == 0:
        refused(message, attempt, error=RuntimeError, layer=0)


# What the tripwire sees.


def last_query_for_all(q: Tensor, positions: Tensor, *rest: Any) -> Any:
    """Let every query see what the last one sees (vllm 50391)."""
    return ATTEND(q, positions.amax(dim=1, keepdim=True).expand_as(positions), *rest)


def merged_as_base_2(ranks: Any, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge natural logarithms as if they were of base 2 (sglang 33325)."""
    out, lse = merging.merge_over_ranks(ranks, out, lse * 0.6931471805599453)
    return out, lse / 0.6931471805599453


GATHERED, ATTEND = merging._gathered, paged.attend
FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "values": (paged, "attend", lambda *x: (ATTEND(*x)[0] * 1.001, ATTEND(*x)[1]), r"out\["),
    "lse": (paged, "attend", lambda *x: (ATTEND(*x)[0], ATTEND(*x)[1] + 0.01), r"lse\["),
    "the last query's length": (paged, "attend", last_query_for_all, r"out\["),
    "base 2": (decoding, "merge_over_ranks", merged_as_base_2, r"out\["),
    "more bytes": (merging, "_gathered", lambda *x: (GATHERED(*x), GATHERED(*x))[1], "bytes were sent, and the call states"),
}  # fmt: skip


def _trip(_: int, name: str) -> None:
    """Make calls under a fault, which has to be found."""
    (owner, attribute, value, message), cp = FAULTS[name], ContextParallel()
    cache, k, v = filled(cp, n=21)
    cache.extend([0], 11)
    q = randn(1, 11, H, D)
    shards: Any = [cp.shard(x, pad=True) for x in (q, k[:1, :11], v[:1, :11])]
    more: Any = {"window": (9, 0), "alibi_slopes": randn(H).abs()}
    scores: Any = {"sinks": randn(H), "softcap": 2.0}

    def calls() -> None:
        cp.prefill(shards[0], shards[1], shards[2], cache, layer=0, request=0, **scores)
        for _ in range(4):
            cp.decode(q, cache, layer=0, requests=[0], **more)

    with ring_torch.check(), patch.object(owner, attribute, value):
        refused(message, calls, error=WrongResultError)


@pytest.mark.parametrize("ranks", [2, 3], ids="{} ranks".format)  # one has nothing to merge
@pytest.mark.parametrize("name", FAULTS)
def test_the_tripwire(name: str, ranks: int, pools: dict[int, LocalRanks]) -> None:
    pools[ranks].run(_trip, name)


# Partial results alone, and faults of others.


@pytest.mark.parametrize("heads", [1, 2, 5])  # fewer than ranks, too (sglang 34355)
@pytest.mark.parametrize("limit", [0, 1 << 16])
@pytest.mark.parametrize("base", ["e", "2"])
@on_ranks
def test_merge_partials(heads: int, limit: int, base: Any) -> None:
    cp, q = ContextParallel(), randn(3, heads, D)
    k, v = randn(12, heads, D), numbers(1, 12, heads, D)

    def part(own: slice) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("nhd,mhd->hnm", q, k[own])
        return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v[own]), scores.logsumexp(-1)

    out, lse = part(slice(None))
    if cp.cp_rank and cp.cp_rank == cp.cp_size - 1:  # without a key, of which it says NaN
        own, own_lse = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    else:
        own, own_lse = part(slice(cp.cp_rank, None, max(1, cp.cp_size - 1)))
    factor = 1.4426950408889634 if base == "2" else 1.0
    own, own_lse = own[None], own_lse[None] * factor
    with patch.object(merging, "BY_HEAD", limit):
        got, got_lse = cp.merge_partials(own, own_lse, lse_base=base)
        low, low_lse = cp.merge_partials(own.float(), own_lse.float(), lse_base=base)
        nothing, nowhere = cp.merge_partials(
            torch.full_like(own, torch.nan), torch.full_like(own_lse, -torch.inf)
        )
    close(got[0], out)
    close(got_lse[0] / factor, lse)
    assert low.dtype == low_lse.dtype == torch.float32
    close(low[0], out, 1e-5)
    assert not nothing.any() and bool((nowhere == -torch.inf).all())
    # All ranks have the same bits, so they choose the same tokens (vllm 41623).
    bits = torch.cat([got.flatten(), low.double().flatten()])[None]
    of_ranks = ContextParallel(layout="contiguous").unshard(bits, dim=0)
    assert all(torch.equal(x, bits[0]) for x in of_ranks)


@on_ranks
def test_nan_reaches_only_those_that_see_it() -> None:
    """A key or value that is not finite is seen by later queries alone."""
    cp = ContextParallel()
    for where in (0, 1):
        cache, *kv = filled(cp, n=10)
        kv[where][0, 8] = torch.nan
        cache.write(kv[0], kv[1], layer=0)
        out = cp.decode(q := randn(2, 4, H, D), cache, layer=0)  # queries at 6, 7, 8 and 9
        assert bool(out[0, 2:].isnan().all())
        for row, keys in ((0, 8), (1, 10)):
            seen = slice(keys - 6)
            close(out[row, seen], dense(q[row, seen], [x[row, :keys] for x in kv])[0])


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
    cache, rows = new_cache(cp), [randn(3, 1, heads, D) for heads in (K, K, H)]

    def step() -> Tensor:
        cache.write(rows[0], rows[1], layer=0)
        return cp.decode(rows[2], cache, layer=0, window=(6, 0))

    def new(requests: list[int], n: int) -> None:
        for seed, x in enumerate(rows):
            x.copy_(numbers(3 * n + seed, *x.shape))
        cache.extend(requests, 1)

    first, second = cache.add(2)
    new([first, second], 0)
    step()
    new([first, second], 1)
    with pytest.MonkeyPatch.context() as patched, Graph() as graph:
        for module in (state, decoding, paged):
            patched.setattr(module, "is_capturing", lambda: True)
        out = step()
    for n in range(2, 30):
        requests = [[first], [second, first], [second]][n % 3]
        if n == 9:
            third = cache.fork(first)
        if n > 9:
            requests = [*requests, third]
        if n == 20:
            cache.truncate(second, 3)
        new(requests, n)
        graph.replay()
        assert not out[len(requests) :].any()
        close(out, step())  # as a step that was not recorded
    version = cache.version
    cache.grow(PAGE)
    assert cache.version == version + 1


# Random schedules.


class Sizes(NamedTuple):
    """Heads and dims of a model, and whether its values are a part of its keys."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    v_dim: int = 6
    is_latent: bool = False


SIZES = {
    "groups": Sizes(), "one K/V head": Sizes(3, 1, v_dim=8), "latents": Sizes(5, 1, is_latent=True),
}  # fmt: skip


@dataclass
class World:
    """A cache with what every request should hold, and a schedule of random changes of both."""

    cp: ContextParallel
    sizes: Sizes
    seed: int
    dtype: torch.dtype = torch.float64
    without: tuple[str, ...] = ()  # options that no call is given
    history: dict[int, list[list[Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.cache = new_cache(
            self.cp, num_layers=LAYERS, num_kv_heads=self.sizes.kv_heads, head_dim=self.sizes.dim,
            v_head_dim=self.sizes.v_dim, max_requests=6, max_tokens=220, dtype=self.dtype,
        )  # fmt: skip
        self.poison()

    def poison(self) -> None:
        """Fill pages that nobody holds, and what is behind tokens, with NaN."""
        for pool in (*self.cache._state._k, *(self.cache._state._v or [])):
            held = torch.zeros(pool.shape[:2], dtype=torch.bool)
            for request, length in self.cache.lengths.items():
                pages = self.cache._state._table.pages_of(request, self.cp.cp_rank)
                for column, page in enumerate(pages):
                    first = (column * self.cp.cp_size + self.cp.cp_rank) * PAGE
                    held[page, : max(0, length - first)] = True
            pool[~held] = torch.nan

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def rows(self, batch: int, n: int) -> list[Tensor]:
        """Return new keys and values."""
        sizes = self.sizes
        k, v = (self.randn(batch, n, sizes.kv_heads, dim) for dim in (sizes.dim, sizes.v_dim))
        return [k, k[..., : sizes.v_dim] if sizes.is_latent else v]

    def options(self, batch: int) -> dict[str, Any]:
        pick, heads = self.random.choice, self.sizes.heads
        options: dict[str, Any] = {
            "window": pick([None, None, (0, 0), (PAGE, 0), (7, None)]),
            "chunk_size": pick([None, None, 3, 2 * PAGE]),
            "softmax_scale": pick([None, 0.3]),
            "softcap": pick([None, 2.0]),
            "sinks": pick([None, self.randn(heads), self.randn(heads, 2)]),
            "alibi_slopes": pick([None, self.randn(heads).abs(), self.randn(batch, heads).abs()]),
        }
        return {n: x for n, x in options.items() if x is not None and n not in self.without}

    def length(self) -> int:
        turn = PAGE * self.cp.cp_size
        return self.random.choice([1, 1, 2, PAGE - 1, PAGE, PAGE + 1, turn - 1, turn, turn + 1, 17])

    def request(self) -> int:
        return self.random.choice(sorted(self.history))

    def keep(self, request: int, layer: int, start: int, new: Sequence[Tensor]) -> None:
        """Note what a layer holds from a position on."""
        pair = zip(self.history[request][layer], new, strict=True)
        self.history[request][layer] = [torch.cat([old[:start], x]) for old, x in pair]

    def check(
        self, out: Tensor, lse: Tensor, q: Tensor, request: int, layer: int, row: int, options: Any
    ) -> None:
        limits = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2}
        expected, expected_lse = dense(q, self.history[request][layer], row, **options)
        close(out, expected, limits[self.dtype])
        close(lse, expected_lse, max(limits[self.dtype], 2e-5))

    def extend(self, requests: list[int], n: int) -> bool:
        """Reserve positions; evict a request instead if there is no room."""
        before = self.cache.lengths
        with suppress(ValueError):
            self.cache.extend(requests, n)
            return True
        assert self.cache.lengths == before
        self.drop()
        return False

    def decode_step(self) -> None:
        """Extend some requests, write all layers, and attend with some of the last tokens."""
        count = self.random.randint(1, min(3, len(self.history)))
        requests = self.random.sample(sorted(self.history), count)
        n = self.random.choice([1, 1, 2, 3, PAGE + 1, 17])
        before = {x: self.cache.lengths[x] for x in requests}
        if not self.extend(requests, n):
            return
        layout: LayoutName | None = self.random.choice([None, None, *LAYOUTS])
        for layer in range(LAYERS):
            for _ in range(self.random.choice([1, 1, 2])):  # written twice: the last one counts
                new = parts = self.rows(count, n)
                if layout is not None:
                    cp = ContextParallel(layout=layout)
                    parts = [cp.shard(x, pad=True) for x in new]
                v = None if self.sizes.is_latent else parts[1]
                self.cache.write(parts[0], v, layer=layer, layout=layout)
                for row, request in enumerate(requests):
                    self.keep(request, layer, before[request], [x[row] for x in new])
            self.attend(requests, layer)

    def attend(self, requests: list[int], layer: int) -> None:
        """Attend with new queries, maybe of other requests beside, named in any form."""
        given = self.random.choice([None, requests[::-1]])
        padding = self.random.randint(0, 1) if given is None else 0
        asked = requests if given is None else given
        n = min(self.cache.lengths[x] for x in asked)
        n = self.random.choice([x for x in (1, 2, PAGE, 18) if x <= n])
        q = self.randn(len(asked) + padding, n, self.sizes.heads, self.sizes.dim)
        options = self.options(len(q))
        names: Any = tuple(map(np.int64, given)) if given and self.cp.cp_rank % 2 else given
        decode: Any = self.cp.decode
        out, lse = decode(q, self.cache, layer=layer, requests=names, return_lse=True, **options)
        for row, request in enumerate(asked):
            self.check(out[row], lse[row], q[row], request, layer, row, options)
        assert not out[len(asked) :].any()

    def prefill_step(self) -> None:
        """Add tokens to one request, sharded."""
        request, n = self.request(), self.length()
        start = self.cache.lengths[request]
        if not self.extend([request], n):
            return
        cp = ContextParallel(layout=self.random.choice(LAYOUTS))
        for layer in range(LAYERS):
            new, q = self.rows(1, n), self.randn(1, n, self.sizes.heads, self.sizes.dim)
            options, prefill = self.options(1), cast("Any", cp.prefill)
            parts: Any = [cp.shard(x, pad=True, fill=torch.nan) for x in (q, *new)]
            if self.sizes.is_latent:
                parts[2] = None
            where: Any = {"layer": layer, "request": request, "return_lse": True}
            out, lse = prefill(*parts, self.cache, **where, **options)
            self.keep(request, layer, start, [x[0] for x in new])
            out, lse = cp.unshard(out, seq_len=n), cp.unshard(lse, dim=2, seq_len=n)
            self.check(out[0], lse[0], q[0], request, layer, 0, options)

    def fork(self) -> None:
        request = self.request()
        if len(self.history) < 6:
            forked = self.cache.fork(request)
            self.history[forked] = [[*layer] for layer in self.history[request]]

    def truncate(self) -> None:
        request = self.request()
        length = max(0, self.cache.lengths[request] - self.length())
        self.cache.truncate(request, length)
        self.history[request] = [[x[:length] for x in layer] for layer in self.history[request]]

    def add(self) -> None:
        if len(self.history) < 6:
            (request,) = self.cache.add()
            self.history[request] = [[x[0] for x in self.rows(1, 0)] for _ in range(LAYERS)]

    def drop(self) -> None:
        request = self.request()
        self.cache.evict(request)
        del self.history[request]
        self.add()

    def grow(self) -> None:
        if self.cache.version < 2:
            self.cache.grow(PAGE * 3)

    def run(self, steps: int) -> None:
        for _ in range(3):
            self.add()
        changes = [self.decode_step] * 4 + [self.prefill_step] * 2
        changes += [self.fork] * 2 + [self.truncate] * 2 + [self.add, self.drop, self.grow]
        for _ in range(steps):
            self.random.choice(changes)()
            self.poison()
            assert self.cache.lengths == {x: len(y[0][0]) for x, y in self.history.items()}


#: Schedules: what is patched, dtypes, and how often calls are checked. By head each rank merges a
#: part of the heads, of which there may be fewer than ranks.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "by head, queries travel": {"BY_HEAD": 0, "queries_travel": True}, "keys travel": {"queries_travel": False},
    "float32": {"dtype": torch.float32}, "bfloat16": {"dtype": torch.bfloat16}, "checked": {"every": 3},
}  # fmt: skip
SCHEDULES = [
    (name, way) for name in SIZES for n, way in enumerate(WAYS) if n < 3 or name == "groups"
]


@pytest.mark.nightly(unless=[
    *(f"{ranks} ranks-groups-{way}" for ranks in (2, 3) for way in WAYS),
    *(f"1 ranks-groups-{way}" for way in WAYS if "travel" not in way),
    "3 ranks-one K/V head-by head, queries travel", "3 ranks-latents-plain", "2 ranks-latents-keys travel",
])  # fmt: skip
@pytest.mark.parametrize(("name", "way"), SCHEDULES)
@on_ranks
def test_random_schedules(name: str, way: str) -> None:
    options = dict(WAYS[way])
    with pytest.MonkeyPatch.context() as patched:
        for owner, attribute in ((merging, "BY_HEAD"), (prefilling._Part, "queries_travel")):
            if attribute in options:
                patched.setattr(owner, attribute, options.pop(attribute))
        with ring_torch.check(every=options.pop("every", 0)):
            steps = 25 if way in [*WAYS][:3] else 12
            World(ContextParallel(), SIZES[name], len(name + way), **options).run(steps)


# Prefill by flash-attn-4 over pages, with its functions in plain torch.

CALLS: list[str] = []


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool,
    window_size: tuple[int | None, int | None], return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert return_lse
    window = (None, 0) if causal else window_size
    CALLS.append("all" if window == (None, None) else "band")
    options = LaunchOptions(softmax_scale, None, window, None, deterministic=False)
    return PlainFlash(takes_any_rows=True).forward(q, k, v, options, None)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, page_table: Tensor, seqused_k: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    CALLS.append("table")
    pages = page_table[0].long()
    behind = torch.cat([x[pages].flatten(0, 1)[int(seqused_k) :] for x in (k, v)], -1)
    assert behind.isfinite().all()
    k, v = (x[pages].flatten(0, 1)[None, : int(seqused_k)] for x in (k, v))
    return flash_attn_func(q, k, v, **options)


LIBRARY = SimpleNamespace(
    flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
)


def _by_flash_attention(_: int, name: str, queries: bool) -> None:
    with pytest.MonkeyPatch.context() as patched:
        for owner, attribute, value in (
            (flash_pages, "reason_against", lambda _q, _dim, rules: flash_pages.reason_against_rules(rules)),
            (kernels, "reason_against_triton", lambda _: ""), (library, "public_module", lambda: LIBRARY),
            (decoding, "attend_by", lambda _: paged.attend), (prefilling, "attend_by", lambda _: paged.attend),
            (prefilling._Part, "queries_travel", queries), (prefilling, "_ROWS_OF_FLASH", 8),
        ):  # fmt: skip
            patched.setattr(owner, attribute, value)
        for refused, steps in ((("alibi_slopes", "chunk_size", "softcap"), 30), ((), 10)):
            CALLS.clear()
            cp = ContextParallel()
            World(cp, SIZES[name], len(name), without=refused).run(steps)
            # Bands are of one rank alone, and pages in a row are read where they lie.
            assert not refused or ("all" if cp.cp_size > 1 else "band") in CALLS
            assert "band" not in CALLS or cp.cp_size == 1
            assert not refused or cp.cp_size > 1 or ("table" in CALLS) == queries


@pytest.mark.parametrize(
    ("ranks", "name", "queries"),
    [
        (1, "groups", True), (1, "latents", False), (2, "groups", False), (2, "one K/V head", True),
        (2, "latents", True), (3, "groups", True), (3, "one K/V head", False), (3, "latents", False),
    ],
)  # fmt: skip
def test_random_schedules_by_flash_attention(
    ranks: int, name: str, queries: bool, pools: dict[int, LocalRanks]
) -> None:
    """Queries travel, or keys."""
    pools[ranks].run(_by_flash_attention, name, queries)


@pytest.mark.parametrize(("flash", "triton", "kernel"), [
    ("", "", "fa4"), ("few", "", "triton"), ("", "no Triton", "eager"), ("few", "no Triton", "eager"),
])  # fmt: skip
def test_what_flash_attention_leaves_needs_triton(
    flash: str, triton: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_pages, "reason_against", lambda *_: flash)
    monkeypatch.setattr(kernels, "reason_against_triton", lambda _: triton)
    rules = paged.Rules(Mask(causal=True), 1.0, None, None)
    for heads, least in ((32, 384), (8, 1536)):  # few queries are of split-KV
        few, many = (torch.empty(1, n, heads, 64) for n in (least - 1, least))
        assert "no split-KV" in flash_pages.reason_against_few(few)
        assert not flash_pages.reason_against_few(many)
    taken, reason = kernels.chosen("auto", "prefill", torch.empty(1, 1, 1, 64), 64, rules)
    assert (taken, reason) == (kernel, "; ".join(x for x in (flash, triton) if x))
