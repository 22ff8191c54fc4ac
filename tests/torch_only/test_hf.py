"""Models of transformers on a ring: loss, logits and gradients equal those of the whole model.

Each is a row of a table. What is no row stands below it: dropout and noise, copies, users' heads,
and recurrent layers that are asked for what they do not have.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import RANDOM, RINGS
from hf_models import BYTES, LENGTH, Wide, build, gradients, same, whole
from hf_rows import (
    FAMILIES,
    SCANS_ALONE,
    Ring,
    Row,
    activated,
    cases_of,
    check,
    compared,
    on,
    padded,
    reduce,
    result,
    rows,
    summed,
)
from on_ranks import on_four_ranks, on_ranks
from refused import refused
from sweep.tiny import config_of
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ring_core import ChunkLayout, RankMismatchError, StrategyConfig, UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.hf import mixers
from ring_torch.hf.register import _layer_seed
from ring_torch.local import LocalRankError, LocalRanks

#: Every ring of four ranks, and Ulysses, groups and random layouts; some of two.
EVERY: tuple[Ring, ...] = (
    *((*ring, 4) for ring in RINGS.values()), (RANDOM[4], "ring", 4), ("striped", "ulysses", 4),
    ("zigzag", StrategyConfig("hybrid", ulysses_size=2), 4), (*RINGS["zigzag"], 2),
    (RANDOM[2], "ring", 2), ("striped", "ulysses", 2),
)  # fmt: skip
MEAN, GATHER, SPLIT = {"reduction": "mean"}, {"logits": "gather"}, {"recurrent": "split"}
NONE: dict[str, Any] = {"options": {"logits": "none"}, "suffix": "no logits"}
HYBRID = StrategyConfig("hybrid", ulysses_size=2, outer="gather")
RECOMPUTED: dict[str, Any] = {"forms": ("", "checkpointed"), "options": MEAN}
COMPILED: dict[str, Any] = {"forms": ("compiled",), "options": MEAN}
FEW: tuple[Ring, ...] = (
    *((*RINGS[x], 4) for x in ("striped", "balanced")), (*RINGS["zigzag"], 2),
)  # fmt: skip
TWO, STRIPED = on(0, "zigzag", "contiguous"), on(0, "striped")
BY_HAND: dict[str, Any] = {"by": "shard_batch", "rings": TWO}
FOUR: dict[str, Any] = {"by": "shard_batch", "ranks": 4}
RECURRENT: dict[str, Any] = {"options": SPLIT, "trains": True, "refused": ""}
SCANNED: dict[str, Any] = {**RECURRENT, "suffix": "split"}
ESM: dict[str, Any] = {"token_dropout": True, "position_embedding_type": "rotary"}
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
FULL = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 0]}
CHUNKS = ChunkLayout(((0, 3, 5), (1, 2, 4)))
KERNEL: dict[str, Any] = {"changes": {"conv_L_cache": 6}, "trains": True, "suffix": "kernel of 6"}
KINDS, UNSEEN = "plain, right, left, packed, flattened", "tagged first, tagged padded"
IMAGES = "images plain, images left, images packed"
NEXT = "Qwen3NextForCausalLM"
BART, T5, M2M = (f"{x}ForConditionalGeneration" for x in ("Bart", "T5", "M2M100"))
OWN = "FalconForCausalLM GPTNeoForCausalLM BloomForCausalLM XGLMForCausalLM BartForCausalLM Llama4ForCausalLM Qwen3NextForCausalLM"

Group = tuple[str, str, dict[str, Any]] | tuple[str, str, dict[str, Any], str]
#: Arguments of :func:`hf_rows.rows`: models, batches, fields, and the ids that run for each change.
GROUPS: list[Group] = [
    # Models whose own attention function is the ring, given batches that are sharded. GPT-OSS's own
    # masks do not use positions.
    ("Llama", KINDS, FOUR | {"rings": EVERY}, "Llama-packed"),
    ("Qwen3 Mistral Gemma2 Gemma3", KINDS, FOUR | {"rings": FEW}, "Qwen3-left, Mistral-flattened, Gemma2-packed, Gemma3-left"),
    ("GptOss", "plain, right, left, by position_ids", FOUR | {"rings": FEW}, "GptOss-right"),
    ("ModernBertForMaskedLM", "left, right", {"by": "shard_batch"}),  # bidirectional
    # Losses whose labels are not shifted; and positions that begin where the model begins.
    ("BertForMaskedLM RobertaForMaskedLM ModernBertForMaskedLM LlamaForTokenClassification", f"tagged plain, {UNSEEN}", BY_HAND),
    ("RobertaForMaskedLM BertForMaskedLM OPTForCausalLM BioGptForCausalLM", "first", {"by": "shard_batch"}),
    # For each kind of hook: own attention code, in GPT-Neo with windows and masks, in Bloom with
    # ALiBi; positions computed from the length; chunks; recurrent layers. Two tell documents by
    # their positions whole, too.
    (OWN, "plain, left", RECOMPUTED | {"refused": "XGLM Bloom"}, "FalconForCausalLM-plain, XGLMForCausalLM-left-checkpointed, BartForCausalLM-left, Llama4ForCausalLM-plain-checkpointed, Qwen3NextForCausalLM-plain"),
    (OWN, "right", RECOMPUTED | {"refused": "XGLM Bloom", "rings": STRIPED}, "BartForCausalLM-right-checkpointed, Llama4ForCausalLM-right"),
    ("GPTNeoForCausalLM Llama4ForCausalLM", "packed", RECOMPUTED, ""),
    (f"{BART} {T5} {M2M}", "pair plain, pair padded", RECOMPUTED | {"refused": "T5"}, f"{BART}-pair plain, {M2M}-pair padded-checkpointed"),
    # Three-dimensional positions, in Qwen3-VL with deepstack; and images as tokens like others.
    ("Qwen2_5_VLForConditionalGeneration", IMAGES, {"options": MEAN}, "Qwen2_5_VLForConditionalGeneration-images plain, Qwen2_5_VLForConditionalGeneration-images packed"),
    ("Qwen3VLForConditionalGeneration", IMAGES, {"options": MEAN, "refused": ""}, "Qwen3VLForConditionalGeneration-images left"),
    ("LlavaForConditionalGeneration", "images plain, images left", {"options": MEAN}, "LlavaForConditionalGeneration-images plain"),
    # Recomputed layers get the batch of the forward that made them. By their hooks: none; own
    # attention code; ALiBi slopes; positions; within an encoder; chunks; convolutions; recurrent
    # layers, beside attention, and given the mask; position biases; positions of pairs, counted
    # without padding; images.
    (f"LlamaForCausalLM GPTJForCausalLM BloomForCausalLM BartForCausalLM RoFormerForMaskedLM Llama4ForCausalLM Lfm2ForCausalLM Qwen3NextForCausalLM FalconH1ForCausalLM RecurrentGemmaForCausalLM {T5} {BART} {M2M} Qwen2_5_VLForConditionalGeneration Qwen3_5ForConditionalGeneration",
     "both, crossed, accumulated", {"forms": ("", "reentrant", "checkpointed"), "trains": True, "refused": f"{T5} Qwen3_5 Bloom"},
     f"GPTJForCausalLM-crossed-checkpointed, BartForCausalLM-both-reentrant, Llama4ForCausalLM-both-checkpointed, Lfm2ForCausalLM-both-checkpointed, Qwen3NextForCausalLM-crossed-reentrant, RecurrentGemmaForCausalLM-both-reentrant, {T5}-both-checkpointed, {M2M}-accumulated, Qwen3_5ForConditionalGeneration-both-checkpointed"),
    # Batches of every kind: local logits and sums, gathered ones and means. Wrappers, strategies,
    # losses of routers.
    ("Gemma3", "plain, right, packed, flattened", {"suffix": "local", "rings": on(0, "zigzag", "striped")}, "Gemma3-flattened-local"),
    ("Gemma3", "plain, right, packed, flattened", {"options": GATHER | MEAN, "suffix": "gathered", "rings": on(0, "zigzag", "striped")}, "Gemma3-flattened-gathered"),
    ("Llama Gemma3", "packed", {"options": {"strategy": "ulysses"}, "suffix": "ulysses", "ranks": 4}, "Gemma3-packed-ulysses"),
    ("Llama Gemma3", "packed", {"options": {"strategy": HYBRID}, "suffix": "hybrid", "ranks": 4}, "Gemma3-packed-hybrid"),
    ("Llama4ForCausalLM", "plain", {"changes": FULL, "suffix": "without chunks"}),
    ("GptOss", "right", {"changes": ROUTERS, "unlike": {}, "suffix": "routers"}),
    ("Llama", "by position_ids, by seq_idx, by cu_seq_lens, by attention_mask", {}),
    # Losses without logits: with caps, scales and routers, in wrappers.
    ("Llama", "left", NONE), ("BertForMaskedLM", "tagged plain", NONE),
    ("Gemma2", "right", NONE | {"changes": {"final_logit_softcapping": 1.5}, "unlike": {}}), ("CohereForCausalLM", "plain", NONE | {"changes": {"logit_scale": 0.3}, "unlike": {}}),
    ("GraniteForCausalLM", "plain", NONE | {"changes": {"logits_scaling": 3.0}, "unlike": {}}), ("Mixtral", "plain", NONE | {"changes": ROUTERS, "unlike": {}}),
    ("Gemma2", "packed", NONE | {"forms": ("ddp", "fsdp"), "options": NONE["options"] | MEAN}),
    ("LlamaForCausalLM GPTJForCausalLM", "right", COMPILED, ""), ("Lfm2ForCausalLM", "by position_ids", NONE | COMPILED | {"options": NONE["options"] | MEAN | SPLIT, "refused": ""}),
    # Padding anywhere in a row: positions may be counted without padding, in the mask, or ALiBi's,
    # with padding.
    (f"Llama Mistral Llama4 BertForMaskedLM ModernBertForMaskedLM RobertaForMaskedLM OPTForCausalLM XGLMForCausalLM GPTNeoForCausalLM MptForCausalLM RecurrentGemmaForCausalLM Lfm2ForCausalLM Qwen3NextForCausalLM FalconH1ForCausalLM NemotronHForCausalLM {BART} {T5} {M2M}",
     "equal, unlike", {"options": GATHER},
     f"Llama-equal, Llama4-unlike, ModernBertForMaskedLM-unlike, RobertaForMaskedLM-unlike, OPTForCausalLM-unlike, RecurrentGemmaForCausalLM-unlike, {BART}-equal"),
    # Heads that make logits of labelled tokens alone, embeddings scaled by how many tokens of a row
    # are masked, as ModernBERT and ESM-2 were trained, losses that ask for the labels' shape, and
    # adapters that begin where tokens invoke them.
    ("ModernBertForMaskedLM", UNSEEN, {"options": GATHER, "rings": TWO, "changes": {"sparse_prediction": True}, "suffix": "sparse"}),
    ("EsmForMaskedLM", UNSEEN, {"options": GATHER, "rings": TWO, "changes": ESM, "suffix": "rotary"}),
    ("EsmForMaskedLM", "tagged padded", {"options": GATHER, "rings": TWO, "changes": ESM | {"position_embedding_type": "absolute"}, "suffix": "absolute"}),
    ("BloomForTokenClassification MptForTokenClassification", "tagged padded", {"options": GATHER, "rings": TWO, "changes": {"num_labels": 40}}),
    ("Llama", "invoked", {"prepare": activated, "forms": ("", "checkpointed"), "trains": True, "rings": TWO, "suffix": "LoRA"}, "Llama-invoked-checkpointed-LoRA"),
    # Recurrent layers, those of packed rows compared with each document.
    (f"{FAMILIES} {SCANS_ALONE}", "plain, right, left", SCANNED, "Qwen3NextForCausalLM-right-split, Qwen3NextForCausalLM-left-split"),
    (FAMILIES, "by position_ids", SCANNED, ", ".join(f"{x}-by position_ids-split" for x in FAMILIES.split() if "Moe" not in x)),
    (SCANS_ALONE, "by seq_idx", SCANNED),
    ("Qwen3NextForCausalLM", "by cu_seq_lens, by seq_idx, by attention_mask", RECURRENT), ("BambaForCausalLM", "between padding", RECURRENT),
    ("Qwen3NextForCausalLM KimiLinearForCausalLM NemotronHForCausalLM Lfm2ForCausalLM", "by position_ids", RECURRENT | {"forms": ("checkpointed", "reentrant")},
     "Qwen3NextForCausalLM-by position_ids-reentrant, NemotronHForCausalLM-by position_ids-checkpointed"),
    ("Qwen3NextForCausalLM", "by position_ids", RECURRENT | {"forms": ("ddp", "fsdp"), "options": SPLIT | MEAN}),
    ("FalconH1ForCausalLM", "left", {"options": SPLIT}),
    # They run whole where asked for, or where a layout cannot be scanned; convolutions need not.
    ("Zamba2ForCausalLM", "right", {"options": {"recurrent": "whole"}, "suffix": "whole"}), ("Zamba2ForCausalLM", "right", {"rings": STRIPED, "suffix": "striped"}),
    ("Lfm2ForCausalLM", "by position_ids", RECURRENT | {"rings": STRIPED, "suffix": "striped"}),
    # The convolution's activation is a function that the operation does not have.
    ("Qwen3NextForCausalLM", "plain", {"changes": {"hidden_act": "gelu"}, "unlike": {}, "options": SPLIT, "suffix": "gelu"}),
    # On a rank there may be one token: recurrent layers get no mask then, as in decoding.
    ("Lfm2ForCausalLM", "two tokens", {"rings": on(0, "contiguous"), "trains": True}),
    # Kernels reach across a whole chunk; with biases the output for padding is not zero.
    ("Lfm2", "plain, three tokens", KERNEL | {"rings": (*TWO, *on(0, CHUNKS))}), ("Lfm2", "unlike", KERNEL | {"rings": on(0, CHUNKS)}),
]  # fmt: skip

MIDDLE = 38  # a limit between the two ranks' last positions in zigzag: 42 and 32
LIMIT = 16  # positions of the whole model, beyond which `dynamic` changes its angles

#: Fields that each type needs, and values of its fields that are not those before, of which each
#: has an effect beside the others. The verdict is the same for all: exact, by ``hf.parallelize``.
LONG: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [2.0, 4.0, 8.0, 16.0], "original_max_position_embeddings": MIDDLE}  # fmt: skip
YARN: dict[str, Any] = {"rope_theta": 10.0, "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 1.0, "mscale_all_dim": 0.5}  # fmt: skip
LLAMA3: dict[str, Any] = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
TYPES: dict[str, tuple[dict[str, Any], tuple[dict[str, Any], ...]]] = {
    "default": ({}, ({"rope_theta": 50.0},)),
    "linear": ({"factor": 2.0}, ({"factor": 4.0},)),
    "dynamic": ({"factor": 2.0}, ({"factor": 4.0},)),
    "yarn": (YARN, (
        {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 2.0, "beta_slow": 0.25, "mscale": 2.0, "mscale_all_dim": 0.25, "truncate": False},
        {"attention_factor": 0.5},
    )),
    "longrope": (LONG, (
        {"long_factor": [3.0] * 4, "factor": 8.0}, {"attention_factor": 0.5},
        {"short_factor": [3.0] * 4, "original_max_position_embeddings": LENGTH + 1},
    )),
    "llama3": (LLAMA3, ({"factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0, "original_max_position_embeddings": 32},)),
    "proportional": ({"partial_rotary_factor": 0.5}, ({"partial_rotary_factor": 1.0, "factor": 2.0},)),
}  # fmt: skip

#: Models whose rotary embeddings return angles of other shapes, or look at positions themselves:
#: the type of the config within theirs, its parameters, and a batch.
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **LONG}
MODELS: dict[str, tuple[str, Any, str]] = {
    "Phi3ForCausalLM": ("phi3", _LONGROPE, "row and packed"),
    "PhimoeForCausalLM": ("phimoe", {**_LONGROPE, "short_mscale": 1.2, "long_mscale": 1.7}, "row and packed"),
    "Gemma3ForCausalLM": ("gemma3_text", {"full_attention": _LONGROPE, "sliding_attention": _DYNAMIC}, "row"),
    "Gemma4ForConditionalGeneration": ("gemma4_text", {"full_attention": _DYNAMIC, "sliding_attention": _DEFAULT}, "row"),
    "ModernBertForMaskedLM": ("modernbert", {"full_attention": _DYNAMIC, "sliding_attention": _LONGROPE}, "row"),
    "Llama4ForCausalLM": ("llama4_text", _DYNAMIC, "row"),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_text", {**_DYNAMIC, "mrope_section": [2, 1, 1]}, "row and images"),
    "T5GemmaForConditionalGeneration": ("t5_gemma_module", _DYNAMIC, "row and pair"),
}  # fmt: skip


def changes(kind: str, rope: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return changes of a config of this type with other rotary embeddings."""
    values = {"rope_parameters": rope, "max_position_embeddings": LIMIT}
    if kind != "llama" and "original_max_position_embeddings" in rope:
        values["original_max_position_embeddings"] = MIDDLE
    if kind == "phi3":  # its config checks the number of factors
        values |= {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return {"kind": kind, "values": values | more}


def llama(rope_type: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return changes of a small Llama; those of other types have the same weights."""
    rope = {"rope_theta": 1e4, **parameters, "rope_type": rope_type}
    return changes("llama", rope, head_dim=8)


SCALED = {x: {"changes": llama(x, TYPES[x][0]), "suffix": x} for x in ("dynamic", "longrope")}
#: Rotary embeddings: each type with other fields, and each of the models.
ROTARY: list[Group] = [
    *(("LlamaForCausalLM", "row", {"changes": llama(x, needed | fields), "suffix": f"{x}-{next(iter(fields))}"})
      for x, (needed, others) in TYPES.items() for fields in others),
    *((model, batch, {"changes": changes(kind, rope)}) for model, (kind, rope, batch) in MODELS.items()),
    # Scaling of a longer sequence stays until a short one comes, on all ranks alike.
    *(("LlamaForCausalLM", "lengths", x) for x in SCALED.values()),
    # Below the limit, or with equal last positions, ranks choose alike without hooks, too.
    *(("LlamaForCausalLM", "short rows", {"by": "shard_batch", **x}) for x in SCALED.values()),
]  # fmt: skip


def table() -> Iterator[Any]:
    for models, batches, fields, *daily in GROUPS + ROTARY:
        yield from rows(models, batches, daily=daily[0] if daily else None, **fields)


@pytest.mark.parametrize("row", [*table()])
def test_whole_and_split_are_alike(pools: dict[int, LocalRanks], row: Row) -> None:
    try:
        pools[row.ranks].run(compared, row)
    except LocalRankError:
        pools.pop(row.ranks).close()  # ranks may be out of step
        raise


@on_four_ranks
def test_dropout(rank: int) -> None:
    """It is drawn by a seed, the same of any number of ranks, and other in each layer."""
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
    shard = hf.shard_batch(ContextParallel(alone[rank]), batch, model=model)
    with Wide(), torch.no_grad():
        still = model.eval()(**shard).logits
    assert not torch.allclose(still[:, :LENGTH], outs[3, 1])
    shard = hf.shard_batch(cp, batch, model=model, dropout_seed=2**64 - 1)
    layers = model.model.layers
    seeds = {_layer_seed(layer.self_attn, shard["attention_mask"]) for layer in layers}
    assert len(seeds) == len(layers) and all(0 <= seed < 2**64 for seed in seeds)
    with pytest.raises(RankMismatchError, match="same samples"):
        hf.shard_batch(ContextParallel(), batch, model=model, dropout_seed=rank // 2)
    grads, shard = [], hf.shard_batch(ContextParallel(), batch, model=model, dropout_seed=9)
    for recomputes in ({}, {"use_reentrant": False}, {"use_reentrant": True}):
        model = build("Mistral", hf.register(), use_cache=False, attention_dropout=0.3).train()
        if recomputes:
            model.gradient_checkpointing_enable(recomputes)
        model(**shard).loss.backward()
        grads.append(gradients(model))
        torch.testing.assert_close(grads[-1], grads[0], rtol=1e-12, atol=1e-14)


GPTJ_RATES = {"attn_pdrop": 0.3, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


@pytest.mark.refused_in("5.14", "T5")
@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("Llama", {"attention_dropout": 0.4}), ("GPTJForCausalLM", GPTJ_RATES),
        ("T5ForConditionalGeneration", {"dropout_rate": 0.3}),
    ],
)  # fmt: skip
@on_ranks
def test_dropout_of_attention(rank: int, name: str, rates: dict[str, Any]) -> None:
    model = build(name, **rates)
    for part in model.modules():
        if isinstance(part, nn.Dropout) and "attn_pdrop" not in rates:
            part.p = 0.0
    case = cases_of(model, "pair plain" if model.config.is_encoder_decoder else "plain")[0]
    groups: list[Any] = [dist.new_group([n]) for n in range(2)]
    outputs = []
    for group in (groups[rank], None):
        cp = ContextParallel(group)
        handle = hf.parallelize(model.train(), cp)
        torch.manual_seed(3)
        outputs.append(summed(model, case, cp)[::2])
        handle.remove()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-7, atol=1e-9)
    assert float(outputs[0][0]) != float(result(model.eval(), case.whole, case)[0])


@pytest.mark.refused_in("5.14", "T5", "Bloom")
@pytest.mark.parametrize("name", f"{T5} BloomForCausalLM {NEXT} LlamaForCausalLM".split())
@on_ranks
def test_a_copy_computes_with_its_own_weights(name: str) -> None:
    """Change a copy's weights: it computes with its own, also between its original's calls."""
    model, unsplit, cp = build(name), build(name), ContextParallel()
    is_pair = model.config.is_encoder_decoder
    (case,) = cases_of(model, "pair padded" if is_pair else "right")
    (other,) = cases_of(model, "pair plain" if is_pair else "plain")
    hf.parallelize(model, cp, logits="none" if name == "LlamaForCausalLM" else "local")
    result(model, other.split, other)
    twin, expected = copy.deepcopy(model), [result(unsplit, case.whole, case)]
    for each in (twin, unsplit):
        with torch.no_grad():
            for weight in each.parameters():
                weight.mul_(1.1)
    expected.append(result(unsplit, case.whole, case))
    for each, like in ((twin, expected[1]), (model, expected[0]), (twin, expected[1])):
        check(summed(each, case, cp), like, case, name, cp)


@on_ranks
def test_noise_by_hand() -> None:
    """NEFTune's noise is that of the whole sequence, in a ring, a copy and another layout."""
    cp, model = ContextParallel(), build("Llama").train()
    tokens = torch.arange(2 * LENGTH).view(2, -1) % BYTES

    def noisy(model: Any) -> Any:
        embeddings = model.get_input_embeddings()
        embeddings.neftune_noise_alpha = 5.0
        return embeddings.register_forward_hook(neftune_post_forward_hook)

    def loss(model: nn.Module) -> Tensor:
        torch.manual_seed(3)
        with Wide():
            out: Tensor = model(input_ids=tokens, labels=tokens).loss
        return out

    handle, expected = noisy(model), loss(model)
    for ring in (cp, ContextParallel(layout="striped")):
        parallel = hf.parallelize(model, ring)
        torch.testing.assert_close(loss(model), expected)
        torch.testing.assert_close(loss(copy.deepcopy(model)), expected)
        parallel.remove()
        torch.testing.assert_close(loss(model), expected)
    with pytest.raises(UnsupportedError, match="neftune_noise_alpha"):
        hf.shard_batch(cp, {"input_ids": tokens}, model=model)
    hf.shard_batch(cp, {"input_ids": tokens}, model=model.eval())
    handle.remove()
    hf.shard_batch(cp, {"input_ids": tokens}, model=model.train())
    pair = build("BartForConditionalGeneration").train()
    hf.parallelize(pair, cp)
    noisy(pair)
    refused("two sequences", pair, input_ids=tokens, labels=tokens, error=UnsupportedError)


class Critic(nn.Module):
    """A head that gives each token a value, over a base model."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.head = base, nn.Linear(32, 1).double()

    def forward(self, **batch: Any) -> Tensor:
        values: Tensor = self.head(self.base(**batch).last_hidden_state)[..., 0]
        return values


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(("name", "head"), [("Llama", "Model"), ("Gemma3", "TextModel")])
@on_ranks
def test_heads_of_hidden_states(name: str, head: str, reduction: Any) -> None:
    """Joined outputs are all that a user's head may read, not logits alone."""
    torch.manual_seed(2)
    unsplit = Critic(build(name, head=head))
    split, cp = copy.deepcopy(unsplit), ContextParallel()
    hf.parallelize(split.base, cp, logits="gather", reduction=reduction)
    batch = padded(LENGTH, range(30, LENGTH), rows="first")
    del batch["labels"]
    wanted = torch.randn(2, LENGTH).double()
    for model in (unsplit, split):
        with Wide():
            values = model(**batch)
        ((values - wanted).square() * batch["attention_mask"]).sum().backward()
    if reduction == "sum":
        refused(r"head\.weight, head\.bias got hidden states", cp.reduce_gradients, split)
    reduce(split if reduction == "mean" else split.base, cp, reduction)
    own, expected = gradients(split), gradients(unsplit)
    torch.testing.assert_close({n: own[n] for n in expected}, expected, rtol=1e-8, atol=1e-10)


def test_labels_of_several_batches_count_together() -> None:
    """``num_items_in_batch`` counts all micro-batches, in models that never read it, too."""
    model, cp = build("BertForMaskedLM", hf.register()), ContextParallel()
    (case,) = cases_of(model, "tagged plain")
    count = int((case.split[0]["labels"] != -100).sum())
    with Wide(), torch.no_grad():
        alone, both = (
            model(**hf.shard_batch(cp, case.split[0] | more, model=model)).loss
            for more in ({}, {"num_items_in_batch": 2 * count})
        )
    torch.testing.assert_close(both, alone / 2)


def test_compiled_in_one_graph() -> None:
    model = build("BertForMaskedLM", hf.register(), num_hidden_layers=1)
    (case,) = cases_of(model, "tagged plain")
    shard = hf.shard_batch(ContextParallel(), case.split[0], model=model)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**shard).loss, model(**shard).loss, rtol=1e-12, atol=0)


@pytest.mark.refused_in("5.14")
@on_ranks
def test_short_batches_run_whole() -> None:
    """Run a short batch whole, and a longer one split, whose hidden states have more bytes."""
    model, long = build("Qwen3NextForCausalLM"), whole("plain")
    short = {name: x[:, :8] for name, x in long.items()}
    batches, gather = (short, long, short), mixers.WholeLayer.gather
    with Wide():
        expected = [model(**batch, use_cache=False).loss for batch in batches]
    hf.parallelize(model, ContextParallel())
    layer = model.model.layers[0].linear_attn
    for batch, loss, is_whole in zip(batches, expected, (True, False, True), strict=True):
        spy = patch.object(mixers.WholeLayer, "gather", autospec=True, side_effect=gather)
        with spy as seen, Wide():
            torch.testing.assert_close(model(**batch).loss, loss)
        assert is_whole == any(layer in call.args for call in seen.call_args_list)


@pytest.mark.refused_in("5.14")
@on_ranks
def test_the_choice_draws_no_random_numbers() -> None:
    """With dropout before the scan a first forward draws what later ones do."""
    model, batch = build("Qwen3NextForCausalLM"), whole("plain")
    projection = model.model.layers[0].linear_attn.in_proj_qkvz
    projection.register_forward_hook(lambda _module, _args, x: torch.dropout(x, 0.5, train=True))
    hf.parallelize(model, ContextParallel())
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        with Wide():
            losses.append(model(**batch).loss)
    torch.testing.assert_close(*losses, rtol=0, atol=0)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
@on_ranks
def test_a_batch_is_refused_without_hooks_where_ranks_would_differ(rope_type: str) -> None:
    """It is refused before anything is sent."""
    model = build("LlamaForCausalLM", hf.register(), **llama(rope_type, TYPES[rope_type][0]))
    with pytest.raises(UnsupportedError, match=r"hf\.parallelize, and whole batches"):
        hf.shard_batch(ContextParallel(), padded(LENGTH, count=1), model=model)


def test_every_type_and_field_is_tried() -> None:
    """Each changes the angles or their scale beside the other fields of its row."""
    assert {"default", *ROPE_INIT_FUNCTIONS} == TYPES.keys()
    known = {*RopeParameters.__annotations__} - {"rope_type", "mrope_section"}  # of Qwen2-VL above
    assert known <= {name for _, others in TYPES.values() for fields in others for name in fields}

    def angles(rope_type: str, parameters: dict[str, Any]) -> Any:
        config: Any = config_of("llama", LlamaForCausalLM, **llama(rope_type, parameters))
        return LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(LENGTH)[None])

    for rope_type, (needed, others) in TYPES.items():
        for fields, name in ((x, name) for x in others for name in x):
            without = {n: x for n, x in fields.items() if n != name}
            both = [angles(rope_type, needed | x) for x in (fields, without)]
            assert any(not torch.equal(*x) for x in zip(*both, strict=True)), (rope_type, name)
