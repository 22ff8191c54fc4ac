"""Code of other libraries in a model that reads a length, and heads outside of a split model.

The class: code that no hook of ours surrounds, and that takes what it sees for the whole sequence.
Trainers put NEFTune's hook on embeddings after the model was parallelized, PEFT looks for tokens in
its own forward, and a head over a base model reads its hidden states.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hf_models import BYTES, LENGTH, Wide, build
from sweep.compare import build as build_pair
from torch import Tensor, nn
from trained import trained
from transformers.integrations.neftune import neftune_post_forward_hook

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.local import LocalRanks

NOISE = {"neftune_noise_alpha": 5.0, "max_steps": 3}


@pytest.mark.nightly(only=["gather", "accumulated", "two rings"])
@pytest.mark.parametrize(
    ("name", "options", "dp_size"),
    [
        ("Llama", {}, 1),
        ("LoRA", {}, 1),
        ("Llama", {"logits": "gather"}, 1),
        ("Qwen3", {"gradient_accumulation_steps": 3}, 1),
        ("Llama", {}, 2),
    ],
    ids=["Trainer", "LoRA", "gather", "accumulated", "two rings"],
)
def test_neftune_draws_the_noise_of_one_device(
    pools: dict[int, LocalRanks], name: str, options: dict[str, Any], dp_size: int
) -> None:
    """Its strength is that of the whole odd length, and its numbers are those of one device."""
    settings = (name, "float64", {"rows": 16})
    expected, without = (
        pools[dp_size].run(trained, dp_size, None, *settings, noise | options)[0]
        for noise in (NOISE, {"max_steps": 3})
    )
    assert abs(expected[0][0] - without[0][0]) > 1e-3
    for steps in pools[2 * dp_size].run(trained, 2 * dp_size, 2, *settings, NOISE | options):
        torch.testing.assert_close(steps, expected, rtol=1e-9, atol=0)


def _noise_by_hand(_: int) -> None:
    cp, model = ContextParallel(), build("Llama").train()
    tokens = torch.arange(2 * LENGTH).view(2, -1) % BYTES
    embeddings = model.get_input_embeddings()
    embeddings.neftune_noise_alpha = 5.0
    handle = embeddings.register_forward_hook(neftune_post_forward_hook)

    def loss(model: nn.Module) -> Tensor:
        torch.manual_seed(3)
        with Wide():
            out: Tensor = model(input_ids=tokens, labels=tokens).loss
        return out

    expected = loss(model)
    parallel = hf.parallelize(model, cp)
    torch.testing.assert_close(loss(model), expected)
    torch.testing.assert_close(loss(copy.deepcopy(model)), expected)
    parallel.remove()
    torch.testing.assert_close(loss(model), expected)
    parallel = hf.parallelize(model, ContextParallel(layout="striped"))
    torch.testing.assert_close(loss(model), expected)
    parallel.remove()
    with pytest.raises(UnsupportedError, match="neftune_noise_alpha"):
        hf.shard_batch(cp, {"input_ids": tokens}, model=model)
    hf.shard_batch(cp, {"input_ids": tokens}, model=model.eval())
    handle.remove()
    hf.shard_batch(cp, {"input_ids": tokens}, model=model.train())
    pair = build_pair("BartForConditionalGeneration", "bart").train()
    hf.parallelize(pair, cp)
    pair.get_input_embeddings().neftune_noise_alpha = 5.0
    pair.get_input_embeddings().register_forward_hook(neftune_post_forward_hook)
    with pytest.raises(UnsupportedError, match="two sequences"):
        pair(input_ids=tokens, labels=tokens)


def test_neftune_set_by_hand_is_exact_or_refused(pools: dict[int, LocalRanks]) -> None:
    pools[2].run(_noise_by_hand)


def _activated(_: int, layout: Any, checkpointed: bool) -> None:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "down_proj"]
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=targets, init_lora_weights=False,
        alora_invocation_tokens=[1, 2],
    )  # fmt: skip
    torch.manual_seed(0)
    model = get_peft_model(build("Llama").float(), config).train()
    wide = nullcontext() if checkpointed else Wide()  # a recomputation would not see it
    if checkpointed:
        model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.double()
    report, cp = hf.check_model(model), ContextParallel(layout=layout)
    assert report.exact and report.hooks == ("activated LoRA",)
    # Invocations that end a row, lie across a border, come twice, are only begun, and are missing.
    tokens = torch.arange(5 * LENGTH).view(5, -1) % (BYTES - 3) + 3
    for row, starts in enumerate(([LENGTH - 2], [21], [4, 30], [])):
        for start in starts:
            tokens[row, start : start + 2] = torch.tensor([1, 2])
    tokens[3, 9] = tokens[4, LENGTH - 1] = 1
    batches: tuple[dict[str, Any], ...] = (
        {"input_ids": tokens},
        {"input_ids": tokens, "alora_offsets": [1, 0, None, LENGTH, 9]},
    )

    def run(batch: dict[str, Any]) -> list[Tensor]:
        model.zero_grad()
        with wide:
            out = model(**batch, labels=tokens)
        out.loss.backward()
        if handles:
            cp.reduce_gradients(model)
        return [out.loss.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]

    handles: list[Any] = []
    expected = [run(batch) for batch in batches]
    assert abs(expected[0][0] - expected[1][0]) > 1e-4
    with pytest.raises(UnsupportedError, match="needs hooks"):
        hf.shard_batch(cp, batches[0], model=model)
    handles.append(hf.parallelize(model, cp))
    for number, batch in enumerate(batches):
        limits: Any = (
            {"rtol": 1e-4, "atol": 1e-6} if checkpointed else {"rtol": 1e-9, "atol": 1e-12}
        )
        torch.testing.assert_close(run(batch), expected[number], **limits)
    with pytest.raises(UnsupportedError, match="one a row"):
        model(input_ids=tokens, alora_offsets=[3])


@pytest.mark.nightly(unless=["zigzag-True"])
@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_activated_lora(pools: dict[int, LocalRanks], layout: str, checkpointed: bool) -> None:
    """Adapters that begin where tokens invoke them find these in the whole sequence."""
    pools[2].run(_activated, layout, checkpointed)


def _adapted_classifier(_: int) -> None:
    import peft

    for config, reduction, message in (
        (
            peft.AdaLoraConfig(total_step=9, target_modules=["q_proj"]),
            "sum",
            "AdaLoRA of a classif",
        ),
        (
            peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[1]),
            "mean",
            "activated",
        ),
        (peft.LilyConfig(target_modules=["q_proj"]), "mean", "mean over the tokens"),
    ):
        model = build("Llama", head="ForSequenceClassification", num_labels=2).float()
        adapted: Any = peft.get_peft_model(model, config)
        with pytest.raises(UnsupportedError, match=message):
            hf.parallelize(adapted, ContextParallel(), reduction=reduction)  # type: ignore[arg-type]
        assert not adapted.base_model._forward_hooks


def test_adapters_of_a_classifier_are_refused_by_name(pools: dict[int, LocalRanks]) -> None:
    """Its base model is split, within the adapters that see the whole batch."""
    pools[2].run(_adapted_classifier)


class Critic(nn.Module):
    """A head that gives each token a value, over a base model."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.head = base, nn.Linear(32, 1).double()

    def forward(self, **batch: Any) -> Tensor:
        values: Tensor = self.head(self.base(**batch).last_hidden_state)[..., 0]
        return values


def _valued(_: int, name: str, head: str, changes: dict[str, Any], reduction: Any) -> None:
    torch.manual_seed(2)
    whole = Critic(build(name, head=head, **changes))
    split, cp = copy.deepcopy(whole), ContextParallel()
    hf.parallelize(split.base, cp, logits="gather", reduction=reduction)
    tokens = torch.arange(2 * LENGTH).view(2, -1) % BYTES
    mask = torch.ones_like(tokens)
    mask[0, 30:] = 0
    wanted = torch.randn(2, LENGTH).double()
    for model in (whole, split):
        with Wide():
            values = model(input_ids=tokens, attention_mask=mask)
        ((values - wanted).square() * mask).sum().backward()
    if reduction == "sum":
        with pytest.raises(ValueError, match=r"head\.weight, head\.bias got hidden states"):
            cp.reduce_gradients(split)
        cp.reduce_gradients(split.base)
    for (n, x), y in zip(split.named_parameters(), whole.parameters(), strict=True):
        if y.grad is not None:
            gradient: Any = x.grad
            if reduction == "mean":
                torch.distributed.all_reduce(gradient)
                gradient = gradient / cp.cp_size
            torch.testing.assert_close(gradient, y.grad, rtol=1e-8, atol=1e-10, msg=n)


BASES = {
    "Llama": ("Model", {}),
    "Gemma3": ("TextModel", {}),
    "Roberta": ("Model", {"add_pooling_layer": False}),
}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_a_value_head_over_a_base_model(
    pools: dict[int, LocalRanks], name: str, reduction: str
) -> None:
    """Joined outputs are all that a head may read, not those named logits alone."""
    pools[2].run(_valued, name, *BASES[name], reduction)
