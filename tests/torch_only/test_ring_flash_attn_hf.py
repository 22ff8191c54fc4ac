"""Models of transformers after ``substitute_hf_flash_attn`` equal those on the whole sequence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ring_core import UnsupportedError, reference
from ring_torch.compat import substitute_hf_flash_attn, update_ring_flash_attn_params
from ring_torch.compat.hf import RingFlashAttention
from ring_torch.local import LocalRanks

RANKS = 4

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
def test_models(pool: LocalRanks, name: str, size: int) -> None:
    """Results differ only by the softmax, which eager attention computes in float32."""
    logits, grads = whole(name)
    results = pool.run(_ring, name, size)[:size]
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


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "padding": ({"attention_mask": torch.ones(1, 16)}, "attention_mask: .*padding"),
    "documents": ({"cu_seq_lens_q": torch.tensor([0, 16])}, "cu_seq_lens_q: documents are those of"),
    "weights": ({"output_attentions": True}, "output_attentions: weights are never formed"),
    "cache": ({"cache": object()}, "cache: "),
    "bias": ({"position_bias": torch.zeros(1)}, "position_bias: "),
    "unknown": ({"alibi": torch.zeros(4)}, "alibi: this argument is not known"),
    "several": ({"alibi": 1, "block_table": 2}, "alibi: .*block_table: "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    kwargs, message = REFUSED[name]
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
