"""The drop-in has the names and arguments of ring_flash_attn; errors name bad arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ring_torch.compat as ring_flash_attn
from ring_torch.comm.ranks import Ranks
from ring_torch.hf.models.placeholders import ShardedMask
from ring_torch.local import LocalRanks

H, D = 4, 8

QKV, KV, ALL = ("q", "k", "v"), ("q", "kv"), ("qkv",)
BOTH = ("cu_seqlens", "max_seqlen")
LLAMA3 = (
    "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride",
    "local_k_slice",
)  # fmt: skip
FAMILIES = {
    "ring_flash_attn": (), "zigzag_ring_flash_attn": (), "stripe_flash_attn": (),
    "ring_flash_attn_varlen": BOTH, "zigzag_ring_flash_attn_varlen": BOTH,
    "llama3_flash_attn_varlen": LLAMA3,
}  # fmt: skip
OPTIONS = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False, "group": None,
}  # fmt: skip
NONE = inspect.Parameter.empty
#: Argument names in order, and their defaults, in version 0.1.8.
SIGNATURES: dict[str, dict[str, Any]] = {
    f"{family}_{packing}func": dict.fromkeys(tensors + more, NONE) | OPTIONS
    for family, more in FAMILIES.items()
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
    return dict(zip((*LLAMA3[:4], LLAMA3[5]), prepared, strict=True)) | {"heads_k_stride": 2}


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


def _bad(rank: int) -> dict[str, tuple[str, str]]:
    """Return the errors of malformed calls on rank 0, which cannot send anything."""
    if rank:
        return {}
    patch = pytest.MonkeyPatch()
    patch.setattr(Ranks, "start", None)
    patch.setattr(dist, "all_to_all_single", None)
    said = {}
    for name, (family, x, kwargs, _) in (BAD | REFUSED).items():
        try:
            getattr(ring_flash_attn, f"{family}_func")(x, x, x, **kwargs)
        except ValueError as error:
            said[name] = (type(error).__name__, str(error))
    patch.undo()
    return said


def test_bad_arguments_are_named_before_anything_is_sent() -> None:
    with LocalRanks(2) as pool:
        said, _ = pool.run(_bad)
    for name, (_, _, _, message) in (BAD | REFUSED).items():
        kind, text = said[name]
        assert kind == ("UnsupportedError" if name in REFUSED else "ValueError"), name
        with pytest.raises(ValueError, match=message):
            raise ValueError(text)


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
    """Casting a model's mask to bool by position keeps its segment ids, and documents apart."""
    ids = torch.tensor([[0, 1, 2, -1]], dtype=torch.int32)
    positions = torch.arange(4)[None]
    unread: Any = None
    mask = ShardedMask(unread, (1, 4), 4, False, None, ids, 3, None, 4, positions)
    for cast in (mask.to(torch.bool), mask.to(dtype=torch.bool), mask.to("cpu", torch.bool)):
        assert cast.segment_ids is not None
        torch.testing.assert_close(cast.segment_ids, ids)
