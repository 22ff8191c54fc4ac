"""``hf.parallelize``: a model takes whole batches; loss, logits and gradients are one device's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import LENGTH, WHOLE, Wide, build, gradients, run, same, same_gradients, whole
from on_ranks import on_ranks
from sweep.compare import build as build_any
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ring_core import RankMismatchError, UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.hf.models.hooks import Reduction
from ring_torch.local import LocalRankError, LocalRanks


def reduced(model: Any, cp: ContextParallel, reduction: Reduction) -> dict[str, Tensor]:
    """Return gradients that are reduced over the ranks by ``reduction``."""
    if reduction == "sum":
        cp.reduce_gradients(model)
    else:
        for weight in model.parameters():
            if weight.grad is not None:
                dist.all_reduce(weight.grad)
                weight.grad /= cp.cp_size
    return gradients(model)


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


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks
def test_in_what_reduces_gradients_itself(kind: str) -> None:
    batch = whole("packed")
    model = build("Llama")
    run(model, batch | WHOLE)
    expected = gradients(model)
    cp = ContextParallel()
    for first in (True, False):  # parallelize before the wrapper, and after it
        model = wrapped = build("Llama")
        if first:
            hf.parallelize(model, cp, reduction="mean")
        if kind == "fsdp":
            mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=mesh)
        else:
            wrapped = DistributedDataParallel(model)
        if not first:
            hf.parallelize(wrapped, cp, reduction="mean")
        run(wrapped, batch)
        for name, grad in gradients(model).items():
            whole_grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
            same(whole_grad, expected[name], f"gradient of {name} in {kind}")
        hooked = hf.parallelize(wrapped, cp, reduction="mean")
        hooked.remove()
        hf.parallelize(model, cp)
        with pytest.raises(ValueError, match="reduction='mean'"):
            wrapped(**batch)


@on_ranks
def test_mistakes_are_named(rank: int) -> None:
    cp, batch = ContextParallel(), whole("plain")
    model = build("Llama")
    handle = hf.parallelize(model, cp)
    for options in ({"logits": "gather"}, {"reduction": "mean"}):
        with pytest.raises(ValueError, match="parallelized already"):
            hf.parallelize(model, cp, **options)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="another ContextParallel"):
        hf.parallelize(model, ContextParallel())
    with pytest.raises(ValueError, match="whole batch"):
        model(**hf.shard_batch(cp, batch, model=model))
    with pytest.raises(UnsupportedError, match="use_cache"):
        model(**batch, use_cache=True)
    with pytest.raises(UnsupportedError, match="return_dict"):
        model(**batch, return_dict=False)
    with pytest.raises(TypeError, match="one twice"):
        model(batch["input_ids"], **batch)
    with pytest.raises(RankMismatchError, match="same samples"):
        model(batch["input_ids"] * (rank + 1) % 61)
    same(run(model, batch)[1], run(build("Llama"), batch)[1], "loss after mistakes")
    handle.remove()
    hf.parallelize(model, cp, reduction="mean")
    run(model, batch)
    with pytest.raises(ValueError, match="reduction='mean'"):
        cp.reduce_gradients(model)


def _drifts(_: int, reduction: Reduction, forgets: bool) -> None:
    """Train three steps with gradients that are reduced, or not."""
    cp, model, batch = ContextParallel(), build("Llama").train(), whole("plain")
    hf.parallelize(model, cp, reduction=reduction)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _step in range(3):
        losses.append(float(run(model, batch)[1]))
        if not forgets:
            reduced(model, cp, reduction)
        optimizer.step()
    assert losses[2] < losses[0]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_gradients_that_are_not_reduced_are_found(pool: LocalRanks, reduction: Reduction) -> None:
    pool.run(_drifts, reduction, False)
    with pytest.raises(LocalRankError, match="gradients were not reduced"):
        pool.run(_drifts, reduction, True)


def test_what_is_refused() -> None:
    cp = ContextParallel()
    with pytest.raises(ValueError, match="model of transformers"):
        hf.parallelize(torch.nn.Linear(2, 2), cp)
    with pytest.raises(ValueError, match="cp must be"):
        hf.parallelize(build("Llama"), None)  # type: ignore[arg-type]  # wrong on purpose
    for option in ("logits", "reduction"):
        with pytest.raises(ValueError, match=option):
            hf.parallelize(build("Llama"), cp, **{option: "all"})  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(UnsupportedError, match=r"of type (indexed|deepseek_sparse)_attention"):
        hf.parallelize(build_any("DeepseekV32ForCausalLM", "deepseek_v32"), cp)
    with pytest.raises(UnsupportedError, match="RwkvForCausalLM"):
        hf.parallelize(build_any("RwkvForCausalLM", "rwkv"), cp)


def stated(kind: str) -> dict[str, Any]:
    """Return documents of 5, 1, 17 and 20 tokens, described as a collator does."""
    batch = whole("flattened")
    positions = batch.pop("position_ids")
    offsets = torch.tensor([0, 5, 6, 23, LENGTH], dtype=torch.int32)
    ids = torch.arange(4).repeat_interleave(offsets.diff())[None]
    more: dict[str, dict[str, Any]] = {
        "ones": {"attention_mask": torch.ones_like(positions), "position_ids": positions},
        "numbers": {"attention_mask": ids + 1},
        "offsets": {
            "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 20,
            "max_length_k": 20, "position_ids": positions,
        },
        "ids": {"seq_idx": ids, "position_ids": positions},
    }  # fmt: skip
    return batch | more[kind]


@pytest.mark.parametrize("name", ["max_length_q", "max_length_k"])
def test_lengths_that_contradict_documents_are_refused(name: str) -> None:
    cp, model = ContextParallel(), torch.nn.Linear(1, 1)
    with pytest.raises(
        ValueError, match=f"{name} is 19, and a document of cu_seq_lens_q is longer"
    ):
        hf.shard_batch(cp, stated("offsets") | {name: 19}, model=model)
    with pytest.raises(ValueError, match=f"{name} says nothing without"):
        hf.shard_batch(cp, stated("numbers") | {name: 20}, model=model)


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
        model_inputs = batch if labels == 3 else {k: x for k, x in batch.items() if k != "labels"}

        def loss_of(out: Any) -> Tensor:
            reward: Tensor = out.loss if out.loss is not None else out.logits.sigmoid().prod()
            return reward

        model = build(name, **options)
        with Wide():
            out = model(**model_inputs, **WHOLE)
            loss_of(out).backward()
        expected = gradients(model)
        model = build(name, **options)
        cp = ContextParallel()
        with pytest.raises(UnsupportedError, match="pools"):
            hf.shard_batch(cp, model_inputs, model=model)
        keys = list(model.state_dict())
        handle = hf.parallelize(model, cp, reduction=reduction)
        assert hf.parallelize(model, cp, reduction=reduction) is handle
        assert list(model.state_dict()) == keys
        with Wide():
            local = model(**model_inputs)
            loss_of(local).backward()
        same(local.logits, out.logits, "pooled logits")
        same(loss_of(local), loss_of(out), "loss")
        same_gradients(reduced(model, cp, reduction), expected, name)
        handle.remove()
        assert not model.score._forward_hooks and not model.base_model._forward_pre_hooks
