"""Calls of a parallelized model, or of its Trainer: to generate, keep logits, evaluate."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import Wide, build, whole
from on_ranks import on_ranks
from torch import Tensor
from torch.nn.functional import cross_entropy
from trained import arguments, be_started, collate, documents
from transformers import Trainer

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.local import LocalRanks


def test_generation_is_refused_until_the_handle_is_removed() -> None:
    model, tokens = build("Llama"), whole("plain")["input_ids"]
    handle = hf.parallelize(model, ContextParallel())
    with pytest.raises(UnsupportedError, match=r"generate\(\) is served .* remove\(\)"):
        model.generate(tokens, max_new_tokens=3)
    with pytest.raises(UnsupportedError, match=r"use_cache=True: .* remove\(\) of the handle"):
        model(tokens, use_cache=True)
    handle.remove()
    assert "generate" not in vars(model)


def _objective(model: Any, batch: dict[str, Tensor], kept: Any) -> tuple[Tensor, Tensor]:
    """Return logits and log-probabilities of the last tokens, as for GRPO; compute gradients."""
    model.zero_grad()
    tokens = batch["input_ids"]
    with Wide():
        logits = model(**batch, logits_to_keep=kept).logits
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, : logits.shape[1], None])[..., 0]
    chosen.square().sum().backward()
    return logits.detach(), chosen.detach()


@pytest.mark.parametrize(
    "kept", [13, 1, torch.tensor([42, 17, 30])], ids=["some", "the last", "by number"]
)
@on_ranks
def test_logits_to_keep_are_those_of_the_whole_sequence(rank: int, kept: Any) -> None:
    del rank
    model = build("Llama")
    batch = {name: x for name, x in whole("left").items() if name != "labels"}
    expected = _objective(model, batch, kept)
    grads = {name: x.grad.clone() for name, x in model.named_parameters()}
    cp = ContextParallel()
    handle = hf.parallelize(model, cp, logits="gather")
    own = _objective(model, batch, kept)
    cp.reduce_gradients(model)
    handle.remove()
    for local, x in zip(own, expected, strict=True):
        real = batch["attention_mask"][:, -x.shape[1] :] == 1
        shown = real if isinstance(kept, int) else slice(None)
        torch.testing.assert_close(local[shown], x[shown], rtol=1e-9, atol=1e-10)
    for name, x in model.named_parameters():
        atol = 1e-9 * float(grads[name].abs().max()) + 1e-12
        torch.testing.assert_close(x.grad, grads[name], rtol=1e-8, atol=atol)


@on_ranks
def test_logits_to_keep_of_parts_are_refused() -> None:
    """Check that logits of a rank's tokens are not those of the last ones."""
    model, tokens = build("Llama"), whole("plain")["input_ids"]
    hf.parallelize(model, ContextParallel())
    assert model(tokens, logits_to_keep=0).logits.shape[1] == 22  # a rank's part of all tokens
    with pytest.raises(UnsupportedError, match=r"logits_to_keep=5 .* give logits='gather'"):
        model(tokens, logits_to_keep=5)


class OwnLoss(Trainer):
    """A Trainer that computes a loss from logits."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        del num_items_in_batch
        outputs = model(input_ids=inputs["input_ids"])
        loss = cross_entropy(outputs.logits.flatten(0, 1), inputs["labels"].flatten())
        return (loss, outputs) if return_outputs else loss


class LoggedLoss(Trainer):
    """A Trainer that only reads the model's loss."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def _own_losses(rank: int, folder: str) -> None:
    be_started(rank, 2)
    model, cp = build("Llama"), ContextParallel()
    args, batch = arguments(folder), collate(documents(2))
    expected = OwnLoss(model, args).compute_loss(model, batch)
    expected.backward()
    grads = [x.grad.clone() for x in model.parameters()]
    model.zero_grad()
    trainer = OwnLoss(model, args, collate, documents(2))
    with pytest.raises(ValueError, match=r"OwnLoss\.compute_loss.* logits='gather'"):
        hf.parallelize(trainer, cp)
    handle = hf.parallelize(trainer, cp, logits="gather")
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for x, grad in zip(model.parameters(), grads, strict=True):
        dist.all_reduce(x.grad)
        atol = 1e-5 * float(grad.abs().max())
        torch.testing.assert_close(x.grad / 2, grad, rtol=1e-5, atol=atol)
    handle.remove()
    hf.parallelize(LoggedLoss(model, args), cp).remove()


def test_an_own_loss_of_logits_needs_whole_ones(pool: LocalRanks, tmp_path: Path) -> None:
    pool.run(_own_losses, str(tmp_path))


def _evaluates(rank: int, folder: str) -> None:
    be_started(rank, 2)
    rows: Any = documents(7)
    trainer = Trainer(
        build("Llama").float(), arguments(folder, per_device_eval_batch_size=2), collate,
        eval_dataset=rows,
    )  # fmt: skip
    hf.parallelize(trainer, ContextParallel())
    by_kind: dict[str, Any] = {"eval": trainer.evaluate(), "test": trainer.predict(rows).metrics}
    by_kind["logged"] = trainer.state.log_history[-1]
    for name, metrics in by_kind.items():
        prefix = "test" if name == "test" else "eval"
        steps, samples, seconds = (
            metrics[f"{prefix}_{x}"] for x in ("steps_per_second", "samples_per_second", "runtime")
        )
        assert steps / samples == pytest.approx(4 / 7, rel=0.02), name
        assert samples * seconds == pytest.approx(7, rel=0.02), name


def test_steps_a_second_are_those_of_a_ring(pool: LocalRanks, tmp_path: Path) -> None:
    pool.run(_evaluates, str(tmp_path))


ATTENTION = [
    {"text_config": "eager", "vision_config": "sdpa"},
    {"text_config": "sdpa", "vision_config": "eager"},
    {"": "eager", "text_config": "sdpa", "vision_config": "sdpa"},
]


def _names(model: Any) -> list[str]:
    configs = model.config, model.config.text_config, model.config.vision_config
    return [x._attn_implementation for x in configs]


@pytest.mark.parametrize("attention", ATTENTION, ids=["text", "vision", "all"])
def test_removal_gives_each_part_its_own_attention(attention: dict[str, str]) -> None:
    model = build("Qwen2VLForConditionalGeneration")
    model.set_attn_implementation(attention)
    before = _names(model)
    handle = hf.parallelize(model, ContextParallel())
    assert _names(model)[1:] == ["ring", before[2]]
    copied = copy.deepcopy(model.config)
    handle.remove()
    assert _names(model) == before
    assert copied.text_config._attn_implementation == "ring"


@pytest.mark.parametrize(
    "name", ["Qwen2VLForConditionalGeneration", "LlavaForConditionalGeneration"]
)
def test_towers_of_a_model_loaded_with_the_ring(name: str) -> None:
    model = build(name)
    model.set_attn_implementation(hf.register())
    model.config.vision_config._attn_implementation = "ring"
    before = _names(model)
    assert before == ["ring"] * 3
    handle = hf.parallelize(model, ContextParallel())
    assert _names(model) == ["ring", "ring", "sdpa"]
    handle.remove()
    assert _names(model) == before
