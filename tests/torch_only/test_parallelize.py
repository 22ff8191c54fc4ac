"""``hf.parallelize``: a model takes whole batches; loss, logits and gradients are one device's.

Calls that keep logits, generate or evaluate; losses without logits; FSDP1 around a model.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import largest_allocation
from hf_models import LENGTH, WHOLE, Wide, build, gradients, run, same, same_gradients, whole
from hf_rows import reduce, wrapped
from on_ranks import be_started, on_ranks
from refused import refused
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from trained import arguments, collate, documents, model_of
from transformers import Trainer

from ring_core import RankMismatchError, UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.hf.models.hooks import Reduction
from ring_torch.local import LocalRanks


@on_ranks
def test_without_gradients_by_position_and_of_a_copy() -> None:
    batch = whole("right")
    expected, loss = run(build("Llama"), batch | WHOLE)
    model = build("Llama", hf.register())
    hf.parallelize(model, ContextParallel(), logits="gather")
    for context in (torch.no_grad, torch.inference_mode):
        with Wide(), context():
            out = model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"])
            twin = copy.deepcopy(model)(**batch)
        real = batch["attention_mask"] == 1
        same(out.logits[real], expected[real], "logits")
        same(out.loss, loss, "loss")
        assert torch.equal(twin.logits, out.logits)


@on_ranks
def test_mistakes_are_named(rank: int) -> None:
    cp, batch = ContextParallel(), whole("plain")
    model = build("Llama")
    handle = hf.parallelize(model, cp)
    for options in ({"logits": "gather"}, {"reduction": "mean"}):
        refused("parallelized already", hf.parallelize, model, cp, **options)
    refused("another ContextParallel", hf.parallelize, model, ContextParallel())
    refused("whole batch", model, **hf.shard_batch(cp, batch, model=model))
    refused("return_dict", model, **batch, return_dict=False, error=UnsupportedError)
    refused("one twice", model, batch["input_ids"], **batch, error=TypeError)
    refused("same samples", model, batch["input_ids"] * (rank + 1) % 61, error=RankMismatchError)
    same(run(model, batch)[1], run(build("Llama"), batch)[1], "loss after mistakes")
    handle.remove()
    hf.parallelize(model, cp, reduction="mean")
    run(model, batch)
    refused("reduction='mean'", cp.reduce_gradients, model)
    for kind in ("ddp", "fsdp"):  # a wrapper takes the mean
        outer = wrapped(model := build("Llama"), kind)
        hf.parallelize(model, cp)
        refused("reduction='mean'", outer, **batch)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@on_ranks
def test_gradients_that_are_not_reduced_are_found(reduction: Reduction) -> None:
    cp, model, batch = ContextParallel(), build("Llama").train(), whole("plain")
    hf.parallelize(model, cp, reduction=reduction)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(*, forgets: bool = False) -> list[float]:
        losses = []
        for _ in range(3):
            losses.append(float(run(model, batch)[1]))
            if not forgets:
                reduce(model, cp, reduction)
            optimizer.step()
        return losses

    losses = train()
    assert losses[2] < losses[0]
    refused("gradients were not reduced", train, error=RankMismatchError, forgets=True)


def test_what_is_refused() -> None:
    cp = ContextParallel()
    refused("model of transformers", hf.parallelize, torch.nn.Linear(2, 2), cp)
    refused("cp must be", hf.parallelize, build("Llama"), None)
    for option in ("logits", "reduction"):
        refused(option, hf.parallelize, build("Llama"), cp, **{option: "all"})
    for name, message in (
        ("DeepseekV32ForCausalLM", "of type (indexed|deepseek_sparse)_attention"),
        ("RwkvForCausalLM", "RwkvForCausalLM"),
    ):
        refused(message, hf.parallelize, build(name), cp, error=UnsupportedError)
    model, tokens = build("Llama"), whole("plain")["input_ids"]
    handle = hf.parallelize(model, cp)
    refused(r"generate\(\) is served .* remove\(\)", model.generate, tokens, max_new_tokens=3)
    refused(r"use_cache=True: .* remove\(\) of the handle", model, tokens, use_cache=True)
    handle.remove()
    assert "generate" not in vars(model)


@pytest.mark.parametrize("name", ["max_length_q", "max_length_k"])
def test_lengths_that_contradict_documents_are_refused(name: str) -> None:
    cp, model = ContextParallel(), torch.nn.Linear(1, 1)
    tokens = {"input_ids": whole("flattened")["input_ids"]}
    offsets = torch.tensor([0, 5, 6, 23, LENGTH], dtype=torch.int32)
    stated = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), offsets)
    message = f"{name} is 19, and a document of cu_seq_lens_q is longer"
    refused(message, hf.shard_batch, cp, tokens | stated | {name: 19}, model=model)
    refused(f"{name} says nothing without", hf.shard_batch, cp, tokens | {name: 20}, model=model)


@pytest.mark.parametrize(
    ("side", "reduction"), [("right", "sum"), ("left", "mean"), ("plain", "mean")]
)
@on_ranks
def test_sequences_are_classified(side: str, reduction: Reduction) -> None:
    batch = whole(side)
    batch["labels"] = torch.tensor([2, 0])
    if side != "plain":
        batch["input_ids"] = (
            batch["input_ids"].clamp(min=1).masked_fill(batch["attention_mask"] == 0, 0)
        )
    for name, labels in (("Llama", 3), ("Mistral", 3), ("Qwen3", 1)):
        options: dict[str, Any] = {"head": "ForSequenceClassification", "num_labels": labels}
        own = batch if labels == 3 else {k: x for k, x in batch.items() if k != "labels"}

        def computed(model: Any, own: Any = own) -> tuple[Tensor, Tensor]:
            with Wide():
                out = model(**own, use_cache=False)
                loss = out.loss if out.loss is not None else out.logits.sigmoid().prod()
                loss.backward()
            return out.logits, loss

        model = build(name, **options)
        expected, grads = computed(model), gradients(model)
        model, cp = build(name, **options), ContextParallel()
        refused("pools", hf.shard_batch, cp, own, model=model, error=UnsupportedError)
        keys = list(model.state_dict())
        handle = hf.parallelize(model, cp, reduction=reduction)
        assert hf.parallelize(model, cp, reduction=reduction) is handle
        assert list(model.state_dict()) == keys
        for x, y, what in zip(computed(model), expected, ("logits", "loss"), strict=True):
            same(x, y, what)
        reduce(model, cp, reduction)
        same_gradients(gradients(model), grads, name)
        handle.remove()
        assert not model.score._forward_hooks and not model.base_model._forward_pre_hooks


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
def test_logits_to_keep_are_those_of_the_whole_sequence(kept: Any) -> None:
    model, cp = build("Llama"), ContextParallel()
    batch = {name: x for name, x in whole("left").items() if name != "labels"}
    expected, grads = _objective(model, batch, kept), gradients(model)
    handle = hf.parallelize(model, cp, logits="gather")
    own = _objective(model, batch, kept)
    cp.reduce_gradients(model)
    handle.remove()
    for local, x in zip(own, expected, strict=True):
        real = batch["attention_mask"][:, -x.shape[1] :] == 1
        shown = real if isinstance(kept, int) else slice(None)
        same(local[shown], x[shown], "logits and log-probabilities")
    same_gradients(gradients(model), grads, "an objective")


@on_ranks
def test_logits_to_keep_of_parts_are_refused() -> None:
    model, tokens = build("Llama"), whole("plain")["input_ids"]
    hf.parallelize(model, ContextParallel())
    assert model(tokens, logits_to_keep=0).logits.shape[1] == 22  # a rank's part of all tokens
    refused("logits_to_keep=5 .* give logits='gather'", model, tokens, logits_to_keep=5)


class LoggedLoss(Trainer):
    """A Trainer that only reads the model's loss."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


@on_ranks
def test_steps_a_second_are_those_of_a_ring(rank: int, tmp_path: Path) -> None:
    be_started(rank, 2)
    rows: Any = documents(7)
    trainer = Trainer(
        build("Llama").float(), arguments(tmp_path, per_device_eval_batch_size=2), collate,
        eval_dataset=rows,
    )  # fmt: skip
    hf.parallelize(trainer, ContextParallel())
    evaluated, logged = trainer.evaluate(), trainer.state.log_history[-1]
    predicted: Any = trainer.predict(rows).metrics
    for prefix, metrics in (("eval", evaluated), ("eval", logged), ("test", predicted)):
        steps, samples, seconds = (
            metrics[f"{prefix}_{x}"] for x in ("steps_per_second", "samples_per_second", "runtime")
        )
        assert steps / samples == pytest.approx(4 / 7, rel=0.02), prefix
        assert samples * seconds == pytest.approx(7, rel=0.02), prefix


QWEN, LLAVA = "Qwen2VLForConditionalGeneration", "LlavaForConditionalGeneration"
#: Models and the attention of all, of their text and of their towers.
ATTENTION: list[tuple[str, Any]] = [
    (QWEN, {"text_config": "eager", "vision_config": "sdpa"}),
    (QWEN, {"text_config": "sdpa", "vision_config": "eager"}),
    (QWEN, {"": "eager", "text_config": "sdpa", "vision_config": "sdpa"}), (QWEN, None), (LLAVA, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "attention"), ATTENTION)
def test_removal_gives_each_part_its_own_attention(name: str, attention: Any) -> None:
    """Also where the model was loaded with the ring, which towers do not take."""
    model, ring = build(name), hf.register()
    configs = model.config, model.config.text_config, model.config.vision_config
    model.set_attn_implementation(attention or ring)
    if attention is None:
        configs[2]._attn_implementation = ring
    before = [x._attn_implementation for x in configs]
    handle = hf.parallelize(model, ContextParallel())
    tower = "sdpa" if attention is None else before[2]
    assert [x._attn_implementation for x in configs][1:] == [ring, tower]
    copied = copy.deepcopy(model.config)
    handle.remove()
    assert [x._attn_implementation for x in configs] == before
    assert copied.text_config._attn_implementation == ring


def _largest(_: int, logits: Any) -> tuple[int, int]:
    """Return the bytes of the largest allocation of a step, and of a rank's logits."""
    classes, length = 1500, 4096
    model = build("Llama", vocab_size=classes, num_hidden_layers=1).float()
    hf.parallelize(model, ContextParallel(), logits=logits)
    tokens = torch.arange(length)[None] % classes

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    return largest_allocation(step), 4 * classes * length // 2


def test_logits_are_never_whole(pool: LocalRanks) -> None:
    for largest, whole_logits in pool.run(_largest, "none"):
        assert largest <= whole_logits / 2  # 1,024 of 2,048 tokens at a time
    for largest, whole_logits in pool.run(_largest, "local"):
        assert largest >= whole_logits


@on_ranks
def test_what_needs_logits_is_refused(rank: int, tmp_path: Path) -> None:
    be_started(rank, 2)
    cp, batch = ContextParallel(), whole("plain")
    model = build("Llama")
    handle = hf.parallelize(model, cp, logits="none")
    refused("makes a loss and nothing else: give labels", model, batch["input_ids"])
    refused("logits_to_keep", model, batch["input_ids"], labels=batch["labels"], logits_to_keep=3)
    handle.remove()
    adapted = model_of("LoRA")
    adapted.base_model.model.lm_head = torch.nn.Sequential(adapted.base_model.model.lm_head)
    for other, message in (
        (adapted, "that of LlamaForCausalLM is Sequential"),
        (build("LlamaForSequenceClassification"), "models of one sequence"),
        (build("T5ForConditionalGeneration"), "models of one sequence"),
    ):
        refused(message, hf.parallelize, other, cp, logits="none", error=UnsupportedError)
        assert not other._forward_pre_hooks

    def built(**options: Any) -> Any:
        metrics = options.pop("compute_metrics", None)
        args = arguments(tmp_path, max_steps=1, **options)
        rows = documents()[:4]
        data = {"train_dataset": rows, "eval_dataset": rows, "compute_metrics": metrics}
        return Trainer(build("Llama").float(), args, collate, **data)

    for option, value in (("compute_metrics", dict), ("label_smoothing_factor", 0.1)):
        other = built(**{option: value})
        refused(f"{option} reads logits", hf.parallelize, other, cp, logits="none")
    trainer = built()
    trainer.compute_loss_func = lambda *_, **__: None
    refused("compute_loss_func reads logits", hf.parallelize, trainer, cp, logits="none")
    logged = LoggedLoss(build("Llama").float(), arguments(tmp_path), collate)
    hf.parallelize(logged, cp).remove()
    trainer = built()
    expected = trainer.evaluate()["eval_loss"]
    hf.parallelize(trainer, cp, logits="none")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    refused("prediction needs logits", trainer.predict, documents()[:2])


def norm_of_gradients(model: Any) -> float:
    run(model, whole("plain") | WHOLE)
    grads = [x.grad.square().sum() for x in model.parameters() if x.grad is not None]
    square = torch.stack(grads).sum()
    if isinstance(model, FullyShardedDataParallel):  # each rank holds other shards
        dist.all_reduce(square)
    return float(square.sqrt())


@pytest.mark.parametrize(
    ("first", "orig", "nested"),
    [("ring", True, True), ("ring", False, False), ("fsdp", True, False), ("fsdp", False, True)],
)
@on_ranks
def test_a_sum_is_refused_and_a_mean_is_the_whole_models(
    first: str, orig: bool, nested: bool
) -> None:
    expected = norm_of_gradients(build("Llama"))
    for reduction in ("sum", "mean"):
        model, ring = build("Llama"), partial(hf.parallelize, reduction=reduction)
        policy = ModuleWrapPolicy({type(model.model.layers[0])}) if nested else None
        if first == "ring":
            ring(model, ContextParallel())
        outer = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=orig, auto_wrap_policy=policy
        )
        if first == "fsdp":
            ring(outer, ContextParallel())
        if reduction == "mean":
            assert norm_of_gradients(outer) == pytest.approx(expected, rel=1e-9)
        else:
            message = "FullyShardedDataParallel takes the mean.*reduction='mean'"
            refused(message, norm_of_gradients, outer)
