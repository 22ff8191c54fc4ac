"""A sharded K/V cache beside what each request should hold, and random schedules of changes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from ring_core import LayoutName, Mask
from ring_torch import ContextParallel, KVCache

PAGE = 4
LAYERS = 2
LAYOUTS: tuple[LayoutName, ...] = ("contiguous", "zigzag", "striped")


@dataclass
class Sizes:
    """Heads and dims of a model, and whether its values are a part of its keys."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    v_dim: int = 6
    is_latent: bool = False


SIZES = {
    "groups": Sizes(),
    "one K/V head": Sizes(heads=3, kv_heads=1, v_dim=8),
    "latents": Sizes(heads=5, kv_heads=1, v_dim=6, is_latent=True),
}


def dense(
    q: Tensor, kv: Sequence[Tensor], row: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Attend with the last queries ``[n, H, D]`` of a request to all its keys ``[L, K, D]``."""
    n, heads, dim = q.shape
    q, k, v = (x.double() for x in (q, *kv))
    at, keys = torch.arange(len(k) - n, len(k)), torch.arange(len(k))
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * (options.get("softmax_scale") or dim**-0.5)
    if (cap := options.get("softcap")) is not None:
        scores = cap * torch.tanh(scores / cap)
    if (slopes := options.get("alibi_slopes")) is not None:
        slope = slopes.double() if slopes.ndim == 1 else slopes.double()[row]
        scores = scores - slope[:, None, None] * (at[:, None] - keys).abs()
    mask = Mask(causal=True, window=options.get("window"), chunk_size=options.get("chunk_size"))
    hidden = ~torch.as_tensor(mask.dense(at.numpy(), keys.numpy()))
    # Keys that no query sees may hold NaN, and so may values that some do not see.
    scores = scores.masked_fill(hidden, -torch.inf)
    sinks = options.get("sinks")
    logits = scores
    if sinks is not None:
        columns = sinks.double().reshape(heads, 1, -1).expand(heads, n, -1)
        logits = torch.cat([scores, columns], dim=-1)
    lse = logits.logsumexp(dim=-1)
    weights = (scores - lse.unsqueeze(-1)).exp()
    return torch.einsum("hnm,mhd->nhd", weights, v), lse


@dataclass
class World:
    """A cache with what every request should hold, and a schedule of random changes of both."""

    cp: ContextParallel
    sizes: Sizes
    seed: int
    dtype: torch.dtype = torch.float64
    tokens: int = 220
    history: dict[int, list[list[Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.cache = KVCache(
            self.cp, num_layers=LAYERS, num_kv_heads=self.sizes.kv_heads, head_dim=self.sizes.dim,
            v_head_dim=self.sizes.v_dim, max_requests=6, max_tokens=self.tokens, page_size=PAGE,
            dtype=self.dtype,
        )  # fmt: skip
        self.poison()

    def poison(self) -> None:
        """Fill pages that nobody holds, and what is behind tokens, with NaN."""
        for pools in (self.cache._state._k, self.cache._state._v or []):
            for pool in pools:
                held = torch.zeros(pool.shape[:2], dtype=torch.bool)
                for request, length in self.cache.lengths.items():
                    pages = self.cache._state._table.pages_of(request, self.cp.cp_rank)
                    for column, page in enumerate(pages):
                        first = (column * self.cp.cp_size + self.cp.cp_rank) * PAGE
                        held[page, : max(0, length - first)] = True
                pool[~held] = torch.nan

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def rows(self, batch: int, n: int) -> tuple[Tensor, Tensor | None]:
        sizes = self.sizes
        k = self.randn(batch, n, sizes.kv_heads, sizes.dim)
        return k, None if sizes.is_latent else self.randn(batch, n, sizes.kv_heads, sizes.v_dim)

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
        return {name: x for name, x in options.items() if x is not None}

    def length(self) -> int:
        turn = PAGE * self.cp.cp_size
        return self.random.choice([1, 1, 2, PAGE - 1, PAGE, PAGE + 1, turn - 1, turn, turn + 1, 17])

    def keep(self, request: int, layer: int, start: int, k: Tensor, v: Tensor | None) -> None:
        """Note what a layer holds from a position on."""
        held = self.history[request][layer]
        if v is None:
            v = k[..., : self.sizes.v_dim]
        self.history[request][layer] = [
            torch.cat([old[:start], new]) for old, new in zip(held, (k, v), strict=True)
        ]

    def empty(self) -> list[list[Tensor]]:
        none = [torch.zeros(0, 1, 1), torch.zeros(0, 1, 1)]
        k, v = self.rows(1, 1)
        none = [k[0, :0], (k[..., : self.sizes.v_dim] if v is None else v)[0, :0]]
        return [[*none] for _ in range(LAYERS)]

    def check(self, got: Tensor, lse: Tensor | None, expected: tuple[Tensor, Tensor]) -> None:
        limits = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2}
        limit = limits[self.dtype]
        torch.testing.assert_close(got.double(), expected[0], rtol=limit, atol=limit)
        if lse is not None:
            torch.testing.assert_close(lse.double(), expected[1], rtol=2e-5, atol=limit)

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
                k, v = self.rows(count, n)
                cp = ContextParallel(layout=layout or "zigzag")
                parts: Any = (k, v)
                if layout is not None:
                    parts = tuple(None if x is None else cp.shard(x, pad=True) for x in parts)
                self.cache.write(*parts, layer=layer, layout=layout)
                for row, request in enumerate(requests):
                    self.keep(
                        request, layer, before[request], k[row], None if v is None else v[row]
                    )
            self.attend(requests, layer)

    def attend(self, requests: list[int], layer: int) -> None:
        """Attend with new queries, maybe of other requests beside."""
        given = self.random.choice([None, requests[::-1]])
        padding = self.random.randint(0, 1) if given is None else 0
        asked = requests if given is None else given
        n = min(self.cache.lengths[x] for x in asked)
        n = self.random.choice([x for x in (1, 2, PAGE, 18) if x <= n])
        q = self.randn(len(asked) + padding, n, self.sizes.heads, self.sizes.dim)
        options = self.options(len(q))
        out, lse = self.cp.decode(
            q, self.cache, layer=layer, requests=given, return_lse=True, **options
        )
        for row, request in enumerate(asked):
            expected = dense(q[row], self.history[request][layer], row, options)
            self.check(out[row], lse[row], expected)
        assert not out[len(asked) :].any()

    def prefill_step(self) -> None:
        """Add tokens to one request, sharded."""
        request = self.random.choice(sorted(self.history))
        n, start = self.length(), self.cache.lengths[request]
        if not self.extend([request], n):
            return
        cp = ContextParallel(layout=self.random.choice(LAYOUTS))
        for layer in range(LAYERS):
            (k, v), q = self.rows(1, n), self.randn(1, n, self.sizes.heads, self.sizes.dim)
            options = self.options(1)
            shards: Any = [
                None if x is None else cp.shard(x, pad=True, fill=torch.nan) for x in (q, k, v)
            ]
            out, lse = cp.prefill(
                shards[0],
                shards[1],
                shards[2],
                self.cache,
                layer=layer,
                request=request,
                return_lse=True,
                **options,
            )
            self.keep(request, layer, start, k[0], None if v is None else v[0])
            out, lse = cp.unshard(out, seq_len=n), cp.unshard(lse, dim=2, seq_len=n)
            self.check(out[0], lse[0], dense(q[0], self.history[request][layer], 0, options))

    def fork(self) -> None:
        request = self.random.choice(sorted(self.history))
        if len(self.history) < 6:
            forked = self.cache.fork(request)
            self.history[forked] = [[*layer] for layer in self.history[request]]

    def truncate(self) -> None:
        request = self.random.choice(sorted(self.history))
        length = max(0, self.cache.lengths[request] - self.length())
        self.cache.truncate(request, length)
        self.history[request] = [[x[:length] for x in layer] for layer in self.history[request]]

    def add(self) -> None:
        if len(self.history) < 6:
            (request,) = self.cache.add()
            self.history[request] = self.empty()

    def drop(self) -> None:
        request = self.random.choice(sorted(self.history))
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
