"""The drop-in for ring_flash_attn: its names and arguments, the oracle's results, and models."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dense import numbers
from hf_models import BYTES, build
from on_ranks import on_ranks
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import ring_torch.compat as ring_flash_attn
from ring_core import RankMismatchError, UnsupportedError, reference
from ring_torch.comm.ranks import Ranks
from ring_torch.compat import (
    documents as _documents,
    hf,
    substitute_hf_flash_attn,
    update_ring_flash_attn_params,
)
from ring_torch.compat.hf import RingFlashAttention
from ring_torch.hf.models.placeholders import ShardedMask
from ring_torch.local import LocalRanks

B, H, K, D = 2, 4, 2, 8
#: How documents lie in the tensors of a family: none, each split on its own, or one stream split.
BATCH, EACH, STREAM = "batch", "each", "stream"
FAMILIES = {
    "ring_flash_attn": BATCH, "zigzag_ring_flash_attn": BATCH, "stripe_flash_attn": BATCH,
    "ring_flash_attn_varlen": EACH, "zigzag_ring_flash_attn_varlen": EACH,
    "llama3_flash_attn_varlen": STREAM,
}  # fmt: skip
ANSWERS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window_size": (9, -1)},
    "window": {"window_size": (5, 3)},
    "left only": {"window_size": (6, -1)},
    "right only": {"window_size": (-1, 2)},
    "all": {
        "softmax_scale": 0.7, "dropout_p": 0.3, "causal": True, "deterministic": True,
        "alibi_slopes": torch.linspace(0.1, 0.8, H, dtype=torch.float64),
    },
    "ulysses": {"causal": True, "strategy": "ulysses"},
}  # fmt: skip
FEW = ("causal", "window")
#: Families whose functions are asked for all answers; the others of a kind lay out tokens alone.
IN_FULL = ("zigzag_ring_flash_attn", "zigzag_ring_flash_attn_varlen", "llama3_flash_attn_varlen")
#: Ranks, documents of the whole sequence, and what is asked there of each function.
RUNS: dict[str, list[tuple[int, tuple[int, ...], Any]]] = {
    BATCH: [(4, (0, 32), ANSWERS), (2, (0, 32), FEW)],
    EACH: [
        (4, (0, 24, 32, 72), ANSWERS), (2, (0, 12, 16, 36), FEW), (4, (0, 40), FEW),
        (2, (0, 8, 8, 24), FEW), (4, (0, 16, 32), FEW),
    ],
    STREAM: [
        (4, (0, 5, 19, 32), ANSWERS), (2, (0, 5, 19, 32), FEW), (2, (0, 32), FEW),
        (4, (0, 8, 16, 32), FEW), (4, tuple(range(0, 33, 2)), FEW),
    ],
}  # fmt: skip


def seed_of(state: int) -> int:
    """Return the seed that a call draws after ``torch.manual_seed(state)``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(state)
        return int(torch.randint(2**63 - 1, ()))


def tensors(batch: int, tokens: int, heads: int = K) -> list[Tensor]:
    """Return global q, k, v and the output's gradient, the same on all ranks."""
    shapes = (H, heads, heads, H)
    return [numbers(seed, batch, tokens, n, D) for seed, n in enumerate(shapes)]


def expected(whole: list[Any], given: dict[str, Any], seed: int, **more: Any) -> list[Any]:
    """Return ``out``, ``lse`` and gradients of dense attention."""
    q, k, v, dout = (np.asarray(x) for x in whole)
    options = {
        n: x for n, x in given.items() if n not in ("window_size", "deterministic", "strategy")
    }
    if "window_size" in given:
        options["window"] = tuple(None if x < 0 else x for x in given["window_size"])
    if "dropout_p" in given:
        options["dropout_seed"] = seed
    grads = reference.attention_grads(dout, q, k, v, **options, **more)
    return [*reference.attention(q, k, v, **options, **more), *grads[:3]]


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


def tokens_of(family: str, documents: tuple[int, ...], size: int, rank: int) -> list[int]:
    """Return the tokens of a rank, by the definition of each layout."""
    local: list[int] = []
    for start, stop in pairwise(documents if FAMILIES[family] == EACH else (0, documents[-1])):
        positions = torch.arange(start, stop)
        if stop == start:
            continue
        if family.startswith("zigzag"):
            chunks = positions.chunk(2 * size)
            local += [*chunks[rank].tolist(), *chunks[2 * size - 1 - rank].tolist()]
        elif family.startswith("stripe"):
            local += positions[rank::size].tolist()
        else:
            local += positions.chunk(size)[rank].tolist()
    return local


def shards_of(family: str, documents: tuple[int, ...], **more: Any) -> list[Tensor]:
    """Return this rank's part of tensors, without a batch where documents are given."""
    local = tokens_of(family, documents, dist.get_world_size(), dist.get_rank())
    if FAMILIES[family] == BATCH:
        return [x[:, local] for x in tensors(B, documents[-1], **more)]
    return [x[0, local] for x in tensors(1, documents[-1], **more)]


def arguments_of(family: str, documents: tuple[int, ...], *, causal: bool) -> tuple[Any, ...]:
    """Return the arguments of a function behind its tensors."""
    size, offsets = dist.get_world_size(), torch.tensor(documents, dtype=torch.int32)
    if FAMILIES[family] == EACH:
        return offsets // size, int(offsets.diff().max()) // size
    if FAMILIES[family] == BATCH:
        return ()
    *prepared, keys = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
        offsets, causal, dist.get_rank(), size
    )
    return *prepared, 1, keys


def called(
    _: int, family: str, documents: tuple[int, ...], kwargs: dict[str, Any], long: int | None = None
) -> list[Any]:
    """Return the results of a rank; documents from ``long`` on have calls of their own."""
    arguments = arguments_of(family, documents, causal=kwargs.get("causal", False))
    with patch.object(_documents, "LONG", long or _documents.LONG):
        shards = shards_of(family, documents)
        return attended(getattr(ring_flash_attn, f"{family}_func"), *shards, *arguments, **kwargs)


def same_parts(
    results: list[Any], expected: list[Any], family: str, documents: tuple[int, ...]
) -> None:
    """Compare the results of all ranks with their tokens' parts of the whole results."""
    for rank, actual in enumerate(results):
        local = tokens_of(family, documents, len(results), rank)
        for n, (x, y) in enumerate(zip(actual, expected, strict=True)):
            part = y[..., local] if n == 1 else y[:, local]
            same(x, part if FAMILIES[family] == BATCH else part[0])


@pytest.mark.parametrize(
    ("family", "size", "documents", "option"),
    [
        (family, size, documents, option)
        for family, kind in FAMILIES.items()
        for size, documents, options in RUNS[kind]
        for option in (options if family in IN_FULL or options is FEW else (*FEW, "all"))
    ],
)
def test_results_are_the_oracles(
    pools: dict[int, LocalRanks], family: str, size: int, documents: tuple[int, ...], option: str
) -> None:
    results = pools[size].run(called, family, documents, ANSWERS[option])
    whole = tensors(B if FAMILIES[family] == BATCH else 1, documents[-1])
    right = expected(whole, ANSWERS[option], seed_of(5), cu_seqlens=documents)
    same_parts(results, right, family, documents)


@pytest.mark.parametrize("option", ["causal window", "window"])
@pytest.mark.parametrize("family", ["ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen"])
def test_long_documents_have_calls_of_their_own(
    pools: dict[int, LocalRanks], family: str, option: str
) -> None:
    documents = (0, 32, 40, 80, 88)  # long, short, long, short
    right = expected(tensors(1, 88), ANSWERS[option], 0, cu_seqlens=documents)
    results = pools[4].run(called, family, documents, ANSWERS[option], 8)
    same_parts(results, right, family, documents)


@on_ranks
def test_packed_tensors() -> None:
    for family, kind in FAMILIES.items():
        documents = RUNS[kind][1][1]
        arguments = arguments_of(family, documents, causal=True)
        q, k, v, dout = shards_of(family, documents, heads=H)
        right = attended(
            getattr(ring_flash_attn, f"{family}_func"), q, k, v, dout, *arguments, causal=True
        )
        for first, name in ((1, "kvpacked"), (0, "qkvpacked")):
            function = getattr(ring_flash_attn, f"{family}_{name}_func")
            packed = [*[q][:first], torch.stack([q, k, v][first:], dim=-3)]
            leaves = [x.clone().requires_grad_() for x in packed]
            out, lse, _ = function(*leaves, *arguments, causal=True, return_attn_probs=True)
            *firsts, last = torch.autograd.grad(out, leaves, dout)
            for x, y in zip([out, lse, *firsts, *last.unbind(-3)], right, strict=True):
                assert torch.equal(x, y), (family, name)


def test_compiled_code_calls_it() -> None:
    """Documents may change, and may be prepared in the compiled code."""
    whole = q, k, v, _ = tensors(1, 16)
    llama3: Any = ring_flash_attn.llama3_flash_attn_varlen_func
    ring: Any = ring_flash_attn.ring_flash_attn_varlen_func
    shards, prepare = (q[0], k[0], v[0]), ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens

    def both(offsets: Tensor) -> Any:
        *documents, part = prepare(offsets, True, 0, 1)
        options = {"heads_k_stride": 1, "local_k_slice": part, "causal": True}
        out = llama3(*shards, *documents, **options)
        return out + ring(*shards, offsets, 16, causal=True)

    compiled = torch.compile(both, backend="aot_eager")
    for stop in (6, 3, 9):
        right = expected(whole, ANSWERS["causal"], 0, cu_seqlens=(0, stop, 16))
        same(compiled(torch.tensor([0, stop, 16], dtype=torch.int32)), 2 * right[0][0])


@pytest.mark.parametrize("what", ["dropout_seed", "offsets"])
@on_ranks
def test_ranks_that_differ_are_told(rank: int, what: str) -> None:
    torch.manual_seed(rank * (what == "dropout_seed"))
    documents, q = (0, 4 - 2 * rank * (what == "offsets"), 8), torch.ones(8, H, D)
    group: Any = dist.new_group()
    with pytest.raises(RankMismatchError, match=f"{what} is"):
        ring_flash_attn.ring_flash_attn_varlen_func(
            q, q, q, documents, 8, group=group, dropout_p=0.1
        )


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


def llama3_arguments(rank: int = 0, size: int = 2) -> dict[str, Any]:
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice"
    prepared = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
        torch.tensor([0, 5, 16]), False, rank, size
    )
    return dict(zip(names, prepared, strict=True)) | {"heads_k_stride": 2}


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
PREPARE = "llama3_flash_attn_prepare_cu_seqlens"
#: Arguments of other functions, the tensors one by one.
OTHERS: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "packed keys": ("ring_flash_attn_kvpacked_func", (BATCHED, torch.zeros(1, 8, 3, H, D)), {}, r"kv must be a tensor \[B, T_local, 2, heads, D\]"),
    "all packed": ("ring_flash_attn_qkvpacked_func", (TOKENS,), {}, r"qkv must be a tensor \[B, T_local, 3, heads, D\]"),
    "length": (PREPARE, (torch.tensor([0, 6]), True, 0, 4), {}, "document of 2 tokens of padding"),
    "rank": (PREPARE, (torch.tensor([0, 8]), True, 4, 4), {}, r"rank must be in \[0, 4\)"),
    "no ranks": (PREPARE, (torch.tensor([0, 8]), True, 0, 0), {}, r"rank must be in \[0, 0\)"),
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
        for name, (family, x, kwargs, message) in (BAD | REFUSED | OTHERS).items():
            function = family if name in OTHERS else f"{family}_func"
            tensors = x if name in OTHERS else (x,) * 3
            with pytest.raises(ValueError, match=message) as error:
                getattr(ring_flash_attn, function)(*tensors, **kwargs)
            assert type(error.value) is (UnsupportedError if name in REFUSED else ValueError), name


def test_a_cast_by_position_keeps_documents_apart() -> None:
    ids = torch.tensor([[0, 1, 2, -1]], dtype=torch.int32)
    positions = torch.arange(4)[None]
    unread: Any = None
    mask = ShardedMask(unread, (1, 4), 4, False, None, ids, 3, None, 4, positions)
    for cast in (mask.to(torch.bool), mask.to(dtype=torch.bool), mask.to("cpu", torch.bool)):
        assert cast.segment_ids is not None
        torch.testing.assert_close(cast.segment_ids, ids)


DOCUMENTS = (0, 5, 26, 32)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, their positions in the documents, and a gradient of the logits."""
    tokens = torch.randint(BYTES, (1, 32), generator=torch.Generator().manual_seed(2))
    places = torch.cat([torch.arange(stop - start) for start, stop in pairwise(DOCUMENTS)])
    return tokens, places[None], numbers(2, 1, 32, BYTES)


def run(model: Any, parts: list[slice]) -> tuple[Tensor, list[Tensor]]:
    """Return logits and gradients of a model on parts of the tokens, one after another."""
    tokens, places, weight = batch()
    logits = [
        model(input_ids=tokens[:, x], position_ids=places[:, x], use_cache=False).logits
        for x in parts
    ]
    joined = torch.cat(logits, dim=1)
    joined.backward(torch.cat([weight[:, x] for x in parts], dim=1))
    return joined.detach(), [x.grad for x in model.parameters()]


def _ring(rank: int, name: str, size: int) -> tuple[Tensor, list[Tensor]]:
    groups = [dist.new_group(range(first, first + size)) for first in range(0, 4, size)]
    group: Any = groups[rank // size]
    strategy = "ulysses" if size == 4 else "auto"
    substitute_hf_flash_attn(group, heads_k_stride=1, strategy=strategy)
    update_ring_flash_attn_params(torch.tensor(DOCUMENTS, dtype=torch.int32), group)
    model = build(name)
    model.config._attn_implementation = "flash_attention_2"
    tokens = 32 // size
    return run(model, [slice(rank % size * tokens, (rank % size + 1) * tokens)])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "GptOss"])
def test_models(pools: dict[int, LocalRanks], name: str, size: int) -> None:
    """Results differ only by the softmax, which eager attention computes in float32."""
    logits, grads = run(build(name), [slice(*x) for x in pairwise(DOCUMENTS)])
    results = pools[4].run(_ring, name, size)[:size]
    actual = torch.cat([part for part, _ in results], dim=1)
    torch.testing.assert_close(actual, logits, rtol=1e-5, atol=1e-5)
    for parts, expected in zip(
        zip(*(part for _, part in results), strict=True), grads, strict=True
    ):
        scale = expected.abs().max().item()
        torch.testing.assert_close(torch.stack(parts).sum(0), expected, rtol=0, atol=1e-5 * scale)


def test_all_flash_attention_is_substituted(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_flash_attention_utils as flash
    from transformers.integrations.flash_attention import flash_attention_forward

    monkeypatch.setattr(
        AttentionInterface, "_global_mapping", {**AttentionInterface._global_mapping}
    )
    own = {**ALL_ATTENTION_FUNCTIONS._local_mapping}
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", own)
    monkeypatch.setattr(flash, "_flash_attention_forward", flash._flash_attention_forward)
    with pytest.raises(ValueError, match="call substitute_hf_flash_attn"):
        update_ring_flash_attn_params(torch.tensor([0, 8]), None)
    with pytest.raises(ValueError, match="heads_k_stride"):
        substitute_hf_flash_attn(None, 0)
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


def module(**config: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(**config), is_causal=True)


def inputs() -> list[Tensor]:
    return [numbers(3, 1, heads, 16, 8) for heads in (4, 2, 2)]


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
        options = options | {"dropout_seed": seed_of(4)}
    heads_last = (x.transpose(1, 2).numpy() for x in (q, k, v))
    expected, _ = reference.attention(
        *heads_last, cu_seqlens=(0, 5, 16), **{"causal": True, **options}
    )
    assert weights is None
    torch.testing.assert_close(out, torch.tensor(expected), rtol=1e-12, atol=1e-12)


def test_environment_asks_for_determinism(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(side_effect=lambda q, *_, **__: q)
    monkeypatch.setattr(hf, "ring_attention", asked)
    q, k, v = inputs()
    for value in ("1", "0"):
        monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", value)
        RingFlashAttention(None, 1, (0, 16))(module(), q, k, v, None)
    assert [call.kwargs["deterministic"] for call in asked.call_args_list] == [True, False]


#: What is not as it should be: an argument, the config, documents or their stride, or the queries.
REFUSED_OF_MODELS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "padding": ({"attention_mask": torch.ones(1, 16)}, UnsupportedError, "attention_mask: .*padding"),
    "documents": ({"cu_seq_lens_q": torch.tensor([0, 16])}, UnsupportedError, "cu_seq_lens_q: documents are those of"),
    "weights": ({"output_attentions": True}, UnsupportedError, "output_attentions: weights are never formed"),
    "cache": ({"cache": object()}, UnsupportedError, "cache: "),
    "bias": ({"position_bias": torch.zeros(1)}, UnsupportedError, "position_bias: "),
    "unknown": ({"alibi": torch.zeros(4)}, UnsupportedError, "alibi: this argument is not known"),
    "several": ({"alibi": 1, "block_table": 2}, UnsupportedError, "alibi: .*block_table: "),
    "chunks": ({"config": {"attention_chunk_size": 4}}, UnsupportedError, "attention_chunk_size"),
    "no documents": ({"given": None}, ValueError, "call update_ring_flash_attn_params"),
    "cached keys": ({"queries": 1}, ValueError, "no cached keys"),
    "stride": ({"stride": 3}, ValueError, "heads_k_stride"),
    "end": ({"given": (0, 12)}, ValueError, "cu_seqlens must end at"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_OF_MODELS)
def test_refusals(name: str) -> None:
    kwargs, error, message = REFUSED_OF_MODELS[name]
    more: dict[str, Any] = {"attention_mask": None} | kwargs
    documents, stride = more.pop("given", (0, 16)), more.pop("stride", 1)
    layer, (q, k, v) = module(**more.pop("config", {})), inputs()
    q = q[:, :, : more.pop("queries", None)]
    with pytest.raises(error, match=message):
        RingFlashAttention(None, stride, documents)(layer, q, k, v, **more)
