"""The drop-in for ring_flash_attn: its names and arguments, the oracle's results, and models."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from on_ranks import on_four_ranks, on_ranks
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import ring_torch.compat as ring_flash_attn
from ring_core import RankMismatchError, UnsupportedError, reference
from ring_torch.comm.ranks import Ranks
from ring_torch.compat import (
    documents as _documents,
    substitute_hf_flash_attn,
    update_ring_flash_attn_params,
)
from ring_torch.compat.hf import RingFlashAttention
from ring_torch.hf.models.placeholders import ShardedMask
from ring_torch.local import LocalRanks
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
    results = pools[size].run(_batch, family, ANSWERS[option].given)
    own = lambda rank: tokens_of(family, 32, size, rank)  # noqa: E731
    same_parts(results, expected(B, 32, ANSWERS[option]), own, varlen=False)


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
    with patch.object(_documents, "LONG", 8):
        return _varlen(rank, family, MIXED, kwargs)


@pytest.mark.parametrize("option", ["causal window", "window", "dropout"])
@pytest.mark.parametrize("family", ["ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen"])
def test_long_documents_have_calls_of_their_own(
    pools: dict[int, LocalRanks], family: str, option: str
) -> None:
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


@on_four_ranks
def test_group(rank: int) -> None:
    groups: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    q, k, v = (x[:, tokens_of("zigzag", 32, 2, rank % 2)] for x in tensors(B, 32)[:3])
    out = ring_flash_attn.zigzag_ring_flash_attn_func(q, k, v, causal=True, group=groups[rank // 2])
    same(out, expected(B, 32, ANSWERS["causal"])[0][:, tokens_of("zigzag", 32, 2, rank % 2)])


@pytest.mark.parametrize(("local", "count"), [((0, 6, 8, 18), 2), ((0, 10), 0)])
@on_ranks
def test_one_exchange_there_and_one_back(local: tuple[int, ...], count: int) -> None:
    q = torch.ones(local[-1], H, D, requires_grad=True)
    with patch.object(MoveCall, "run", autospec=True, side_effect=MoveCall.run) as exchanged:
        out = ring_flash_attn.zigzag_ring_flash_attn_varlen_func(q, q, q, local, 10, causal=True)
        assert exchanged.call_count == count
        out.sum().backward()
    assert exchanged.call_count == 2 * count


def test_compiled_code_calls_it() -> None:
    q, k, v, _ = tensors(1, 16)
    function = ring_flash_attn.ring_flash_attn_varlen_func

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return 2 * function(q[0], k[0], v[0], (0, 6, 16), 10, causal=True)

    compiled = torch.compile(twice, backend="eager")(q, k, v)
    same(compiled, 2 * expected(1, 16, ANSWERS["causal"], cu_seqlens=(0, 6, 16))[0][0])


@pytest.mark.parametrize(
    ("what", "word"), [("seed", "dropout_seed is"), ("documents", "offsets is")]
)
@on_ranks
def test_ranks_that_differ_are_told(rank: int, what: str, word: str) -> None:
    group: Any = dist.new_group()
    q = torch.ones(8, H, D)
    torch.manual_seed(rank if what == "seed" else 0)
    with pytest.raises(RankMismatchError, match=word):
        ring_flash_attn.ring_flash_attn_varlen_func(
            q, q, q, (0, 2 if what == "documents" and rank else 4, 8), 8, group=group,
            dropout_p=0.1 if what == "seed" else 0.0,
        )  # fmt: skip


QKV, KV, ALL = ("q", "k", "v"), ("q", "kv"), ("qkv",)
OFFSETS = ("cu_seqlens", "max_seqlen")
PREPARED_NAMES = (
    "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride",
    "local_k_slice",
)  # fmt: skip
ARGUMENTS = {
    "ring_flash_attn": (), "zigzag_ring_flash_attn": (), "stripe_flash_attn": (),
    "ring_flash_attn_varlen": OFFSETS, "zigzag_ring_flash_attn_varlen": OFFSETS,
    "llama3_flash_attn_varlen": PREPARED_NAMES,
}  # fmt: skip
OPTIONS = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False, "group": None,
}  # fmt: skip
NONE = inspect.Parameter.empty
#: Argument names in order, and their defaults, in version 0.1.8.
SIGNATURES: dict[str, dict[str, Any]] = {
    f"{family}_{packing}func": dict.fromkeys(tensors + more, NONE) | OPTIONS
    for family, more in ARGUMENTS.items()
    for packing, tensors in (("", QKV), ("kvpacked_", KV), ("qkvpacked_", ALL))
} | {
    "llama3_flash_attn_prepare_cu_seqlens": dict.fromkeys(("cu_seqlens", "causal", "rank", "world_size"), NONE),
    "substitute_hf_flash_attn": dict.fromkeys(("process_group", "heads_k_stride"), NONE),
    "update_ring_flash_attn_params": dict.fromkeys(("cu_seqlens", "process_group"), NONE),
}  # fmt: skip


def test_all_names_are_there_and_no_others() -> None:
    public = {
        name
        for name, value in vars(ring_flash_attn).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(SIGNATURES)
    assert len(SIGNATURES) == 21


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_the_same(name: str) -> None:
    parameters = {**inspect.signature(getattr(ring_flash_attn, name)).parameters}
    if name not in ("llama3_flash_attn_prepare_cu_seqlens", "update_ring_flash_attn_params"):
        strategy = parameters.pop("strategy")
        assert (strategy.kind, strategy.default) == (inspect.Parameter.KEYWORD_ONLY, "auto")
    assert {p.name: p.default for p in parameters.values()} == SIGNATURES[name]
    assert list(parameters) == list(SIGNATURES[name])
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters.values())


#: Results of version 0.1.8 for documents (0, 3, 10, 16) on four ranks.
PREPARED = {
    (True, 0): ([0, 3, 4], [0, 3, 4], 3, 3, slice(0, 4)),
    (True, 1): ([0, 4], [0, 5], 4, 5, slice(3, 8)),
    (True, 2): ([0, 2, 4], [0, 7, 9], 2, 7, slice(3, 12)),
    (True, 3): ([0, 4], [0, 6], 4, 6, slice(10, 16)),
    (False, 0): ([0, 3, 4], [0, 3, 10], 3, 7, slice(0, 10)),
    (False, 1): ([0, 4], [0, 7], 4, 7, slice(3, 10)),
    (False, 2): ([0, 2, 4], [0, 7, 13], 2, 7, slice(3, 16)),
    (False, 3): ([0, 4], [0, 6], 4, 6, slice(10, 16)),
}


@pytest.mark.parametrize(("causal", "rank"), PREPARED)
def test_prepare(causal: bool, rank: int) -> None:
    documents = torch.tensor([0, 3, 10, 16], dtype=torch.int32)
    q, k, *rest = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(documents, causal, rank, 4)
    assert (q.tolist(), k.tolist(), *rest) == PREPARED[causal, rank]
    assert q.dtype == k.dtype == torch.int32


def llama3_arguments(rank: int = 0, size: int = 2, *, causal: bool = False) -> dict[str, Any]:
    documents = torch.tensor([0, 5, 16])
    prepared = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(documents, causal, rank, size)
    return dict(zip((*PREPARED_NAMES[:4], PREPARED_NAMES[5]), prepared, strict=True)) | {
        "heads_k_stride": 2
    }


def odd(**replaced: Any) -> dict[str, Any]:
    return llama3_arguments() | replaced


BATCHED, TOKENS = torch.zeros(1, 8, H, D), torch.zeros(8, H, D)
BAD: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "window": ("ring_flash_attn", BATCHED, {"window_size": 4}, "window_size must be a pair"),
    "negative window": ("ring_flash_attn", BATCHED, {"window_size": (-2, 0)}, "-1 where a side has no limit"),
    "causal": ("stripe_flash_attn", BATCHED, {"causal": 1}, "causal must be True or False"),
    "probs": ("ring_flash_attn", BATCHED, {"return_attn_probs": None}, "return_attn_probs must be"),
    "deterministic": ("ring_flash_attn", BATCHED, {"deterministic": None}, "deterministic must be"),
    "dropout": ("zigzag_ring_flash_attn", BATCHED, {"dropout_p": 1.5}, r"dropout_p must be in \[0, 1\)"),
    "slopes": ("ring_flash_attn", BATCHED, {"alibi_slopes": torch.ones(3)}, "alibi_slopes must have shape"),
    "group": ("ring_flash_attn", BATCHED, {"group": 3}, "group must be a process group"),
    "odd chunks": ("zigzag_ring_flash_attn", BATCHED[:, :7], {}, "sequence length"),
    "batch in varlen": ("ring_flash_attn_varlen", BATCHED, {"cu_seqlens": (0, 8), "max_seqlen": 8}, r"q must be a tensor \[T_local, heads, D\]"),
    "end": ("ring_flash_attn_varlen", TOKENS, {"cu_seqlens": (0, 7), "max_seqlen": 8}, "must end at the 8 tokens"),
    "start": ("ring_flash_attn_varlen", TOKENS, {"cu_seqlens": (1, 8), "max_seqlen": 8}, "must be .0, ..., T"),
    "descending": ("ring_flash_attn_varlen", TOKENS, {"cu_seqlens": (0, 6, 4, 8), "max_seqlen": 8}, "ascending"),
    "float offsets": ("ring_flash_attn_varlen", TOKENS, {"cu_seqlens": torch.tensor([0.0, 8.0]), "max_seqlen": 8}, "must be integers"),
    "floats": ("ring_flash_attn_varlen", TOKENS, {"cu_seqlens": (0, 4.5, 8), "max_seqlen": 8}, "must be integers"),
    "longest": ("ring_flash_attn_varlen", TOKENS, {"cu_seqlens": (0, 2, 8), "max_seqlen": 5}, "max_seqlen is 5"),
    "odd halves": ("zigzag_ring_flash_attn_varlen", TOKENS, {"cu_seqlens": (0, 3, 8), "max_seqlen": 8}, "must be even"),
    "stride": ("llama3_flash_attn_varlen", TOKENS, odd(heads_k_stride=3), "heads_k_stride must be"),
    "offsets of queries": ("llama3_flash_attn_varlen", TOKENS, odd(cu_seqlens_q=torch.tensor([0, 8])), "cu_seqlens_q is"),
    "offsets of keys": ("llama3_flash_attn_varlen", TOKENS, odd(cu_seqlens_k=torch.tensor([0, 8])), "cu_seqlens_k is"),
    "longest of queries": ("llama3_flash_attn_varlen", TOKENS, odd(max_seqlen_q=4), "max_seqlen_q is 4"),
    "longest of keys": ("llama3_flash_attn_varlen", TOKENS, odd(max_seqlen_k=4), "max_seqlen_k is 4"),
    "prepared causal": ("llama3_flash_attn_varlen", TOKENS, odd(causal=True), "causal=False there and True here"),
    "other rank": ("llama3_flash_attn_varlen", TOKENS, llama3_arguments(1), "rank=1 there and 0 here"),
    "other size": ("llama3_flash_attn_varlen", TOKENS, llama3_arguments(0, 4), "world_size=4 there and"),
}  # fmt: skip
REFUSED: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "slopes by document": ("ring_flash_attn_varlen", TOKENS, {"cu_seqlens": (0, 4, 8), "max_seqlen": 4, "alibi_slopes": torch.ones(2, H)}, "alibi_slopes"),
    "slopes by document of a stream": ("llama3_flash_attn_varlen", TOKENS, odd(alibi_slopes=torch.ones(2, H)), "alibi_slopes"),
    "own slice": ("llama3_flash_attn_varlen", TOKENS, odd(local_k_slice=slice(0, 16)), "llama3_flash_attn_prepare_cu_seqlens"),
}  # fmt: skip


@on_ranks
def test_bad_arguments_are_named_before_anything_is_sent(rank: int) -> None:
    """Only rank 0 makes these calls, and cannot send anything."""
    if rank:
        return
    with patch.object(Ranks, "start", None), patch.object(dist, "all_to_all_single", None):
        for name, (family, x, kwargs, message) in (BAD | REFUSED).items():
            with pytest.raises(ValueError, match=message) as error:
                getattr(ring_flash_attn, f"{family}_func")(x, x, x, **kwargs)
            assert type(error.value) is (UnsupportedError if name in REFUSED else ValueError), name


@pytest.mark.parametrize(
    ("function", "x", "message"),
    [
        ("ring_flash_attn_kvpacked_func", torch.zeros(1, 8, 3, H, D), r"kv must be a tensor \[B, T_local, 2, heads, D\]"),
        ("ring_flash_attn_qkvpacked_func", TOKENS, r"qkv must be a tensor \[B, T_local, 3, heads, D\]"),
    ],
)  # fmt: skip
def test_packed_shapes(function: str, x: Tensor, message: str) -> None:
    more = (x,) if "qkv" in function else (BATCHED, x)
    with pytest.raises(ValueError, match=message):
        getattr(ring_flash_attn, function)(*more)


def test_lengths_that_ranks_cannot_share() -> None:
    with pytest.raises(ValueError, match="document of 2 tokens of padding"):
        ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 6]), True, 0, 4)
    for size in (4, 0):
        with pytest.raises(ValueError, match=rf"rank must be in \[0, {size}\)"):
            ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
                torch.tensor([0, 8]), True, size, size
            )


def test_a_cast_by_position_keeps_documents_apart() -> None:
    ids = torch.tensor([[0, 1, 2, -1]], dtype=torch.int32)
    positions = torch.arange(4)[None]
    unread: Any = None
    mask = ShardedMask(unread, (1, 4), 4, False, None, ids, 3, None, 4, positions)
    for cast in (mask.to(torch.bool), mask.to(dtype=torch.bool), mask.to("cpu", torch.bool)):
        assert cast.segment_ids is not None
        torch.testing.assert_close(cast.segment_ids, ids)


DOCUMENTS = (0, 5, 26, 32)
SIZES: dict[str, Any] = {
    "vocab_size": 29, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
    "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0, "sliding_window": 7,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Gemma2": {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 11},
    "GptOss": {
        "num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip


def build(name: str, **changes: Any) -> Any:
    """Build a small float64 model with random weights, the same on all ranks."""
    config = getattr(transformers, f"{name}Config")(**SIZES | MODELS[name] | changes)
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(
        config, attn_implementation="eager"
    )
    with torch.no_grad():  # initial sinks are too small to show in results
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return model.double().train()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, their positions in the documents, and a gradient of the logits."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(29, (1, 32), generator=generator)
    places = torch.cat([torch.arange(stop - start) for start, stop in pairwise(DOCUMENTS)])
    return tokens, places[None], torch.randn(1, 32, 29, generator=generator).double()


def ring_group(size: int) -> Any:
    """Return this rank's group of ``size`` ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(range(first, first + size)) for first in range(0, world, size)]
    return groups[rank // size]


def _ring(_: int, name: str, size: int) -> tuple[Tensor, list[Tensor]]:
    group = ring_group(size)
    model = build(name)
    model.config._attn_implementation = "flash_attention_2"
    strategy = "ulysses" if size == 4 else "auto"
    substitute_hf_flash_attn(group, heads_k_stride=1, strategy=strategy)
    update_ring_flash_attn_params(torch.tensor(DOCUMENTS, dtype=torch.int32), group)
    local = (x.chunk(size, dim=1)[dist.get_rank(group)] for x in batch())
    tokens, places, weight = local
    logits = model(input_ids=tokens, position_ids=places, use_cache=False).logits
    logits.backward(weight)
    return logits.detach(), [x.grad for x in model.parameters()]


def whole(name: str) -> tuple[Tensor, list[Tensor]]:
    """Return logits and gradients of the model on one document at a time."""
    model, (tokens, places, weight) = build(name), batch()
    logits = [
        model(input_ids=tokens[:, a:b], position_ids=places[:, a:b], use_cache=False).logits
        for a, b in pairwise(DOCUMENTS)
    ]
    joined = torch.cat(logits, dim=1)
    joined.backward(weight)
    return joined.detach(), [x.grad for x in model.parameters()]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_models(pools: dict[int, LocalRanks], name: str, size: int) -> None:
    """Results differ only by the softmax, which eager attention computes in float32."""
    logits, grads = whole(name)
    results = pools[4].run(_ring, name, size)[:size]
    actual = torch.cat([part for part, _ in results], dim=1)
    torch.testing.assert_close(actual, logits, rtol=1e-5, atol=1e-5)
    for parts, expected in zip(
        zip(*(part for _, part in results), strict=True), grads, strict=True
    ):
        scale = expected.abs().max().item()
        torch.testing.assert_close(torch.stack(parts).sum(0), expected, rtol=0, atol=1e-5 * scale)


@pytest.fixture
def registry() -> Iterator[None]:
    """Restore transformers' registry and flash attention afterwards."""
    from transformers import modeling_flash_attention_utils as flash

    shared, own = (
        dict(AttentionInterface._global_mapping),
        dict(ALL_ATTENTION_FUNCTIONS._local_mapping),
    )
    forward = flash._flash_attention_forward
    yield
    AttentionInterface._global_mapping.clear()
    AttentionInterface._global_mapping.update(shared)
    ALL_ATTENTION_FUNCTIONS._local_mapping = own
    flash._flash_attention_forward = forward


@pytest.mark.usefixtures("registry")
def test_all_flash_attention_is_substituted() -> None:
    from transformers import modeling_flash_attention_utils as flash
    from transformers.integrations.flash_attention import flash_attention_forward

    others = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ("sdpa", "flex_attention")}
    substitute_hf_flash_attn(None, 1)
    names = [f"flash_attention_{version}" for version in (2, 3, 4)]
    assert all(isinstance(ALL_ATTENTION_FUNCTIONS[name], RingFlashAttention) for name in names)
    assert all(ALL_ATTENTION_FUNCTIONS[name] is function for name, function in others.items())
    with pytest.raises(UnsupportedError, match="past transformers' registry"):
        flash._flash_attention_forward()  # type: ignore[call-arg]  # wrong on purpose
    ALL_ATTENTION_FUNCTIONS["flash_attention_3"] = flash_attention_forward
    AttentionInterface.register("some/kernel", flash_attention_forward)  # as when a model is loaded
    substitute_hf_flash_attn(None, 2)
    ours = ALL_ATTENTION_FUNCTIONS["some/kernel"]
    assert isinstance(ours, RingFlashAttention) and ours.heads_k_stride == 2
    assert all(ALL_ATTENTION_FUNCTIONS[name] is ours for name in names)
    AttentionInterface.register("some/kernel", flash_attention_forward)
    update_ring_flash_attn_params(torch.tensor([0, 8]), None)
    assert ALL_ATTENTION_FUNCTIONS["some/kernel"] is ours and ours.documents == (0, 8)


@pytest.mark.usefixtures("registry")
def test_params_need_the_substitution() -> None:
    with pytest.raises(ValueError, match="call substitute_hf_flash_attn"):
        update_ring_flash_attn_params(torch.tensor([0, 8]), None)
    with pytest.raises(ValueError, match="heads_k_stride"):
        substitute_hf_flash_attn(None, 0)


def module(**config: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(**config), is_causal=True)


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((1, 4, 16, 8), (1, 2, 16, 8), (1, 2, 16, 8))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


SINKS = torch.linspace(-1, 1, 4, dtype=torch.float64)
HONOURED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "window": ({"sliding_window": 4}, {"window": (3, 3)}),
    "both sides": ({"sliding_window": 4, "is_causal": False}, {"window": (3, 3), "causal": False}),
    "full": ({"is_causal": False}, {"causal": False}),
    "scaling": ({"scaling": 0.9}, {"softmax_scale": 0.9}),
    "softcap": ({"softcap": 0.7}, {"softcap": 0.7}),
    "sinks": ({"s_aux": SINKS}, {"sinks": SINKS}),
    "dropout": ({"dropout": 0.25}, {"dropout_p": 0.25}),
    "deterministic": ({"deterministic": True}, {}),
    "what is not attention's": ({"position_ids": torch.arange(16), "use_cache": False}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", HONOURED)
def test_what_a_model_asks_for(name: str) -> None:
    kwargs, options = HONOURED[name]
    attention = RingFlashAttention(None, 1, (0, 5, 16))
    q, k, v = inputs()
    torch.manual_seed(4)
    out, weights = attention(module(), q, k, v, None, **kwargs)
    if "dropout" in kwargs:
        torch.manual_seed(4)
        options = options | {"dropout_seed": int(torch.randint(2**63 - 1, ()))}
    heads_last = (x.transpose(1, 2).numpy() for x in (q, k, v))
    expected, _ = reference.attention(
        *heads_last, cu_seqlens=(0, 5, 16), **{"causal": True, **options}
    )
    assert weights is None
    torch.testing.assert_close(out, torch.tensor(expected), rtol=1e-12, atol=1e-12)


def test_environment_asks_for_determinism(monkeypatch: pytest.MonkeyPatch) -> None:
    from ring_torch.compat import hf

    asked = []

    def attention(q: Tensor, *_: Tensor, deterministic: bool, **__: Any) -> Tensor:
        asked.append(deterministic)
        return q

    monkeypatch.setattr(hf, "ring_attention", attention)
    for value in ("1", "0"):
        monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", value)
        q, k, v = inputs()
        RingFlashAttention(None, 1, (0, 16))(module(), q, k, v, None)
    assert asked == [True, False]


REFUSED_OF_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "padding": ({"attention_mask": torch.ones(1, 16)}, "attention_mask: .*padding"),
    "documents": ({"cu_seq_lens_q": torch.tensor([0, 16])}, "cu_seq_lens_q: documents are those of"),
    "weights": ({"output_attentions": True}, "output_attentions: weights are never formed"),
    "cache": ({"cache": object()}, "cache: "),
    "bias": ({"position_bias": torch.zeros(1)}, "position_bias: "),
    "unknown": ({"alibi": torch.zeros(4)}, "alibi: this argument is not known"),
    "several": ({"alibi": 1, "block_table": 2}, "alibi: .*block_table: "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_OF_MODELS)
def test_refusals(name: str) -> None:
    kwargs, message = REFUSED_OF_MODELS[name]
    arguments: dict[str, Any] = {"attention_mask": None} | kwargs
    q, k, v = inputs()
    with pytest.raises(UnsupportedError, match=message):
        RingFlashAttention(None, 1, (0, 16))(module(), q, k, v, **arguments)


def test_what_cannot_be_known_is_asked_for() -> None:
    q, k, v = inputs()
    with pytest.raises(UnsupportedError, match="attention_chunk_size"):
        RingFlashAttention(None, 1, (0, 16))(module(attention_chunk_size=4), q, k, v, None)
    with pytest.raises(ValueError, match="call update_ring_flash_attn_params"):
        RingFlashAttention(None, 1)(module(), q, k, v, None)
    with pytest.raises(ValueError, match="no cached keys"):
        RingFlashAttention(None, 1, (0, 16))(module(), q[:, :, :1], k, v, None)
    with pytest.raises(ValueError, match="heads_k_stride"):
        RingFlashAttention(None, 3, (0, 16))(module(), q, k, v, None)
    with pytest.raises(ValueError, match="cu_seqlens must end at"):
        RingFlashAttention(None, 1, (0, 12))(module(), q, k, v, None)
