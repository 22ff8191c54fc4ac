"""Hooks keep the state of the forward that made it: recomputed layers get their own batch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hf_models import Wide
from sweep import images
from sweep.compare import batch_of, build
from sweep.tiny import VOCAB
from torch import Tensor

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.local import LocalRanks

#: Models by their hooks: ``(model type, batches)``.
MODELS = {
    "LlamaForCausalLM": ("llama", "text"),
    "GPTJForCausalLM": ("gptj", "text"),  # its own attention code
    "BloomForCausalLM": ("bloom", "text"),  # ALiBi slopes
    "BartForCausalLM": ("bart", "text"),  # positions
    "RoFormerForMaskedLM": ("roformer", "text"),  # positions, within the encoder
    "Llama4ForCausalLM": ("llama4", "text"),  # chunks
    "Lfm2ForCausalLM": ("lfm2", "text"),  # convolutions
    "Qwen3NextForCausalLM": ("qwen3_next", "text"),  # recurrent layers
    "FalconH1ForCausalLM": ("falcon_h1", "text"),  # recurrent layers beside attention
    "RecurrentGemmaForCausalLM": ("recurrent_gemma", "text"),  # they get the attention mask
    "T5ForConditionalGeneration": ("t5", "pair"),  # relative position biases
    "BartForConditionalGeneration": ("bart", "pair"),  # positions
    "M2M100ForConditionalGeneration": ("m2m_100", "pair"),  # positions counted without padding
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "images"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "images"),  # with recurrent layers
}
CHECKPOINTS = {
    "plain": None,
    "reentrant": {"use_reentrant": True},
    "not-reentrant": {"use_reentrant": False},
}


def trainable(name: str) -> Any:
    """Build a model in training mode, without dropout."""
    model = build(name, MODELS[name][0]).train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        for rate in ("dropout", "activation_dropout", "attention_dropout", "layerdrop"):
            if isinstance(getattr(part, rate, None), float):
                setattr(part, rate, 0.0)
    return model


def text(rows: int, length: int, seed: int, padding: slice) -> dict[str, Tensor]:
    """Make a batch whose first row has padding, without labels where padding would count."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, VOCAB - 16, (rows, length), generator=generator)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, padding] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[:, 1:][mask[:, :-1] == 0] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def batches(model: Any, kind: str) -> list[dict[str, Tensor]]:
    """Return two batches of different shapes and paddings."""
    parts = [text(2, 27, 1, slice(0, 6)), text(1, 18, 2, slice(13, 18))]
    if kind == "pair":
        for batch, source in zip(
            parts, (text(2, 15, 3, slice(8, 15)), text(1, 22, 4, slice(0))), strict=True
        ):
            batch["decoder_attention_mask"] = batch.pop("attention_mask")
            batch["decoder_input_ids"] = batch["input_ids"].roll(1, dims=1)
            batch |= {name: source[name] for name in ("input_ids", "attention_mask")}
    if kind == "images":
        with Wide() if model.dtype == torch.float64 else nullcontext():
            merged = images.image_batch(model, batch_of(model))
        assert merged is not None
        tokens = merged["input_ids"]
        parts[0] = {**merged, "labels": tokens.where(tokens < VOCAB - 16, -100)}
    return parts


def grads_of(
    model: Any, micro_batches: list[dict[str, Tensor]], way: str, *, is_wide: bool
) -> dict[str, Tensor]:
    model.zero_grad()
    with Wide() if is_wide else nullcontext():
        if way == "both":
            (2 * model(**micro_batches[0]).loss + model(**micro_batches[1]).loss).backward()
        elif way == "crossed":
            losses = [model(**batch).loss for batch in micro_batches]
            (2 * losses[0]).backward()
            losses[1].backward()
        else:
            for share, batch in zip((2, 1), micro_batches, strict=True):
                (share * model(**batch).loss).backward()
    return {n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}


def _matches(rank: int, name: str, way: str, checkpoints: str) -> None:
    del rank
    model, kwargs = trainable(name), CHECKPOINTS[checkpoints]
    model.config.get_text_config().use_cache = False
    if kwargs is not None:
        model.float().gradient_checkpointing_enable(kwargs)
    is_wide = kwargs is None  # recomputed layers run outside of ``Wide``, in float32
    limit = 1e-7 if is_wide else 1e-4
    micro_batches = batches(model, MODELS[name][1])
    expected = grads_of(model, micro_batches, way, is_wide=is_wide)
    cp = ContextParallel()
    handle = hf.parallelize(model, cp)
    grads_of(model, micro_batches, way, is_wide=is_wide)
    cp.reduce_gradients(model)
    handle.remove()
    for weight, x in model.named_parameters():
        own = torch.zeros_like(x) if x.grad is None else x.grad
        want = expected.get(weight, torch.zeros_like(x))
        atol = limit * float(want.abs().max()) + limit**2
        torch.testing.assert_close(own, want, rtol=limit, atol=atol)


@pytest.mark.refused_in("5.14", "T5ForConditionalGeneration", "Qwen3_5", "Bloom")
@pytest.mark.nightly(unless=[
    "GPTJForCausalLM-crossed-not-reentrant", "BartForCausalLM-both-reentrant",
    "Llama4ForCausalLM-both-not-reentrant", "Lfm2ForCausalLM-both-not-reentrant",
    "Qwen3NextForCausalLM-crossed-reentrant", "RecurrentGemmaForCausalLM-both-reentrant",
    "T5ForConditionalGeneration-both-not-reentrant",
    "M2M100ForConditionalGeneration-accumulated-plain",
    "Qwen3_5ForConditionalGeneration-both-not-reentrant",
])  # fmt: skip
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("way", ["both", "crossed", "accumulated"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_whole_models(
    pool: LocalRanks, name: str, way: str, checkpoints: str
) -> None:
    pool.run(_matches, name, way, checkpoints)


def _of_two_tokens(rank: int) -> None:
    """Check two tokens on two ranks: recurrent layers get no mask of one token, as in decoding."""
    del rank
    model = trainable("Lfm2ForCausalLM")
    tokens = torch.tensor([[5, 9]])
    micro_batches = [{"input_ids": tokens, "labels": tokens}] * 2
    expected = grads_of(model, micro_batches, "both", is_wide=True)
    cp = ContextParallel(layout="contiguous")
    hf.parallelize(model, cp)
    grads_of(model, micro_batches, "both", is_wide=True)
    cp.reduce_gradients(model)
    for weight, x in model.named_parameters():
        torch.testing.assert_close(x.grad, expected[weight], rtol=1e-7, atol=1e-9)


def test_of_one_token_on_a_rank(pool: LocalRanks) -> None:
    pool.run(_of_two_tokens)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("Lfm2ForCausalLM", "model.layers.0.conv"),
        ("BartForCausalLM", "model.decoder.embed_positions"),
    ],
)
def test_a_part_that_is_not_told_its_batch_is_refused(name: str, part: str) -> None:
    model = trainable(name)
    handle = hf.parallelize(model, ContextParallel())
    batch = text(1, 12, 1, slice(0))
    model(**batch).loss.backward()
    module, hidden = model.get_submodule(part), torch.zeros(1, 12, 32).double()
    with pytest.raises(UnsupportedError, match="without the mask of a split batch"):
        module(hidden)
    handle.remove()
    module(hidden)
