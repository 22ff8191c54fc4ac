"""Bad input raises an error that names the argument, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import on_ranks
from refused import refused
from wrong import KV, Q, bad_calls

from ring_core import Mask, UnsupportedError, reference
from ring_core.base.arguments import FOREIGN_OPTIONS
from ring_torch import ContextParallel, KernelConfig, compat, ring_attention


def tensors(**replaced: Any) -> dict[str, Any]:
    """Return valid arguments, with some replaced."""
    good = {"q": torch.zeros(Q), "k": torch.zeros(KV), "v": torch.zeros(KV)}
    return good | replaced


def zeros(shape: tuple[int, ...], dtype: str = "float32") -> torch.Tensor:
    return torch.zeros(shape, dtype=getattr(torch, dtype))


BAD: dict[str, tuple[dict[str, Any], str]] = bad_calls(zeros, "torch.Tensor") | {
    "not a tensor": ({"k": [1.0]}, "k must be a torch.Tensor, got list"),
    "device": ({"k": torch.zeros(KV, device="meta")}, "on one device, got cpu for q and meta for k"),
    "cu_seqlens on a device": ({"cu_seqlens": torch.zeros(3, device="meta", dtype=torch.int32)}, "known on the host"),
    "ids dtype": ({"segment_ids": zeros((2, 8), "int64")}, "segment_ids must be int32, got int64"),
    "slopes gradient": ({"alibi_slopes": torch.zeros(4, requires_grad=True)}, "alibi_slopes have no gradient"),
    "kernel": ({"kernel": "flash"}, "unknown kernel 'flash'; known: auto, fa4, fa3, cudnn, fa2, sdpa, triton, eager"),
    "transport": ({"transport": "rdma"}, "unknown transport 'rdma'; known: auto, symm_mem, p2p"),
    "strategy": ({"strategy": "rdma"}, "unknown strategy name 'rdma'; known: auto, ulysses, gather, ring, balanced"),
    "group": ({"group": 3}, "group must be a process group"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    replaced, message = BAD[name]
    refused(message, ring_attention, **tensors(**replaced))


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "several reasons": (
        {"softcap": 1.0, "alibi_slopes": torch.zeros(4), "window": (2, 0)},
        ("softcap", "alibi_slopes", "full and square causal blocks only", "kernel='eager'"),
    ),
    "segment_ids": ({"segment_ids": torch.zeros(2, 8, dtype=torch.int32)}, ("segment_ids",)),
    "bias": ({"bias": torch.zeros(1, 1, 8, 8)}, ("bias",)),
    "dropout": ({"dropout_p": 0.1, "dropout_seed": 0}, ("dropout_p",)),
    "deterministic": ({"deterministic": True}, ("deterministic=True",)),
    "documents": ({"cu_seqlens": (0, 3, 8)}, ("several documents",)),
    "chunks": ({"chunk_size": 3}, ("several documents or chunks",)),
    "predicate": ({"mask": Mask(predicate=lambda q, k: q == k)}, ("predicate",)),
    "v dim": ({"v": torch.zeros(2, 8, 2, 8)}, ("head dim 8 to equal Q's 16",)),
    "half": ({n: torch.zeros(KV, dtype=torch.bfloat16) for n in "qkv"}, ("not bfloat16",)),
    "blocks": ({"kernel": KernelConfig("sdpa", block_q=64)}, ("block_q",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_named_kernel_never_falls_back(name: str) -> None:
    """The error lists every reason, and what would work instead."""
    options, reasons = REFUSED[name]
    with pytest.raises(UnsupportedError) as caught:
        ring_attention(**tensors(**({"kernel": "sdpa"} | options)))
    assert all(
        word in str(caught.value)
        for word in (*reasons, "kernel 'sdpa'", "Instead: use kernel='eager'")
    )


def test_auto_names_all_reasons_when_nothing_fits() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"no kernel can do this call. fa4: .*; eager: has no choice of fused",
    ):
        ring_attention(**tensors(kernel=KernelConfig(fused_backward=True)))


@on_ranks
def test_nothing_is_sent_before_the_error() -> None:
    """Both ranks raise at once: neither waits for the other."""
    x = torch.zeros(1, 3, 2, 8)
    refused(r"sequence length 6 .* pad to 8", ring_attention, x, x, x, layout="zigzag")
    refused("pad to 8", ContextParallel().shard, torch.zeros(1, 6, 2))


CONTIGUOUS = ContextParallel(layout="contiguous")
torch.manual_seed(0)
EIGHT, SIX = (torch.randn(1, n, 2, 4) for n in (8, 6))
FEWER_KEYS = r"q has 8 tokens but k 6: .*x\.transpose\(1, 2\).*mask=Mask\(causal=True\)"


def compiled(*x: Any, **options: Any) -> Any:
    return torch.compile(ring_attention, backend="eager", fullgraph=True)(*x, **options)


CAUSAL: dict[str, Callable[..., Any]] = {
    "ring_attention": ring_attention, "ContextParallel": CONTIGUOUS.attention, "compiled": compiled,
}  # fmt: skip


@pytest.mark.parametrize("call", [*CAUSAL.values(), CONTIGUOUS.explain], ids=[*CAUSAL, "explain"])
@pytest.mark.parametrize("mask", [None, torch.ones(8, 6, dtype=torch.bool)], ids=["alone", "mask"])
def test_causal_with_fewer_keys_is_refused(call: Callable[..., Any], mask: Any) -> None:
    with pytest.raises(Exception, match=FEWER_KEYS) as error:
        call(EIGHT, SIX, SIX, causal=True, mask=mask)
    assert call is compiled or type(error.value) is ValueError


def expected() -> Any:
    return reference.attention(*(x.numpy() for x in (EIGHT, SIX, SIX)), mask=Mask(causal=True))[0]


@pytest.mark.parametrize("call", CAUSAL.values(), ids=CAUSAL)
def test_a_causal_mask_with_fewer_keys_keeps_the_rule(call: Callable[..., Any]) -> None:
    np.testing.assert_allclose(call(EIGHT, SIX, SIX, mask=Mask(causal=True)), expected(), atol=2e-6)


@pytest.mark.parametrize("call", CAUSAL.values(), ids=CAUSAL)
def test_causal_with_as_many_keys_or_more_is_right(call: Callable[..., Any]) -> None:
    for q in (SIX, SIX[:, :5]):
        assert torch.equal(
            call(q, SIX, SIX, causal=True), call(q, SIX, SIX, mask=Mask(causal=True))
        )


@pytest.mark.parametrize("mask_first", [False, True])
def test_an_equal_mask_before_does_not_decide(mask_first: bool) -> None:
    """The cache of prepared calls tells the option from an equal mask, whichever comes first."""
    q, k = (x[:, :, :1].contiguous() for x in (EIGHT, SIX))
    for _ in range(2):
        if mask_first:
            ring_attention(q, k, k, mask=Mask(causal=True))
        refused(FEWER_KEYS, ring_attention, q, k, k, causal=True)
        ring_attention(q, k, k, mask=Mask(causal=True))


def test_calls_of_other_libraries_keep_their_meaning() -> None:
    out = compat.ring_flash_attn_func(EIGHT, SIX, SIX, causal=True)
    np.testing.assert_allclose(out, expected(), atol=2e-6)


CP = ContextParallel()
WITH_OPTIONS: dict[str, Callable[..., Any]] = {
    "ring_attention": ring_attention, "attention": CP.attention, "explain": CP.explain,
}  # fmt: skip
ZEROS = torch.zeros(1, 8, 2, 4)


@pytest.mark.parametrize("call", WITH_OPTIONS.values(), ids=WITH_OPTIONS)
@pytest.mark.parametrize("name", FOREIGN_OPTIONS)
def test_options_of_other_libraries_are_refused_by_their_names_here(
    name: str, call: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match=rf"no option is called {name}\. Instead: for {name}, "):
        call(ZEROS, ZEROS, ZEROS, **{name: None})


def test_other_names_stay_a_type_error() -> None:
    for call in WITH_OPTIONS.values():
        refused("nonsense", call, ZEROS, ZEROS, ZEROS, nonsense=1, error=TypeError)
