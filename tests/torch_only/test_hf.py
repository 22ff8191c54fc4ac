"""Models of transformers on a ring: logits, loss and gradients equal those of the whole model."""

from __future__ import annotations

from typing import Any

import hf_models
import pytest
import torch
import torch.distributed as dist
import transformers
from cases import RANDOM, RINGS
from hf_models import LENGTH, MODELS, SIZES, WHOLE, Wide, build, on_one_process, run, same, whole

from ring_core import KernelConfig, LayoutSpec, RankMismatchError, StrategyConfig, UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.hf.register import _layer_seed
from ring_torch.local import LocalRanks

RANKS = 4

ANY = torch.nn.Identity()  # for batches of no particular model

IN_GROUPS = StrategyConfig("hybrid", ulysses_size=2)


def _matches(rank: int, name: str, kind: str) -> None:
    batch = whole(kind)
    model = build(name)
    logits, loss = run(model, on_one_process(model, batch))
    expected = hf_models.gradients(model)
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])) == 1

    model = build(name, hf.register())
    pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for group in (None, pairs[rank // 2]):
        chunks = RANDOM[4 if group is None else 2]
        rings: list[tuple[LayoutSpec, str | StrategyConfig]] = [*RINGS.values()]
        if name == "Llama":
            rings += [(chunks, "ring"), ("striped", "ulysses"), ("zigzag", IN_GROUPS)]
        elif group is not None:  # the sweep runs these models on two ranks, too
            rings = [RINGS["zigzag"], RINGS["balanced"]]
        for layout, strategy in rings:
            cp = ContextParallel(group, layout=layout)
            what = f"{name} {kind} {layout} {strategy} on {cp.cp_size}"
            way = "groups" if strategy == IN_GROUPS else strategy
            model.set_attn_implementation(hf.register(f"ring_{way}", strategy=strategy))
            local, part = run(model, hf.shard_batch(cp, batch, model=model))
            cp.reduce_gradients(model)
            dist.all_reduce(part, group=group)
            same(cp.unshard(local.detach())[:, :LENGTH][real], logits[real], f"logits of {what}")
            same(part, loss, f"loss of {what}")
            hf_models.same_gradients(hf_models.gradients(model), expected, what)


@pytest.mark.nightly(unless=[
    "Llama-packed", "Qwen3-left", "Mistral-flattened", "Gemma2-packed", "Gemma3-left",
    "GptOss-right",
])  # fmt: skip
@pytest.mark.parametrize("kind", ["plain", "right", "left", "packed", "flattened"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "Llama4"])
def test_logits_loss_and_gradients_are_the_whole_models(
    pool: LocalRanks, name: str, kind: str
) -> None:
    pool.run(_matches, name, kind)


def _bidirectional(rank: int, kind: str) -> None:
    config = transformers.ModernBertConfig(
        **SIZES
        | {"local_attention": 12, "cls_token_id": 0, "sep_token_id": 0, "num_hidden_layers": 3}
    )
    torch.manual_seed(1)
    model_inputs = whole(kind)
    model_inputs.pop("labels")
    mask = model_inputs.get("attention_mask", torch.ones_like(model_inputs["input_ids"])) == 1
    outs = []
    for implementation in ("eager", hf.register()):
        model = transformers.ModernBertModel._from_config(
            config, attn_implementation=implementation
        )
        torch.nn.init.normal_(
            model.embeddings.tok_embeddings.weight, generator=torch.Generator().manual_seed(2)
        )
        for i, weight in enumerate(model.parameters()):
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=0.2, generator=torch.Generator().manual_seed(i))
        model = model.double().eval()
        cp = ContextParallel()
        batch = (
            model_inputs
            if implementation == "eager"
            else hf.shard_batch(cp, model_inputs, model=model)
        )
        with Wide(), torch.no_grad():
            out = model(**batch).last_hidden_state
        outs.append(out if implementation == "eager" else cp.unshard(out)[:, :LENGTH])
    same(outs[1][mask], outs[0][mask], f"hidden states of rank {rank}")


@pytest.mark.parametrize("kind", ["plain", "left", "right"])
def test_bidirectional_attention(pool: LocalRanks, kind: str) -> None:
    pool.run(_bidirectional, kind)


def _checkpointed(_: int, reentrant: bool) -> None:
    batch, cp, grads = whole("packed"), ContextParallel(), []
    for checkpointing in (False, True):
        model = build("Mistral", hf.register(), use_cache=False, attention_dropout=0.3).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(**hf.shard_batch(cp, batch, model=model, dropout_seed=9)).loss.backward()
        grads.append([x.grad for x in model.parameters()])
    for again, first in zip(*grads, strict=True):
        torch.testing.assert_close(again, first, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(pool: LocalRanks, reentrant: bool) -> None:
    pool.run(_checkpointed, reentrant)


def _dropout(rank: int) -> None:
    batch, outs = whole("packed"), {}
    alone: list[Any] = [dist.new_group([n]) for n in range(4)]
    model = build("Llama", hf.register(), attention_dropout=0.4)
    for seed in (3, 4):
        for group in (None, alone[rank]):
            cp = ContextParallel(group, layout="striped")
            sharded = hf.shard_batch(cp, batch, model=model, dropout_seed=seed)
            with Wide(), torch.no_grad():
                outs[seed, cp.cp_size] = cp.unshard(model.train()(**sharded).logits)[:, :LENGTH]
    same(outs[3, 4], outs[3, 1], "logits with dropout")
    assert not torch.allclose(outs[3, 4], outs[4, 4])
    with pytest.raises(UnsupportedError, match="dropout_seed"):
        model(**hf.shard_batch(ContextParallel(None), batch, model=model))
    with Wide(), torch.no_grad():
        still = model.eval()(
            **hf.shard_batch(ContextParallel(alone[rank]), batch, model=model)
        ).logits
    assert not torch.allclose(still[:, :LENGTH], outs[3, 1])


def test_dropout_is_the_same_on_any_number_of_ranks(pool: LocalRanks) -> None:
    pool.run(_dropout)


def test_layers_drop_different_elements() -> None:
    model = build("Llama")
    shard = hf.shard_batch(ContextParallel(), whole("plain"), model=model, dropout_seed=2**64 - 1)
    mask, layers = shard["attention_mask"], model.model.layers
    seeds = {_layer_seed(layer.self_attn, mask) for layer in layers}
    assert len(seeds) == len(layers) and all(0 <= seed < 2**64 for seed in seeds)


def _float32(_: int) -> tuple[float, float]:
    batch = whole("packed")
    expected = run(build("Llama"), batch | WHOLE)[0]
    cp, ring = ContextParallel(), build("Llama", hf.register()).float()
    with torch.no_grad():
        plain = build("Llama").float()(**batch, **WHOLE).logits
        local = cp.unshard(ring(**hf.shard_batch(cp, batch, model=ring)).logits)[:, :LENGTH]
    return float((local - expected).abs().max()), float((plain - expected).abs().max())


def test_float32_is_as_exact_as_without_a_ring(pool: LocalRanks) -> None:
    for local, plain in pool.run(_float32):
        assert local <= 2 * plain + 1e-6


def _two_rings(rank: int) -> None:
    """Run one model on two rings in turn, and two models with different options side by side."""
    pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    batch = whole("packed")
    model = build("Mistral", hf.register())
    other = build("Mistral", hf.register("ring-eager", kernel=KernelConfig("eager", block_q=8)))
    rings = [ContextParallel(None, "zigzag"), ContextParallel(pairs[rank // 2], "contiguous")]
    shards = [hf.shard_batch(cp, batch, model=model) for cp in rings]
    with Wide(), torch.no_grad():
        outs = [m(**shard).logits for shard in shards for m in (model, other)]
    outs = [
        cp.unshard(x)[:, :LENGTH]
        for cp, x in zip([r for r in rings for _ in "ab"], outs, strict=True)
    ]
    for out in outs[1:]:
        same(out, outs[0], "logits")


def test_the_batch_names_its_ring(pool: LocalRanks) -> None:
    pool.run(_two_rings)


def _unlike_batches(rank: int) -> None:
    batch = whole("plain")
    batch["input_ids"][0, 7] = rank == 2
    with pytest.raises(RankMismatchError, match="rank"):
        hf.shard_batch(ContextParallel(), batch, model=ANY)
    with pytest.raises(RankMismatchError, match="same samples"):
        hf.shard_batch(ContextParallel(), whole("plain"), model=ANY, dropout_seed=rank // 2)


def test_ranks_must_hold_one_batch(pool: LocalRanks) -> None:
    pool.run(_unlike_batches)


def _reduced(rank: int) -> None:
    layers = [torch.nn.Linear(3, 2, bias=False) for _ in range(3)]
    all_ranks, one_rank, no_rank = (layer.weight for layer in layers)
    layers[1].double()
    all_ranks.grad = torch.full((2, 3), float(rank))
    if rank == 3:  # like an expert that other ranks do not use
        one_rank.grad = torch.ones(2, 3, dtype=torch.float64)
    ContextParallel().reduce_gradients(torch.nn.ModuleList(layers))
    same(all_ranks.grad, torch.full((2, 3), 6.0), "sum")
    assert one_rank.grad is not None and no_rank.grad is None
    same(one_rank.grad, torch.ones(2, 3, dtype=torch.float64), "of one rank")
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse"):
        ContextParallel().reduce_gradients(embedding)


def test_gradients_are_summed(pool: LocalRanks) -> None:
    pool.run(_reduced)


def refused(message: str, model: Any, shard: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=message):
        model(**shard)
