"""The drop-in for ring_flash_attn: its names and arguments, with the oracle's results."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_four_ranks, on_ranks
from torch import Tensor

import ring_torch.compat as ring_flash_attn
from ring_core import StrategyConfig, reference
from ring_torch.compat import documents as _documents
from ring_torch.local import LocalRankError, LocalRanks
from ring_torch.movement.rows import MoveCall

B, H, K, D = 2, 4, 2, 8
BOTH, LLAMA3 = "documents", "stream"

FAMILIES = {
    "ring_flash_attn": "", "zigzag_ring_flash_attn": "", "stripe_flash_attn": "",
    "ring_flash_attn_varlen": BOTH, "zigzag_ring_flash_attn_varlen": BOTH,
    "llama3_flash_attn_varlen": LLAMA3,
}  # fmt: skip
FEW = ("causal", "window")  # on two ranks only these; four ranks run all


class Option(NamedTuple):
    """Arguments of a call, and the oracle's names for them."""

    given: dict[str, Any]
    oracle: dict[str, Any]


SLOPES = torch.linspace(0.1, 0.8, H, dtype=torch.float64)
ANSWERS = {
    "defaults": Option({}, {}),
    "causal": Option({"causal": True}, {"causal": True}),
    "causal window": Option({"causal": True, "window_size": (9, -1)}, {"causal": True, "window": (9, None)}),
    "window": Option({"window_size": (5, 3)}, {"window": (5, 3)}),
    "left only": Option({"window_size": (6, -1)}, {"window": (6, None)}),
    "right only": Option({"window_size": (-1, 2)}, {"window": (None, 2)}),
    "scale": Option({"softmax_scale": 0.7, "causal": True}, {"softmax_scale": 0.7, "causal": True}),
    "slopes": Option({"alibi_slopes": SLOPES, "causal": True}, {"alibi_slopes": SLOPES, "causal": True}),
    "dropout": Option({"dropout_p": 0.3, "causal": True}, {"dropout_p": 0.3, "causal": True}),
    "deterministic": Option({"deterministic": True}, {}),
    "ulysses": Option({"causal": True, "strategy": "ulysses"}, {"causal": True}),
}  # fmt: skip
IN_GROUPS = Option(
    {"causal": True, "strategy": StrategyConfig("hybrid", ulysses_size=2)}, {"causal": True}
)


def seeds(state: int, count: int) -> list[int]:
    """Return the seeds that calls draw after ``torch.manual_seed(state)``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(state)
        return [int(torch.randint(2**63 - 1, ())) for _ in range(count)]


def tensors(batch: int, tokens: int, heads: int = K) -> list[Tensor]:
    """Return global q, k, v and the output's gradient, the same on all ranks."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((H, D), (heads, D), (heads, D), (H, D))
    return [
        torch.randn(batch, tokens, *s, generator=generator, dtype=torch.float64) for s in shapes
    ]


def expected(batch: int, tokens: int, option: Option, **more: Any) -> list[Any]:
    """Return ``out``, ``lse`` and gradients of dense attention."""
    q, k, v, dout = (x.numpy() for x in tensors(batch, tokens))
    options = option.oracle | more
    if "dropout_p" in options:
        (options["dropout_seed"],) = seeds(5, 1)
    grads = reference.attention_grads(dout, q, k, v, **options)
    return [*reference.attention(q, k, v, **options), *grads[:3]]


def same(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-11, atol=1e-11)


def attended(function: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *args: Any, **kwargs: Any) -> list[Any]:  # fmt: skip
    """Return ``out``, ``lse`` and gradients of one rank's shards."""
    torch.manual_seed(5)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse, nothing = function(*leaves, *args, return_attn_probs=True, **kwargs)
    assert nothing is None and not lse.requires_grad
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    out.backward(dout)
    torch.manual_seed(5)
    assert torch.equal(function(q, k, v, *args, **kwargs), out)
    return [out.detach(), lse, *(x.grad for x in leaves)]


def same_parts(results: list[Any], expected: list[Any], own: Any, *, varlen: bool = True) -> None:
    """Compare the results of all ranks with their tokens' parts of the whole results."""
    for rank, actual in enumerate(results):
        for n, (x, y) in enumerate(zip(actual, expected, strict=True)):
            y, local = (y[0] if varlen else y), own(rank)  # noqa: PLW2901 - a part of it
            same(x, y[..., local] if n == 1 else y[local] if varlen else y[:, local])


def tokens_of(family: str, tokens: int, size: int, rank: int) -> list[int]:
    """Return the tokens of a rank, by the definition of each layout."""
    positions = torch.arange(tokens)
    if family.startswith("zigzag"):
        chunks = positions.chunk(2 * size)
        return [*chunks[rank].tolist(), *chunks[2 * size - 1 - rank].tolist()]
    if family.startswith("stripe"):
        return positions[rank::size].tolist()
    return positions.chunk(size)[rank].tolist()


def _batch(rank: int, family: str, kwargs: dict[str, Any]) -> list[Any]:
    local = tokens_of(family, 32, dist.get_world_size(), rank)
    shards = [x[:, local] for x in tensors(B, 32)]
    return attended(getattr(ring_flash_attn, f"{family}_func"), *shards, **kwargs)


@pytest.mark.parametrize("family", [name for name, more in FAMILIES.items() if not more])
@pytest.mark.parametrize(("size", "option"), [(4, o) for o in ANSWERS] + [(2, o) for o in FEW])
def test_batch(pools: dict[int, LocalRanks], size: int, family: str, option: str) -> None:
    compare_batch(pools[size], size, family, ANSWERS[option])


@pytest.mark.parametrize("family", ["ring_flash_attn", "zigzag_ring_flash_attn"])
def test_groups_of_ranks(pools: dict[int, LocalRanks], family: str) -> None:
    compare_batch(pools[4], 4, family, IN_GROUPS)


def compare_batch(pool: LocalRanks, size: int, family: str, option: Option) -> None:
    results = pool.run(_batch, family, option.given)
    own = lambda rank: tokens_of(family, 32, size, rank)  # noqa: E731
    same_parts(results, expected(B, 32, option), own, varlen=False)


LOCAL = {"three": (0, 6, 8, 18), "one": (0, 10), "empty": (0, 4, 4, 12), "equal": (0, 4, 8)}


def tokens_of_documents(family: str, local: tuple[int, ...], size: int, rank: int) -> list[int]:
    """Return the tokens of a rank where each document is split on its own."""
    return [
        size * start + token
        for start, stop in pairwise(local)
        for token in tokens_of(family, size * (stop - start), size, rank)
        if stop > start
    ]


def _varlen(rank: int, family: str, local: tuple[int, ...], kwargs: dict[str, Any]) -> list[Any]:
    size = dist.get_world_size()
    own = tokens_of_documents(family, local, size, rank)
    shards = [x[0, own] for x in tensors(1, size * local[-1])]
    offsets = torch.tensor(local, dtype=torch.int32)
    function = getattr(ring_flash_attn, f"{family}_func")
    return attended(function, *shards, offsets, int(offsets.diff().max()), **kwargs)


VARLEN = [(4, "three", option) for option in ANSWERS] + [
    (size, local, option)
    for size, local in ((2, "three"), (4, "one"), (2, "empty"), (4, "equal"))
    for option in FEW
]


@pytest.mark.parametrize(("size", "local", "option"), VARLEN)
@pytest.mark.parametrize("family", ["ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen"])
def test_documents_split_each(
    pools: dict[int, LocalRanks], size: int, family: str, local: str, option: str
) -> None:
    offsets = LOCAL[local]
    documents = tuple(size * offset for offset in offsets)
    results = pools[size].run(_varlen, family, offsets, ANSWERS[option].given)
    whole = expected(1, documents[-1], ANSWERS[option], cu_seqlens=documents)
    same_parts(results, whole, lambda rank: tokens_of_documents(family, offsets, size, rank))


MIXED = (0, 8, 10, 20, 22)  # long, short, long, short


def _mixed(rank: int, family: str, kwargs: dict[str, Any]) -> list[Any]:
    patch = pytest.MonkeyPatch()
    patch.setattr(_documents, "LONG", 8)
    try:
        return _varlen(rank, family, MIXED, kwargs)
    finally:
        patch.undo()


@pytest.mark.parametrize("option", ["causal window", "window", "dropout"])
@pytest.mark.parametrize("family", ["ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen"])
def test_long_documents_have_calls_of_their_own(
    pools: dict[int, LocalRanks], family: str, option: str
) -> None:
    """Long documents are calls with a seed each, in order; all other documents share a call."""
    tokens, options = 4 * MIXED[-1], ANSWERS[option].oracle
    q, k, v, dout = (x.numpy() for x in tensors(1, tokens))
    expected = [np.zeros_like(x) for x in (q, q[..., 0].swapaxes(1, 2), q, k, v)]
    shared = np.r_[32:40, 80:88]
    calls = ((np.r_[0:32], (0, 32)), (np.r_[40:80], (0, 40)), (shared, (0, 8, 16)))
    for (rows, documents), seed in zip(calls, seeds(5, len(calls)), strict=True):
        x, y, z = q[:, rows], k[:, rows], v[:, rows]
        more: dict[str, Any] = {"cu_seqlens": documents} | (
            {"dropout_seed": seed} if option == "dropout" else {}
        )
        out, lse = reference.attention(x, y, z, **options, **more)
        grads = reference.attention_grads(dout[:, rows], x, y, z, **options, **more)[:3]
        expected[1][:, :, rows] = lse
        for whole, part in zip((expected[0], *expected[2:]), (out, *grads), strict=True):
            whole[:, rows] = part
    results = pools[4].run(_mixed, family, ANSWERS[option].given)
    same_parts(results, expected, lambda rank: tokens_of_documents(family, MIXED, 4, rank))


STREAMS = {
    "crossing": (0, 5, 19, 32), "one": (0, 32), "at borders": (0, 8, 16, 32), "short": tuple(range(0, 33, 2)),
}  # fmt: skip


def _llama3(rank: int, documents: tuple[int, ...], kwargs: dict[str, Any]) -> list[Any]:
    size = dist.get_world_size()
    shards = [x[0].chunk(size)[rank] for x in tensors(1, 32)]
    q, k, longest_q, longest_k, keys = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
        torch.tensor(documents, dtype=torch.int32), kwargs.get("causal", False), rank, size
    )
    function = ring_flash_attn.llama3_flash_attn_varlen_func
    return attended(function, *shards, q, k, longest_q, longest_k, 1, keys, **kwargs)


LLAMA3_CASES = [(4, "crossing", option) for option in ANSWERS] + [
    (size, stream, option)
    for size, stream in ((2, "crossing"), (2, "one"), (4, "at borders"), (4, "short"))
    for option in FEW
]


@pytest.mark.parametrize(("size", "stream", "option"), LLAMA3_CASES)
def test_one_stream(pools: dict[int, LocalRanks], size: int, stream: str, option: str) -> None:
    results = pools[size].run(_llama3, STREAMS[stream], ANSWERS[option].given)
    whole, part = expected(1, 32, ANSWERS[option], cu_seqlens=STREAMS[stream]), 32 // size
    same_parts(results, whole, lambda rank: slice(rank * part, (rank + 1) * part))


@on_ranks
def test_packed_tensors(rank: int) -> None:
    """Packed tensors give the results and gradients of the separate ones."""
    size = dist.get_world_size()
    local = torch.tensor([0, 6, 8, 18])
    whole = torch.tensor([0, 5, 20, 18 * size])
    prepared = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(whole, True, rank, size)
    stream = (*prepared[:4], 2, prepared[4])
    for family, more in FAMILIES.items():
        shards = [x.chunk(size, dim=1)[rank] for x in tensors(B, 18 * size, heads=H)]
        q, k, v, dout = (x[0] for x in shards) if more else shards
        arguments = {"": (), BOTH: (local, 10), LLAMA3: stream}[more]
        expected = attended(getattr(ring_flash_attn, f"{family}_func"), q, k, v, dout, *arguments, causal=True)  # fmt: skip
        for count, name in ((2, "kvpacked"), (3, "qkvpacked")):
            function = getattr(ring_flash_attn, f"{family}_{name}_func")
            qkv = [q, k, v][: 3 - count]
            packed = torch.stack([q, k, v][3 - count :], dim=-3)
            leaves = [x.clone().requires_grad_() for x in (*qkv, packed)]
            out, lse, _ = function(*leaves, *arguments, causal=True, return_attn_probs=True)
            *firsts, last = torch.autograd.grad(out, leaves, dout)
            grads = [*firsts, *last.unbind(-3)]
            for x, y in zip([out, lse, *grads], expected, strict=True):
                assert torch.equal(x, y), (family, name)


def _halves(rank: int, family: str) -> list[Tensor]:
    local = tokens_of(family, 32, dist.get_world_size(), rank)
    leaves = [x[:, local].half().requires_grad_() for x in tensors(B, 32)[:3]]
    out = getattr(ring_flash_attn, f"{family}_func")(*leaves, causal=True)
    out.backward(tensors(B, 32)[3][:, local].half())
    return [out.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("family", ["ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn"])  # fmt: skip
def test_float16_stays_float16(pools: dict[int, LocalRanks], family: str) -> None:
    """Errors in float16 are smaller than those of exact results rounded to bfloat16."""
    q, k, v, dout = (x.half().double().numpy() for x in tensors(B, 32))
    out, _ = reference.attention(q, k, v, causal=True)
    expected = (out, *reference.attention_grads(dout, q, k, v, causal=True)[:3])
    for rank, actual in enumerate(pools[2].run(_halves, family)):
        local = tokens_of(family, 32, 2, rank)
        for x, y in zip(actual, expected, strict=True):
            exact = torch.tensor(y[:, local])
            assert x.dtype == torch.float16
            error = (x.double() - exact).square().mean()
            assert error < 0.25 * (exact.bfloat16().double() - exact).square().mean()


def test_one_process_needs_no_group() -> None:
    assert not dist.is_initialized()
    local = (0, 6, 8, 18)
    for family in ("ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen"):
        q, k, v, dout = (x[0] for x in tensors(1, 18))
        actual = attended(getattr(ring_flash_attn, f"{family}_func"), q, k, v, dout, local, 10, causal=True)  # fmt: skip
        for x, y in zip(actual, expected(1, 18, ANSWERS["causal"], cu_seqlens=local), strict=True):
            same(x, y[0])


@on_four_ranks
def test_group(rank: int) -> None:
    groups: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    q, k, v = (x[:, tokens_of("zigzag", 32, 2, rank % 2)] for x in tensors(B, 32)[:3])
    out = ring_flash_attn.zigzag_ring_flash_attn_func(q, k, v, causal=True, group=groups[rank // 2])
    same(out, expected(B, 32, ANSWERS["causal"])[0][:, tokens_of("zigzag", 32, 2, rank % 2)])


def _exchanges(_: int, local: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of row exchanges in the forward and in the backward."""
    counts = [0]
    exchange = MoveCall.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return exchange(*args, **kwargs)

    q = torch.ones(local[-1], H, D, requires_grad=True)
    patch = pytest.MonkeyPatch()
    patch.setattr(MoveCall, "run", counted)
    out = ring_flash_attn.zigzag_ring_flash_attn_varlen_func(q, q, q, local, 10, causal=True)
    counts.append(0)
    out.sum().backward()
    patch.undo()
    return counts[0], counts[1]


def test_one_exchange_there_and_one_back(pools: dict[int, LocalRanks]) -> None:
    assert set(pools[2].run(_exchanges, (0, 6, 8, 18))) == {(2, 2)}
    assert set(pools[2].run(_exchanges, (0, 10))) == {(0, 0)}


def test_compiled_code_calls_it() -> None:
    q, k, v, _ = tensors(1, 16)
    function = ring_flash_attn.ring_flash_attn_varlen_func

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return 2 * function(q[0], k[0], v[0], (0, 6, 16), 10, causal=True)

    compiled = torch.compile(twice, backend="eager")(q, k, v)
    same(compiled, 2 * expected(1, 16, ANSWERS["causal"], cu_seqlens=(0, 6, 16))[0][0])


def _unlike(rank: int, what: str) -> None:
    q = torch.ones(8, H, D)
    torch.manual_seed(rank if what == "seed" else 0)
    ring_flash_attn.ring_flash_attn_varlen_func(
        q, q, q, (0, 2 if what == "documents" and rank else 4, 8), 8,
        dropout_p=0.1 if what == "seed" else 0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("what", "word"), [("seed", "dropout_seed is"), ("documents", "offsets is")]
)
def test_ranks_that_differ_are_told(what: str, word: str) -> None:
    with LocalRanks(2) as pool, pytest.raises(LocalRankError, match=word) as error:
        pool.run(_unlike, what)
    assert "RankMismatchError" in str(error.value)
