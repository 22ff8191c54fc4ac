"""``hf.parallelize(logits="none")``: loss and gradients of one device, without logits."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import WHOLE, Wide, build, gradients, run, same, same_gradients, whole
from on_ranks import on_ranks
from sweep.compare import build as build_any
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile
from trained import arguments, be_started, collate, documents, model_of, trained
from transformers import Trainer

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.local import LocalRanks


def scaled(name: str, model_type: str, **changes: Any) -> Any:
    """Build a model whose logits are of a size at which a cap and a scale show."""
    return build_any(name, model_type, **changes)


#: Models whose heads differ, and their batches.
MODELS: dict[str, tuple[Any, str]] = {
    "plain": (lambda: build("Llama"), "plain"),
    "packed": (lambda: build("Qwen3"), "packed"),
    "padded": (lambda: build("Llama"), "left"),
    "soft cap": (lambda: build("Gemma2", final_logit_softcapping=1.5), "right"),
    "scale": (lambda: scaled("CohereForCausalLM", "cohere", logit_scale=0.3), "plain"),
    "divisor": (lambda: scaled("GraniteForCausalLM", "granite", logits_scaling=3.0), "plain"),
    "routers": (lambda: build("Mixtral", output_router_logits=True), "plain"),
    "masked": (lambda: scaled("BertForMaskedLM", "bert"), "plain"),
}


@pytest.mark.parametrize("name", MODELS)
@on_ranks
def test_loss_and_gradients_are_one_devices(name: str) -> None:
    build_model, kind = MODELS[name]
    model, batch = build_model(), whole(kind)
    cp = ContextParallel()
    for items in (None, 17)[: 1 if name == "masked" else 2]:
        more: dict[str, Any] = {} if items is None else {"num_items_in_batch": items}
        loss = run(model, batch | more | WHOLE)[1]
        expected = gradients(model)
        handle = hf.parallelize(model, cp, logits="none")
        model.zero_grad()
        with Wide():
            out = model(**batch, **more)
        out.loss.backward()
        cp.reduce_gradients(model)
        assert out.logits is None
        same(out.loss.detach(), loss, "loss")
        ours = gradients(model)
        for key in [
            x for x in ours if x.endswith(".key.bias")
        ]:  # its gradient is 0 but for rounding
            assert max(float(x.pop(key).abs().max()) for x in (ours, expected)) < 1e-15
        same_gradients(ours, expected, name)
        if not more:
            with Wide():
                handle.verify(batch)
        handle.remove()
    run(model, batch | WHOLE)  # which makes logits again


@pytest.mark.parametrize("kind", ["ddp", "fully_shard", "compiled"])
@on_ranks
def test_in_wrappers(kind: str) -> None:
    model, batch, cp = build("Gemma2"), whole("packed"), ContextParallel()
    loss = run(model, batch | WHOLE)[1]
    expected = gradients(model)
    model.zero_grad()
    wrapped: Any = model
    if kind == "fully_shard":
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
    hf.parallelize(model, cp, logits="none", reduction="sum" if kind == "compiled" else "mean")
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    if kind == "compiled":
        wrapped = torch.compile(model, backend="eager")
    with Wide():
        out = wrapped(**batch)
    out.loss.backward()
    if kind == "compiled":
        cp.reduce_gradients(model)
    same(out.loss.detach(), loss, "loss")
    for name, x in gradients(model).items():
        same(x.full_tensor() if isinstance(x, DTensor) else x, expected[name], name)


def _largest(_: int, logits: Any) -> tuple[int, int]:
    """Return the bytes of the largest allocation of a step, and of a rank's logits."""
    classes, length = 6000, 4096
    model = build("Llama", vocab_size=classes, num_hidden_layers=1).float()
    hf.parallelize(model, ContextParallel(), logits=logits)
    tokens = torch.arange(length)[None] % classes
    with profile(profile_memory=True, acc_events=True) as profiled:
        model(input_ids=tokens, labels=tokens).loss.backward()
    largest = max(int(event.self_cpu_memory_usage) for event in profiled.events())
    return largest, 4 * classes * length // 2


def test_logits_are_never_whole(pool: LocalRanks) -> None:
    for largest, whole_logits in pool.run(_largest, "none"):
        assert largest <= whole_logits / 2  # 1,024 of 2,048 tokens at a time
    for largest, whole_logits in pool.run(_largest, "local"):
        assert largest >= whole_logits


def _refused(rank: int, folder: str) -> None:
    be_started(rank, 2)
    cp, batch = ContextParallel(), whole("plain")
    model = build("Llama")
    handle = hf.parallelize(model, cp, logits="none")
    with pytest.raises(ValueError, match="makes a loss and nothing else: give labels"):
        model(batch["input_ids"])
    with pytest.raises(UnsupportedError, match="logits_to_keep"):
        model(batch["input_ids"], labels=batch["labels"], logits_to_keep=3)
    handle.remove()
    adapted = model_of("LoRA")
    adapted.base_model.model.lm_head = torch.nn.Sequential(adapted.base_model.model.lm_head)
    for other, message in (
        (adapted, "that of LlamaForCausalLM is Sequential"),
        (build_any("LlamaForSequenceClassification", "llama"), "models of one sequence"),
        (build_any("T5ForConditionalGeneration", "t5"), "models of one sequence"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            hf.parallelize(other, cp, logits="none")
        assert not other._forward_pre_hooks

    def built(**options: Any) -> Any:
        metrics = options.pop("compute_metrics", None)
        args = arguments(folder, max_steps=1, **options)
        rows = documents()[:4]
        data = {"train_dataset": rows, "eval_dataset": rows, "compute_metrics": metrics}
        return Trainer(build("Llama").float(), args, collate, **data)

    for option, value in (("compute_metrics", dict), ("label_smoothing_factor", 0.1)):
        with pytest.raises(ValueError, match=f"{option} reads logits"):
            hf.parallelize(built(**{option: value}), cp, logits="none")
    trainer = built()
    trainer.compute_loss_func = lambda *_, **__: None
    with pytest.raises(ValueError, match="compute_loss_func reads logits"):
        hf.parallelize(trainer, cp, logits="none")
    trainer = built()
    expected = trainer.evaluate()["eval_loss"]
    hf.parallelize(trainer, cp, logits="none")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="prediction needs logits"):
        trainer.predict(documents()[:2])


def test_what_needs_logits_is_refused(pool: LocalRanks, tmp_path: Path) -> None:
    pool.run(_refused, str(tmp_path))


@pytest.mark.parametrize("name", ["Llama", "LoRA"])
def test_a_trainer(pools: dict[int, LocalRanks], name: str) -> None:
    options: dict[str, Any] = {"max_steps": 3, "gradient_accumulation_steps": 2}
    expected = pools[1].run(trained, 1, None, name, "float32", {}, options)[0]
    for steps in pools[2].run(trained, 2, 2, name, "float32", {}, options | {"logits": "none"}):
        for mine, theirs in zip(steps, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)


def test_a_copy_computes_with_its_own_head() -> None:
    model, batch = build("Llama"), whole("plain") | WHOLE
    hf.parallelize(model, ContextParallel(), logits="none")
    other = deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(2.0)
    losses = []
    for each in (model, other):
        with Wide():
            losses.append(each(**batch).loss)
        losses[-1].backward()
        assert each.lm_head.weight.grad is not None
    plain = build("Llama")
    plain.load_state_dict(other.state_dict())
    same(losses[1].detach(), run(plain, batch)[1], "loss of the copy")
    assert not torch.equal(*losses)
