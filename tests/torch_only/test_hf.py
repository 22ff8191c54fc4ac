"""Models of transformers on a ring: loss, logits and gradients equal those of the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
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
    result,
    rows,
    summed,
)
from torch import Tensor, nn
from transformers.integrations.neftune import neftune_post_forward_hook

from ring_core import (
    ChunkLayout,
    KernelConfig,
    RankMismatchError,
    StrategyConfig,
    UnsupportedError,
)  # fmt: skip
from ring_torch import ContextParallel, hf
from ring_torch.call import Strategy
from ring_torch.hf.register import _layer_seed
from ring_torch.local import LocalRankError, LocalRanks
from ring_torch.strategies.hybrid import Hybrid
from ring_torch.strategies.ulysses import Ulysses

ANY = nn.Identity()  # for batches of no particular model
MEAN: dict[str, Any] = {"reduction": "mean"}
GATHER: dict[str, Any] = {"logits": "gather"}
SPLIT: dict[str, Any] = {"recurrent": "split"}


def by_hand() -> Iterator[Any]:
    """Yield models whose own attention function is the ring, given batches that are sharded."""
    every = tuple((*ring, 4) for ring in RINGS.values())
    few: tuple[Ring, ...] = (*every, (*RINGS["zigzag"], 2), (*RINGS["balanced"], 2))
    in_groups = StrategyConfig("hybrid", ulysses_size=2)
    many = tuple(
        (layout, strategy, size)
        for size in (4, 2)
        for layout, strategy in (
            *RINGS.values(), (RANDOM[size], "ring"), ("striped", "ulysses"), ("zigzag", in_groups),
        )
    )  # fmt: skip
    kinds = "plain, right, left, packed, flattened"
    given: dict[str, Any] = {"by": "shard_batch", "ranks": 4}
    yield from rows("Llama", kinds, rings=many, daily=["Llama-packed"], **given)
    yield from rows(
        "Qwen3 Mistral Gemma2 Gemma3 GptOss", kinds, rings=few, **given,
        daily=["Qwen3-left", "Mistral-flattened", "Gemma2-packed", "Gemma3-left", "GptOss-right"],
    )  # fmt: skip
    yield from rows("ModernBertForMaskedLM", "plain, left, right", **given)  # bidirectional
    given = {"by": "shard_batch", "rings": on(0, "zigzag", "contiguous")}
    # Losses whose labels are not shifted.
    yield from rows(
        "BertForMaskedLM RobertaForMaskedLM XLMRobertaForMaskedLM DistilBertForMaskedLM"
        " ModernBertForMaskedLM BertForTokenClassification LlamaForTokenClassification",
        "tagged plain, tagged first, tagged padded", **given,
    )  # fmt: skip
    # Positions begin where the model begins.
    yield from rows(
        "RobertaForMaskedLM CamembertForMaskedLM XLMRobertaForMaskedLM Data2VecTextForMaskedLM"
        " XLMRobertaXLForMaskedLM XmodForMaskedLM RobertaPreLayerNormForMaskedLM BertForMaskedLM"
        " OPTForCausalLM BioGptForCausalLM",
        "sides", by="shard_batch",
    )  # fmt: skip


def hooked() -> Iterator[Any]:
    """Yield a model for each kind of hook, of ``hf.parallelize``."""
    # Own attention code, in GPT-Neo with windows and masks, in Bloom with ALiBi; positions computed
    # from the length; chunks; recurrent layers. Two tell documents by their positions whole, too.
    names = (
        "FalconForCausalLM GPTNeoForCausalLM BloomForCausalLM XGLMForCausalLM BartForCausalLM"
        " Llama4ForCausalLM Qwen3NextForCausalLM"
    )
    both: dict[str, Any] = {"forms": ("", "checkpointed"), "options": MEAN}
    yield from rows(
        names, "plain, left", refused=("XGLM", "Bloom"), **both,
        daily=[
            "FalconForCausalLM-plain", "XGLMForCausalLM-left-checkpointed", "BartForCausalLM-left",
            "Llama4ForCausalLM-plain-checkpointed", "Qwen3NextForCausalLM-plain",
        ],
    )  # fmt: skip
    yield from rows(
        names, "right", refused=("XGLM", "Bloom"), rings=on(0, "striped"), **both,
        daily=["BartForCausalLM-right-checkpointed", "Llama4ForCausalLM-right"],
    )  # fmt: skip
    yield from rows("GPTNeoForCausalLM Llama4ForCausalLM", "packed", daily=[], **both)
    yield from rows(
        "BartForConditionalGeneration T5ForConditionalGeneration M2M100ForConditionalGeneration",
        "pair plain, pair padded", refused=["T5"], **both,
        daily=[
            "BartForConditionalGeneration-pair plain",
            "M2M100ForConditionalGeneration-pair padded-checkpointed",
        ],
    )  # fmt: skip
    # Three-dimensional positions, in Qwen3-VL with deepstack; and images as tokens like others.
    yield from rows(
        "Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration",
        "images plain, images left, images packed", refused=["Qwen3VL"], options=MEAN,
        daily=[
            "Qwen2_5_VLForConditionalGeneration-images plain",
            "Qwen3VLForConditionalGeneration-images left",
            "Qwen2_5_VLForConditionalGeneration-images packed",
        ],
    )  # fmt: skip
    yield from rows(
        "LlavaForConditionalGeneration", "images plain, images left", options=MEAN,
        daily=["LlavaForConditionalGeneration-images plain"],
    )  # fmt: skip
    # Recomputed layers get the batch of the forward that made them. By their hooks: none; own
    # attention code; ALiBi slopes; positions; within an encoder; chunks; convolutions; recurrent
    # layers, beside attention, and given the mask; position biases; positions of pairs, counted
    # without padding; images.
    yield from rows(
        "LlamaForCausalLM GPTJForCausalLM BloomForCausalLM BartForCausalLM RoFormerForMaskedLM"
        " Llama4ForCausalLM Lfm2ForCausalLM Qwen3NextForCausalLM FalconH1ForCausalLM"
        " RecurrentGemmaForCausalLM T5ForConditionalGeneration BartForConditionalGeneration"
        " M2M100ForConditionalGeneration Qwen2_5_VLForConditionalGeneration"
        " Qwen3_5ForConditionalGeneration",
        "both, crossed, accumulated", forms=("", "reentrant", "checkpointed"), trains=True,
        refused=("T5ForConditionalGeneration", "Qwen3_5", "Bloom"),
        daily=[
            "GPTJForCausalLM-crossed-checkpointed", "BartForCausalLM-both-reentrant",
            "Llama4ForCausalLM-both-checkpointed", "Lfm2ForCausalLM-both-checkpointed",
            "Qwen3NextForCausalLM-crossed-reentrant", "RecurrentGemmaForCausalLM-both-reentrant",
            "T5ForConditionalGeneration-both-checkpointed", "M2M100ForConditionalGeneration-accumulated",
            "Qwen3_5ForConditionalGeneration-both-checkpointed",
        ],
    )  # fmt: skip
    # Batches of every kind: local logits and sums, gathered ones and means. Losses of routers.
    for suffix, options in (("local", {}), ("gathered", GATHER | MEAN)):
        yield from rows(
            "Llama Gemma3", "plain, right, packed, flattened", options=options, suffix=suffix,
            rings=on(0, "zigzag", "striped"),
            daily=[f"{x}-{suffix}" for x in ("Llama-packed", "Gemma3-flattened")],
        )  # fmt: skip
    yield from rows("Llama", "packed", forms=("ddp", "fsdp"), options=MEAN)
    routers = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    yield from rows("Mixtral GptOss", "right", changes=routers, unlike={}, suffix="routers")
    yield from rows("Llama", "by position_ids, by seq_idx, by cu_seq_lens, by attention_mask")
    compiled: dict[str, Any] = {"batches": "right", "forms": ["compiled"], "options": MEAN}
    yield from rows("LlamaForCausalLM GPTJForCausalLM", **compiled, daily=[])
    yield from rows("Qwen3NextForCausalLM", **compiled)


def in_the_row() -> Iterator[Any]:
    """Yield padding anywhere in a row, and what else depends on all of its tokens."""
    # Positions may be counted without padding, in the mask, or ALiBi's, with padding.
    yield from rows(
        "Llama Mistral Llama4 BertForMaskedLM ModernBertForMaskedLM RobertaForMaskedLM"
        " OPTForCausalLM XGLMForCausalLM GPTNeoForCausalLM MptForCausalLM RecurrentGemmaForCausalLM"
        " Lfm2ForCausalLM Qwen3NextForCausalLM FalconH1ForCausalLM NemotronHForCausalLM"
        " BartForConditionalGeneration T5ForConditionalGeneration M2M100ForConditionalGeneration",
        "equal, unlike", options=GATHER, rings=on(0, "zigzag", "contiguous"),
        daily=[
            "Llama-equal", "Llama4-unlike", "ModernBertForMaskedLM-unlike",
            "RobertaForMaskedLM-unlike", "OPTForCausalLM-unlike",
            "RecurrentGemmaForCausalLM-unlike", "BartForConditionalGeneration-equal",
        ],
    )  # fmt: skip
    # Heads that make logits of labelled tokens alone, embeddings scaled by how many tokens of a row
    # are masked, as ModernBERT and ESM-2 were trained, and losses that ask for the labels' shape.
    batches = "masked plain, masked first, masked padded"
    given: dict[str, Any] = {"options": GATHER, "rings": on(0, "zigzag", "contiguous", "striped")}
    for model, changes in (
        ("ModernBertForMaskedLM", {"sparse_prediction": True}),
        ("EsmForMaskedLM", {"position_embedding_type": "rotary", "token_dropout": True}),
        ("EsmForMaskedLM", {"position_embedding_type": "absolute", "token_dropout": True}),
        ("BloomForTokenClassification", {"num_labels": 40}),
        ("MptForTokenClassification", {"num_labels": 40}),
    ):
        suffix = str(next(iter(changes.values()))) if "Esm" in model else ""
        yield from rows(model, batches, changes=changes, suffix=suffix, **given)
    yield from rows(
        "Llama", "invoked", prepare=activated, forms=("", "checkpointed"), trains=True,
        rings=on(0, "zigzag", "contiguous", "striped"), suffix="LoRA",
        daily=["Llama-invoked-checkpointed-LoRA"],
    )  # fmt: skip


def recurrent() -> Iterator[Any]:
    """Yield models with recurrent layers, those of packed rows compared with each document."""
    given: dict[str, Any] = {
        "options": SPLIT, "trains": True, "suffix": "split", "refused": [""],
        "rings": on(0, "zigzag", "contiguous"),
    }  # fmt: skip
    yield from rows(
        f"{FAMILIES} {SCANS_ALONE}", "plain, right, left", **given,
        daily=[f"Qwen3NextForCausalLM-{x}-split" for x in ("right", "left")],
    )  # fmt: skip
    packed = [f"{x}-by position_ids-split" for x in FAMILIES.split() if "Moe" not in x]
    yield from rows(FAMILIES, "by position_ids", **given, daily=packed)
    yield from rows(SCANS_ALONE, "by seq_idx", **given)
    given = {"refused": [""], "trains": True, "options": SPLIT}
    yield from rows(
        "Qwen3NextForCausalLM", "by cu_seq_lens, by seq_idx, by attention_mask", **given
    )
    yield from rows("BambaForCausalLM", "between padding", **given)
    yield from rows(
        "Qwen3NextForCausalLM KimiLinearForCausalLM NemotronHForCausalLM Lfm2ForCausalLM",
        "by position_ids", forms=("checkpointed", "reentrant"), **given,
        daily=[
            "Qwen3NextForCausalLM-by position_ids-reentrant",
            "NemotronHForCausalLM-by position_ids-checkpointed",
        ],
    )  # fmt: skip
    yield from rows(
        "Qwen3NextForCausalLM",
        "by position_ids",
        forms=("ddp", "fsdp"),
        **given | {"options": SPLIT | MEAN},
    )
    yield from rows("FalconH1ForCausalLM", "left", options=SPLIT)
    # Layers run whole where asked for, or where a layout cannot be scanned; convolutions need not.
    yield from rows("Zamba2ForCausalLM", "right", options={"recurrent": "whole"}, suffix="whole")
    yield from rows("Zamba2ForCausalLM", "right", rings=on(0, "striped"), suffix="striped")
    yield from rows(
        "Lfm2ForCausalLM", "by position_ids", rings=on(0, "striped"), suffix="striped", **given,
    )  # fmt: skip
    # The convolution's activation is a function that the operation does not have.
    gelu = {"hidden_act": "gelu"}
    yield from rows(
        "Qwen3NextForCausalLM", "plain", changes=gelu, unlike={}, options=SPLIT, suffix="gelu"
    )
    # On a rank there may be one token: recurrent layers get no mask then, as in decoding.
    yield from rows("Lfm2ForCausalLM", "two tokens", rings=on(0, "contiguous"), trains=True)
    # Kernels reach across a whole chunk; with biases the output for padding is not zero.
    chunks = ChunkLayout(((0, 3, 5), (1, 2, 4)))
    for kernel in (3, 6):
        yield from rows(
            "Lfm2", "plain, unlike, three tokens", changes={"conv_L_cache": kernel}, trains=True,
            rings=on(0, "zigzag", "contiguous", "striped", chunks), suffix=f"kernel of {kernel}",
        )  # fmt: skip


TABLE = [*by_hand(), *hooked(), *in_the_row(), *recurrent()]


@pytest.mark.parametrize("row", TABLE)
def test_whole_and_split_are_alike(pools: dict[int, LocalRanks], row: Row) -> None:
    try:
        pools[row.ranks].run(compared, row)
    except LocalRankError:
        pools.pop(row.ranks).close()  # ranks may be out of step
        raise


def test_rows_have_ids_of_their_own() -> None:
    assert len({x.id for x in TABLE}) == len(TABLE)


def _checkpointed(_: int, reentrant: bool) -> None:
    batch, cp, grads = whole("packed"), ContextParallel(), []
    for checkpointing in (False, True):
        model = build("Mistral", hf.register(), use_cache=False, attention_dropout=0.3).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(**hf.shard_batch(cp, batch, model=model, dropout_seed=9)).loss.backward()
        grads.append(gradients(model))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-14)


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
    shard = hf.shard_batch(ContextParallel(alone[rank]), batch, model=model)
    with Wide(), torch.no_grad():
        still = model.eval()(**shard).logits
    assert not torch.allclose(still[:, :LENGTH], outs[3, 1])


def _dropout_of_attention(rank: int, name: str, rates: dict[str, Any]) -> None:
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


def _two_rings(rank: int) -> None:
    """Run one model on two rings in turn, and two models with different options side by side."""
    pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = build("Mistral", hf.register())
    other = build("Mistral", hf.register("ring-eager", kernel=KernelConfig("eager", block_q=8)))
    outs = []
    for cp in (ContextParallel(None, "zigzag"), ContextParallel(pairs[rank // 2], "contiguous")):
        shard = hf.shard_batch(cp, whole("packed"), model=model)
        with Wide(), torch.no_grad():
            outs += [cp.unshard(m(**shard).logits)[:, :LENGTH] for m in (model, other)]
    for out in outs[1:]:
        same(out, outs[0], "logits")


def _unlike_batches(rank: int) -> None:
    batch = whole("plain")
    batch["input_ids"][0, 7] = rank == 2
    with pytest.raises(RankMismatchError, match="rank"):
        hf.shard_batch(ContextParallel(), batch, model=ANY)
    with pytest.raises(RankMismatchError, match="same samples"):
        hf.shard_batch(ContextParallel(), whole("plain"), model=ANY, dropout_seed=rank // 2)


def _copied(_: int, name: str) -> None:
    """Change a copy's weights: it computes with its own, also between its original's calls."""
    model, unsplit, cp = build(name), build(name), ContextParallel()
    (case,) = cases_of(model, "pair padded" if model.config.is_encoder_decoder else "right")
    (other,) = cases_of(model, "pair plain" if model.config.is_encoder_decoder else "plain")
    hf.parallelize(model, cp)
    result(model, other.split, other)
    twin, expected = copy.deepcopy(model), [result(unsplit, case.whole, case)]
    for each in (twin, unsplit):
        with torch.no_grad():
            for weight in each.parameters():
                weight.mul_(1.1)
    expected.append(result(unsplit, case.whole, case))
    for each, like in ((twin, expected[1]), (model, expected[0]), (twin, expected[1])):
        check(summed(each, case, cp), like, case, name, cp)


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
    pair = build("BartForConditionalGeneration").train()
    hf.parallelize(pair, cp)
    pair.get_input_embeddings().neftune_noise_alpha = 5.0
    pair.get_input_embeddings().register_forward_hook(neftune_post_forward_hook)
    with pytest.raises(UnsupportedError, match="two sequences"):
        pair(input_ids=tokens, labels=tokens)


class Critic(nn.Module):
    """A head that gives each token a value, over a base model."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.head = base, nn.Linear(32, 1).double()

    def forward(self, **batch: Any) -> Tensor:
        values: Tensor = self.head(self.base(**batch).last_hidden_state)[..., 0]
        return values


def _valued(_: int, name: str, head: str, reduction: Any) -> None:
    """Check a head of hidden states: joined outputs are all that it may read, not logits alone."""
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
        with pytest.raises(ValueError, match=r"head\.weight, head\.bias got hidden states"):
            cp.reduce_gradients(split)
        cp.reduce_gradients(split.base)
    own, expected = gradients(split), gradients(unsplit)
    for gradient in own.values() if reduction == "mean" else ():
        dist.all_reduce(gradient)
        gradient.div_(cp.cp_size)
    torch.testing.assert_close({n: own[n] for n in expected}, expected, rtol=1e-8, atol=1e-10)


def _of_strategies(_: int, name: str) -> None:
    """Check that a strategy computes a model, and that it is asked for once."""
    cp, model, unsplit = ContextParallel(), build(name), build(name)
    (case,) = cases_of(model, "packed")
    expected = result(unsplit, case.whole, case)
    hybrid = StrategyConfig("hybrid", ulysses_size=2, outer="gather")
    ways: tuple[tuple[str, Any, type[Strategy]], ...] = (
        ("ring-ulysses", "ulysses", Ulysses), ("ring-hybrid-2-gather", hybrid, Hybrid),
    )  # fmt: skip
    for attention, strategy, kind in ways:
        handle = hf.parallelize(model, cp, strategy=strategy)
        assert hf.parallelize(model, cp, strategy=strategy) is handle
        assert model.config._attn_implementation == attention
        with pytest.raises(ValueError, match="parallelized already, with"):
            hf.parallelize(model, cp)
        with patch.object(kind, "backward", autospec=True, side_effect=kind.backward) as backward:
            actual = summed(model, case, cp)
        assert backward.call_count == model.config.num_hidden_layers
        check(actual, expected, case, attention, cp)
        handle.remove()
    assert model.config._attn_implementation == "eager"


def jobs() -> Iterator[Any]:
    """Yield what several ranks compute that is no row of the table."""
    old, gptj = (
        [pytest.mark.refused_in("5.14")],
        {"attn_pdrop": 0.3, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    )
    for ranks, job, arguments, ids, marks in (
        (4, _checkpointed, [False], "not reentrant", []), (4, _checkpointed, [True], "reentrant", []),
        (4, _dropout, [], "", []), (4, _two_rings, [], "", []),
        (4, _unlike_batches, [], "", []),
        (4, _of_strategies, ["Llama"], "Llama", [pytest.mark.nightly]),
        (4, _of_strategies, ["Gemma3"], "Gemma3", []),
        (4, _of_strategies, ["GptOss"], "GptOss", [pytest.mark.nightly]),
        (2, _dropout_of_attention, ["Llama", {"attention_dropout": 0.4}], "Llama", []),
        (2, _dropout_of_attention, ["GPTJForCausalLM", gptj], "GPTJ", []),
        (2, _dropout_of_attention, ["T5ForConditionalGeneration", {"dropout_rate": 0.3}], "T5", old),
        (2, _copied, ["T5ForConditionalGeneration"], "T5", old),
        (2, _copied, ["BloomForCausalLM"], "Bloom", old),
        (2, _copied, ["Qwen3NextForCausalLM"], "Qwen3Next", []), (2, _copied, ["JambaForCausalLM"], "Jamba", []),
        (2, _noise_by_hand, [], "", []),
        (2, _valued, ["Llama", "Model", "sum"], "Llama-sum", []),
        (2, _valued, ["Llama", "Model", "mean"], "Llama-mean", []),
        (2, _valued, ["Gemma3", "TextModel", "sum"], "Gemma3-sum", []),
        (2, _valued, ["Gemma3", "TextModel", "mean"], "Gemma3-mean", []),
    ):  # fmt: skip
        name = job.__name__[1:] + (f"-{ids}" if ids else "")
        yield pytest.param(ranks, job, arguments, id=name, marks=marks)


@pytest.mark.parametrize(("ranks", "job", "arguments"), [*jobs()])
def test_on_several_ranks(
    pools: dict[int, LocalRanks], ranks: int, job: Callable[..., None], arguments: list[Any]
) -> None:
    pools[ranks].run(job, *arguments)


def test_layers_drop_different_elements() -> None:
    model = build("Llama")
    shard = hf.shard_batch(ContextParallel(), whole("plain"), model=model, dropout_seed=2**64 - 1)
    mask, layers = shard["attention_mask"], model.model.layers
    seeds = {_layer_seed(layer.self_attn, mask) for layer in layers}
    assert len(seeds) == len(layers) and all(0 <= seed < 2**64 for seed in seeds)


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
    model = build("BertForMaskedLM", hf.register())
    (case,) = cases_of(model, "tagged plain")
    shard = hf.shard_batch(ContextParallel(), case.split[0], model=model)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**shard).loss, model(**shard).loss, rtol=1e-12, atol=0)
