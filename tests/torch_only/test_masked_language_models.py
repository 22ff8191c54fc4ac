"""Losses with unshifted labels: the ranks' parts add up to the whole model's loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import Wide
from on_ranks import on_ranks
from sweep.compare import build
from torch import Tensor
from torch.nn.functional import cross_entropy

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf

ROWS, LENGTH = 2, 23
MODELS = (
    ("BertForMaskedLM", "bert"), ("RobertaForMaskedLM", "roberta"),
    ("XLMRobertaForMaskedLM", "xlm-roberta"), ("DistilBertForMaskedLM", "distilbert"),
    ("ModernBertForMaskedLM", "modernbert"), ("BertForTokenClassification", "bert"),
    ("LlamaForTokenClassification", "llama"),
)  # fmt: skip


def batch_of(kind: str, classes: int) -> dict[str, Tensor]:
    """Return tokens and labels; for ``first`` one rank of a contiguous layout has no label."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(4, 40, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(classes, (ROWS, LENGTH), generator=generator)
    hidden = torch.rand(tokens.shape, generator=generator) < 0.7
    batch = {"input_ids": tokens}
    if kind == "first":
        hidden[:, 5:] = True
    if kind == "padded":
        real = torch.arange(LENGTH) < torch.tensor([[14], [LENGTH]])
        hidden, batch["attention_mask"] = hidden | ~real, real.long()
    return batch | {"labels": labels.masked_fill(hidden, -100)}


def _trained(model: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    with Wide():
        loss = model(**batch).loss
    loss.backward()
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return loss.detach(), grads


@pytest.mark.parametrize("kind", ["plain", "first", "padded"])
@pytest.mark.parametrize(("name", "model_type"), MODELS)
@on_ranks
def test_loss_and_gradients_are_the_whole_models(name: str, model_type: str, kind: str) -> None:
    model = build(name, model_type)
    classes = model.config.num_labels if "Token" in name else 40
    batch = batch_of(kind, classes)
    whole, expected = _trained(model, batch)
    expected = {weight: grad.clone() for weight, grad in expected.items()}
    model.set_attn_implementation(hf.register())
    for layout in ("zigzag", "contiguous"):
        cp = ContextParallel(layout=layout)
        loss, _ = _trained(model, hf.shard_batch(cp, batch, model=model))
        cp.reduce_gradients(model)
        dist.all_reduce(loss)
        torch.testing.assert_close(loss, whole, rtol=1e-12, atol=0)
        largest = max(float(x.abs().max()) for x in expected.values())  # 0 for biases of keys
        for weight, x in model.named_parameters():
            if weight in expected:
                scale = max(float(expected[weight].abs().max()), 1e-4 * largest)
                torch.testing.assert_close(x.grad, expected[weight], rtol=1e-9, atol=1e-10 * scale)


#: Heads that make logits of labelled tokens alone, embeddings scaled by how many tokens of a row
#: are masked, as ModernBERT and ESM-2 were trained, and losses that ask for the labels' shape.
OF_THE_ROW: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("BertForMaskedLM", "bert", {}),
    ("ModernBertForMaskedLM", "modernbert", {"sparse_prediction": True}),
    ("EsmForMaskedLM", "esm", {"position_embedding_type": "rotary", "token_dropout": True}),
    ("EsmForMaskedLM", "esm", {"position_embedding_type": "absolute", "token_dropout": True}),
    ("BloomForTokenClassification", "bloom", {"num_labels": 40}),
    ("MptForTokenClassification", "mpt", {"num_labels": 40}),
)


@pytest.mark.parametrize("kind", ["plain", "first", "padded"])
@pytest.mark.parametrize(("name", "model_type", "changes"), OF_THE_ROW)
@on_ranks
def test_what_depends_on_the_whole_row(name: str, model_type: str, changes: Any, kind: str) -> None:
    """Loss, gradients and gathered logits are the whole model's, also if a rank has no label.

    Class: code outside of attention that counts tokens of a row, or leaves some out.
    """
    model, batch = build(name, model_type, **changes), batch_of(kind, 40)
    batch["input_ids"][:, 9:13] = 5  # ESM's mask: more of them on one rank than on the other
    whole, grads = _trained(model, batch)
    expected = {weight: grad.clone() for weight, grad in grads.items()}
    with Wide(), torch.no_grad():
        logits = model(**batch).logits
    largest = max(float(x.abs().max()) for x in expected.values())
    for layout in ("zigzag", "contiguous", "striped"):
        handle = hf.parallelize(model, cp := ContextParallel(layout=layout), logits="gather")
        loss, _ = _trained(model, batch)
        cp.reduce_gradients(model)
        torch.testing.assert_close(loss, whole, rtol=1e-12, atol=0)
        for weight, x in model.named_parameters():
            if weight in expected:
                atol = 1e-10 * largest
                torch.testing.assert_close(x.grad, expected[weight], rtol=1e-9, atol=atol)
        with Wide(), torch.no_grad():
            actual = model(**batch).logits
        real = batch.get("attention_mask") if logits.ndim == 3 else None
        chosen = ... if real is None else real == 1
        torch.testing.assert_close(actual[chosen], logits[chosen], rtol=1e-9, atol=1e-9)
        handle.remove()


def test_labels_of_several_batches_count_together() -> None:
    """``num_items_in_batch`` counts all micro-batches, in models that never read it, too."""
    model = build("BertForMaskedLM", "bert", hf.register())
    batch = batch_of("plain", 40)
    count, cp = int((batch["labels"] != -100).sum()), ContextParallel()
    with Wide(), torch.no_grad():
        alone = model(**hf.shard_batch(cp, batch, model=model)).loss
        both = model(
            **hf.shard_batch(cp, batch | {"num_items_in_batch": 2 * count}, model=model)
        ).loss
    torch.testing.assert_close(both, alone / 2)


def test_compiled_in_one_graph() -> None:
    model = build("BertForMaskedLM", "bert", hf.register())
    shard = hf.shard_batch(ContextParallel(), batch_of("plain", 40), model=model)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**shard).loss, model(**shard).loss, rtol=1e-12, atol=0)


def test_other_losses_are_refused() -> None:
    model = build("BertForMaskedLM", "bert", hf.register())
    batch, cp = batch_of("plain", 40), ContextParallel()
    labels = hf.shard_batch(cp, batch, model=model)["labels"]
    logits = torch.randn(ROWS * LENGTH, 40)
    flat = labels.to("cpu").view(-1)
    assert cross_entropy(logits, flat).isfinite()
    for misuse in (
        lambda: labels[:, 1:],
        lambda: labels == -100,
        lambda: labels != -100,
        lambda: flat != 0,
        lambda: flat == -100,
        lambda: flat[3:],
        lambda: labels.view(2, -1),
        lambda: labels.view(labels.shape[0]),
        lambda: labels.float().sum(),
        lambda: torch.ravel(labels),
        lambda: cross_entropy(logits, flat, weight=torch.ones(40)),
        lambda: cross_entropy(logits, flat, ignore_index=0),
        lambda: cross_entropy(logits, flat, reduction="none"),
    ):
        with pytest.raises(UnsupportedError, match="cross entropy of logits"):
            misuse()
    with pytest.raises(ValueError, match="give labels instead"):
        hf.shard_batch(
            cp, {"input_ids": batch["input_ids"], "shift_labels": batch["labels"]}, model=model
        )
    with pytest.raises(UnsupportedError, match="start_logits and end_logits"):
        hf.shard_batch(
            cp, {"input_ids": batch["input_ids"], "start_positions": torch.ones(2)}, model=model
        )
