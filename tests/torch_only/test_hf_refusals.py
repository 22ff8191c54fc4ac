"""Models of transformers and their batches: what is split how, and refused before it runs."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import transformers
from hf_models import LENGTH, build, whole
from hf_rows import activated, padded, tagged
from on_ranks import on_ranks
from refused import refused
from sweep.tiny import config_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from transformers import masking_utils
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as REGISTRY

from ring_core import ChunkLayout, UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.hf import batch as batch_by_hand, mixers
from ring_torch.hf.masks import ring_mask
from ring_torch.hf.models.check import report_of
from ring_torch.hf.models.documents import stated_documents

ANY = torch.nn.Identity()  # for batches of no particular model
EVEN = ChunkLayout(((0, 1),))  # it pads odd lengths, on one rank
TOKENS = torch.ones(2, 8, dtype=torch.int64)
PADDED = pad(torch.ones(2, 7, dtype=torch.int64), (0, 1))


def shard(batch: dict[str, Any], model: Any = ANY, layout: Any = "zigzag") -> Any:
    return hf.shard_batch(ContextParallel(layout=layout), batch, model=model)


unsupported = partial(refused, error=UnsupportedError)


def test_inputs_beside_tokens_are_split() -> None:
    batch = whole("right")
    own = {"input_ids": batch["input_ids"], "shift_labels": batch["labels"]}
    assert torch.equal(shard(own, layout=EVEN)["shift_labels"][:, :LENGTH], batch["labels"])
    embeddings = torch.ones(2, LENGTH, 32, requires_grad=True)
    split = shard({"inputs_embeds": embeddings, "token_type_ids": batch["input_ids"]}, layout=EVEN)
    assert split["inputs_embeds"].requires_grad and "labels" not in split
    assert split["token_type_ids"].shape == split["inputs_embeds"].shape[:2] == (2, LENGTH + 1)


def test_documents_cost_nothing_where_they_say_nothing() -> None:
    plain, right, left, packed, flattened = (
        shard(whole(kind), layout=EVEN)["attention_mask"]
        for kind in ("plain", "right", "left", "packed", "flattened")
    )
    assert plain.single and right.single and not left.single
    assert plain.segment_ids is None and plain.cu_seqlens == (0, LENGTH, LENGTH + 1)
    assert flattened.segment_ids is None and flattened.cu_seqlens == (0, 5, 6, 23, 43, 44)
    assert packed.cu_seqlens is None and (packed.segment_ids[:, -1] == -1).all()


def test_a_document_that_is_numbered_goes_on_after_padding() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 2, 0, 0, 2, 3]])
    segments = stated_documents({"attention_mask": mask}, (1, 10))
    assert segments is not None
    assert segments.tolist() == [[-1, 1, 1, -1, 1, 2, -1, -1, 2, 3]]


_ALL: Any = lambda *_: torch.tensor(True)  # noqa: E731 - as models write it
_NEAR: Any = lambda size: lambda _b, _h, q, k: abs(q - k) < size  # noqa: E731
_CAUSAL = masking_utils.causal_mask_function
_BLOCKS = torch.full((2, LENGTH), -1)
_overlay: Any = masking_utils.blockwise_overlay  # without types

_OWN_MASKS: list[tuple[Any, Any]] = [
    (masking_utils.or_masks(_CAUSAL, _ALL), (False, None)),
    (masking_utils.and_masks(_CAUSAL, _ALL), (True, None)),
    (masking_utils.or_masks(masking_utils.sliding_window_causal_mask_function(5), _NEAR(5)),
     (False, (4, 4))),
    (masking_utils.and_masks(_NEAR(7), _CAUSAL), (True, (6, 0))),
    (masking_utils.or_masks(_CAUSAL, _overlay(_BLOCKS)), (True, None)),
    (masking_utils.or_masks(_CAUSAL, _overlay(_BLOCKS + 1)), None),
    (masking_utils.or_masks(_CAUSAL, lambda _b, _h, _q, k: k < 9), None),  # a prefix
    (lambda _b, _h, q, k: q // 8 == k // 8, None),  # chunks
    (lambda _b, _h, q, k: (q - k) % 2 == 0, None),
    (lambda _b, _h, q, k, _hidden=_BLOCKS: k < q, None),  # encloses a tensor
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(_OWN_MASKS)))
def test_masks_of_a_models_own(case: int) -> None:
    """A mask function of positions alone is taken where it is a band, and refused elsewhere."""
    function, pattern = _OWN_MASKS[case]
    of_batch = shard({"input_ids": TOKENS.repeat(1, 6)})["attention_mask"]
    sizes: dict[str, Any] = {"batch_size": 2, "q_length": 48, "kv_length": 48}
    mask_of = partial(ring_mask, **sizes, mask_function=function, attention_mask=of_batch)
    if pattern is None:
        unsupported("other than causal, bidirectional or sliding", mask_of)
        return
    mask: Any = mask_of()
    assert (mask.causal, mask.window) == pattern
    # A model round this one has made it; an index that cuts nothing off changes nothing.
    assert ring_mask(**sizes, attention_mask=mask) is mask
    assert mask[:, :, slice(-0, None), :] is mask is mask[:, :, :, :48]
    for cut in ((..., slice(1, None)), (slice(None), 0), (slice(None),) * 3 + (slice(0, 47),)):
        unsupported("read or changed", mask.__getitem__, cut)


GIVEN = {"input_ids": TOKENS}

#: Batches that cannot be split, the error's words, and its class if it is no UnsupportedError.
BATCHES: list[tuple[dict[str, Any], str] | tuple[dict[str, Any], str, type]] = [
    ({}, "one of input_ids", ValueError),
    ({**GIVEN, "inputs_embeds": TOKENS}, "one of input_ids", ValueError),
    ({"labels": TOKENS, "input_ids": [1, 2]}, "must be a torch.Tensor, got list", ValueError),
    ({"labels": TOKENS, "input_ids": TOKENS[0]}, "input_ids has shape"),
    ({**GIVEN, "labels": TOKENS[:, 1:]}, "labels must be", ValueError),
    ({**GIVEN, "labels": TOKENS[:, 0]}, "labels has shape"),
    ({**GIVEN, "attention_mask": torch.ones(2, 1, 8, 8)}, "four dimensions"),
    ({**GIVEN, "attention_mask": -TOKENS}, "number documents"),
    ({**GIVEN, "attention_mask": PADDED, "position_ids": TOKENS}, "start again"),
    ({**GIVEN, "attention_mask": PADDED, "seq_idx": TOKENS}, "beside seq_idx"),
    ({**GIVEN, "attention_mask": 2 * PADDED, "seq_idx": TOKENS}, "different documents", ValueError),
    ({**GIVEN, "attention_mask": 2 * PADDED, "position_ids": TOKENS}, "no stated document begins", ValueError),
    ({**GIVEN, "position_ids": torch.ones(3, 2, 8)}, "several directions"),
    ({**GIVEN, "attention_mask": 0 * TOKENS, "labels": TOKENS}, "follows padding", ValueError),
    ({**GIVEN, "pixel_values": TOKENS}, "pixel_values"),
    ({**GIVEN, "cu_seq_lens_q": TOKENS}, "given both", ValueError),
    ({**GIVEN, "cu_seq_lens_q": (0, 8), "cu_seq_lens_k": (0, 8)}, "2 rows"),
    ({"input_ids": TOKENS[:1], "cu_seq_lens_q": (0, 8), "cu_seq_lens_k": (0, 7, 8)}, "must be equal", ValueError),
    ({"input_ids": TOKENS[:1], "cu_seq_lens_q": (0, 7), "cu_seq_lens_k": (0, 7)}, r"0, \.\.\., 8", ValueError),
    ({**GIVEN, "seq_idx": TOKENS[0]}, "seq_idx must be", ValueError),
    ({**GIVEN, "use_cache": True}, "no cache"),
    ({**GIVEN, "output_attentions": True}, "never held"),
]  # fmt: skip


def test_models_that_would_answer_wrong() -> None:
    """A sharded batch in a model of another attention, a whole one in a ring, or half of either."""
    split, batch, name = shard(whole("contiguous")), whole("right"), hf.register()
    del batch["labels"]
    tokens = {"input_ids": batch["input_ids"]}
    four = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    model = build("Llama", name)
    takes = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    (argument,) = {"cache", "past_key_values"} & takes.keys()  # transformers 5.24 renamed it
    cache = {argument: transformers.DynamicCache(config=model.config)}
    model(**split, **cache)
    blocks, heads = torch.zeros(2, LENGTH + 1, dtype=torch.int64), torch.zeros(2, 1, LENGTH + 1, 8)
    embeddings = model.get_input_embeddings()(split["input_ids"])
    arguments = (model.config, embeddings, split["attention_mask"], None)
    mask: Any = masking_utils.create_causal_mask(*arguments)
    attend = partial(REGISTRY[name], torch.nn.Module(), heads)
    whole_batch: list[tuple[Callable[[], Any], str] | tuple[Callable[[], Any], str, type]] = [
        *((partial(build("Llama", x), **split), r"hf\.register") for x in ("eager", "sdpa", "flex_attention")),
        (partial(model, **batch), "shard_batch", ValueError),
        (partial(model, **tokens), "shard_batch", ValueError),
        (partial(model, **tokens, attention_mask=four), "no mask of shape"),
        (partial(model.generate, **batch, max_new_tokens=2, do_sample=False), "shard_batch", ValueError),
        (partial(model, **split, output_attentions=True), "output_attentions"),
        (partial(model, **split, head_mask=TOKENS), "head_mask"),
        (partial(model, **split, **cache), "KV cache"),
        (partial(build("Llama4", name), **split), "chunked"),
        (partial(build("GptOss", name), **split, output_router_logits=True), "router"),
        (partial(masking_utils.create_causal_mask, *arguments, block_sequence_ids=blocks), "images"),
        (lambda: mask[:, :, :4], "read or changed"),
        (partial(masking_utils.create_recurrent_attention_mask, *arguments), "recurrent"),
        (partial(attend, heads, heads, mask, sliding_window=4), "sliding_window=4"),
        (partial(attend, heads, heads, mask, is_causal=False), "is_causal"),
        (partial(attend, heads, heads, mask, position_bias=heads), "position_bias"),
        (partial(attend, heads[:, :, :4], heads[:, :, :4], mask), "cross"),
        (partial(attend, heads, heads, None), "no attention_mask", ValueError),
        (partial(attend, heads, heads, split["attention_mask"]), "itself"),
        # Names are not taken twice.
        (partial(hf.register, kernel="eager"), "choose another name", ValueError),
        (partial(hf.register, "my_flash"), "mean something", ValueError),
        (partial(hf.register, "ring-none", kernel="none"), "kernel", ValueError),
    ]  # fmt: skip
    for call, message, *error in whole_batch:
        refused(message, call, error=(*error, UnsupportedError)[0])
    model.config.layer_types = ["full_attention", "linear_attention"]
    unsupported("linear_attention", masking_utils.create_causal_mask, *arguments)
    assert hf.register() == "ring" and "ring-none" not in transformers.AttentionInterface()


def parallel(
    name: str, changes: dict[str, Any] | None = None, layout: Any = "zigzag", **options: Any
) -> Any:
    """Return a small model, parallelized, and its handle."""
    model = build(name, **changes or {})
    return model, hf.parallelize(model, ContextParallel(layout=layout), **options)


def call(name: str, batch: dict[str, Any], **options: Any) -> Callable[[], object]:
    """Return a call of a parallelized model."""
    return lambda: parallel(name, **options)[0](**{"input_ids": ROW, **batch})


def verified(batch: Any, name: str = "Llama") -> Callable[[], object]:
    """Return a comparison of a parallelized model on a batch."""
    return lambda: parallel(name)[1].verify(batch)


def adapted(config: str, reduction: Any, **options: Any) -> Callable[[], object]:
    """Return the parallelization of adapters of a classifier, which see the whole batch."""

    def parallelize() -> None:
        import peft

        base = build("Llama", head="ForSequenceClassification", num_labels=2).float()
        adapter = getattr(peft, config)(target_modules=["q_proj"], **options)
        model: Any = peft.get_peft_model(base, adapter)
        try:
            hf.parallelize(model, ContextParallel(), reduction=reduction)
        finally:
            assert not model.base_model._forward_hooks

    return parallelize


def with_scores(name: str, part: str, attribute: str, value: Any) -> Any:
    """Call a parallelized model whose attention has another attribute."""
    model, _ = parallel(name)
    setattr(model.get_submodule(part), attribute, value)
    return model(input_ids=ROW)


def scan(**states: Any) -> Any:
    """Scan a layer's tokens, given or asked for a state."""
    layer = mixers.SplitLayer(ANY)
    return mixers._OPERATIONS["torch_chunk_gated_delta_rule"](layer, *[torch.ones(1)] * 5, **states)


def lora() -> Any:
    """Return a parallelized model with activated LoRA."""
    model = activated(build("Llama"))
    hf.parallelize(model, ContextParallel())
    return model


def on_meta(name: str, **changes: Any) -> Any:
    """Build a model on the meta device, which cannot run."""
    cls = getattr(transformers, name)
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):  # about empty weights
        return cls._from_config(config_of(cls.config_class.model_type, cls, **changes))


def switched(name: str, **changes: Any) -> Callable[[], object]:
    """Return the split of a batch for a model that a switch of the config makes impossible."""

    def split() -> None:
        assert hf.check_model(on_meta(name)).exact
        shard({"input_ids": TOKENS}, on_meta(name, **changes))

    return split


ROW = torch.full((1, 8), 5)
T5, NEXT = "T5ForConditionalGeneration", "Qwen3NextForCausalLM"
GPT_NEO = ("GPTNeoForCausalLM", "transformer.h.0.attn.attention", "attn_dropout")
ALIBI = ("BloomForCausalLM", "transformer.h.0.self_attention", "inv_norm_factor")

#: What is refused: the call, the error's words, and its class if it is no UnsupportedError.
CALLS: dict[str, Any] = {
    **{f"{n} {message}": (partial(shard, batch), message, *error) for n, (batch, message, *error) in enumerate(BATCHES)},
    # Batches of parallelized models.
    "no decoder": (call(T5, {}), "decoder_input_ids .* or labels", ValueError),
    "encoder's outputs": (call(T5, {"labels": ROW, "encoder_outputs": (ROW,)}), "encoder_outputs"),
    "a mask is needed": (call("T5GemmaForConditionalGeneration", {"labels": ROW - 105}), "give attention_mask", ValueError),
    "positions of ALiBi": (call("BloomForCausalLM", {"position_ids": ROW.cumsum(1)}), "takes none"),
    "holes of ALiBi": (call("BloomForCausalLM", padded(23, [9, 10, 11, 12])), r"padding between tokens: .*ALiBi"),
    "sound": (call("LlavaForConditionalGeneration", {"sound": ROW}), "takes no sound"),
    "packed and whole": (call(NEXT, whole("packed"), recurrent="whole"), r"packed documents: .*\(recurrent='whole'\)"),
    "kept logits beside labels": (call("Llama", {"labels": ROW, "logits_to_keep": 5}, logits="gather"), "logits_to_keep beside labels"),
    "kept logits of another model": (call("BertForMaskedLM", {"logits_to_keep": 5}, logits="gather"), "cannot split logits_to_keep"),
    "offsets of no row": (lambda: lora()(input_ids=ROW.expand(2, -1), alora_offsets=[3]), "one a row"),
    "a first state": (lambda: scan(initial_state=torch.zeros(1)), "state of a cache"),
    "a last state": (lambda: scan(output_final_state=True), "state of a cache"),
    # What is asked of parallelized models.
    "scan striped": (lambda: parallel(NEXT, recurrent="split", layout="striped"), "recurrent='split': striped layout"),
    "unknown recurrent": (lambda: parallel(NEXT, recurrent="halves"), "unknown recurrent 'halves'", ValueError),
    "verify packed": (verified(whole("packed"), NEXT), "start again.*give one document", ValueError),
    "verify numbers": (verified({"input_ids": ROW, "attention_mask": ROW}), "numbers documents", ValueError),
    "verify offsets": (verified({"input_ids": ROW, "cu_seq_lens_q": torch.tensor([0, 8])}), "cu_seq_lens_q", ValueError),
    "verify nothing": (verified({"input_ids": None}), "must have input_ids", ValueError),
    "verify a list": (verified([{"input_ids": ROW}]), "batch must be a mapping", ValueError),
    # Models.
    "alibi": (lambda: parallel("FalconForCausalLM", {"alibi": True}), "alibi"),
    "sparse": (lambda: parallel("BigBirdPegasusForCausalLM", {"attention_type": "block_sparse"}), "sparse"),
    "local": (lambda: parallel("LongT5ForConditionalGeneration"), "LongT5LocalAttention"),
    "capacity": (lambda: parallel("SwitchTransformersForConditionalGeneration"), "as many tokens as fit"),
    "pair without positions": (lambda: parallel("EncoderDecoderModel"), "takes no position_ids"),
    "AdaLoRA": (adapted("AdaLoraConfig", "sum", total_step=9), "AdaLoRA of a classif"),
    "activated classifier": (adapted("LoraConfig", "mean", alora_invocation_tokens=[1]), "activated"),
    "Lily": (adapted("LilyConfig", "mean"), "mean over the tokens"),
    # Unknown operations on scores, and a learned scale: a ring takes a number, without a gradient.
    "scores are read": (lambda: with_scores(*GPT_NEO, nn.GELU()), "does more with its scores"),
    "a learned scale": (lambda: with_scores(*ALIBI, torch.tensor(0.25, requires_grad=True)), "does more with its scores"),
    # Switches of a config, which are reasons of ``check_model``.
    "prompts": (switched("MvpForConditionalGeneration", use_prompt=True), "use_prompt.*set it to"),
    "sparse labels": (switched("ModernBertForMaskedLM", sparse_prediction=True, sparse_pred_ignore_index=-1), "sparse_pred_ignore_index.*set it to"),
    "routers": (switched("MixtralForCausalLM", output_router_logits=True), "output_router_logits"),
    # What needs hooks, and what is no model.
    "by hand": (lambda: shard(GIVEN, on_meta("BloomForCausalLM")), r"hf\.parallelize"),
    **{f"shifted labels {n}": (lambda x=x: x(shard(whole("right"), layout=EVEN)["labels"]), "shift_labels") for n, x in enumerate((lambda x: x[:, 1:], lambda x: pad(x, (0, 1)), lambda x: x.view(-1), torch.ravel))},
    "no module": (lambda: hf.check_model("llama"), r"must be a torch\.nn\.Module", ValueError),  # type: ignore[arg-type]  # wrong on purpose
    "no model": (lambda: hf.shard_batch(ContextParallel(), GIVEN), "model", TypeError),  # type: ignore[call-arg]  # wrong on purpose
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.refused_in("5.14", "no decoder", "encoder's outputs", "pair without positions")
@pytest.mark.parametrize("case", CALLS)
def test_what_is_refused(case: str) -> None:
    call_of_case, message, *error = CALLS[case]
    refused(message, call_of_case, error=(*error, UnsupportedError)[0])


def test_scores_that_are_passed_on_are_served() -> None:
    assert with_scores(*GPT_NEO, ANY).logits.shape[:2] == ROW.shape


def test_losses_other_than_cross_entropy() -> None:
    """Labels that are not shifted are for cross entropy alone, divided by the batch's number."""
    model = build("BertForMaskedLM", hf.register())
    batch = tagged(model, "plain")
    labels = shard(batch, model)["labels"]
    flat = labels.to("cpu").view(-1)
    logits = torch.randn(batch["labels"].numel(), 40)
    assert cross_entropy(logits, flat).isfinite()
    for misuse in (
        lambda: labels[:, 1:], lambda: labels == -100, lambda: labels != -100, lambda: flat != 0,
        lambda: flat == -100, lambda: flat[3:], lambda: labels.view(2, -1),
        lambda: labels.view(labels.shape[0]), lambda: labels.float().sum(), lambda: torch.ravel(labels),
        lambda: cross_entropy(logits, flat, weight=torch.ones(40)),
        lambda: cross_entropy(logits, flat, ignore_index=0),
        lambda: cross_entropy(logits, flat, reduction="none"),
    ):  # fmt: skip
        unsupported("cross entropy of logits", misuse)
    tokens = {"input_ids": batch["input_ids"]}
    refused("give labels instead", shard, tokens | {"shift_labels": batch["labels"]}, model)
    positions = {"start_positions": torch.ones(2)}
    refused("start_logits and end_logits", shard, tokens | positions, model)


def test_a_strategy_of_the_models_own_attention() -> None:
    model, cp = build("Llama", hf.register("ring-gather", strategy="gather")), ContextParallel()
    hf.parallelize(model, cp).remove()
    handle = hf.parallelize(model, cp, strategy="gather")
    assert hf.parallelize(model, cp, strategy="gather") is handle
    refused("parallelized already, with", hf.parallelize, model, cp, strategy="ring")
    handle.remove()
    message = "'ring-gather' was registered with strategy='gather'"
    refused(message, hf.parallelize, model, cp, strategy="ulysses")
    refused("strategy name", hf.parallelize, model, cp, strategy="a2a")
    assert model.config._attn_implementation == "ring-gather"


class PooledOutput(transformers.LlamaForCausalLM):
    """A user's model with one output per sequence; it never runs, only this code is read."""

    def forward(self, input_ids: Tensor, **_: Any) -> SequenceClassifierOutputWithPast:
        raise NotImplementedError(input_ids)


@pytest.mark.parametrize("add_pooling_layer", [False, True])
def test_what_pools_nothing_is_exact(add_pooling_layer: bool) -> None:
    config: Any = config_of("bert", transformers.BertModel)
    model = transformers.BertModel(config, add_pooling_layer=add_pooling_layer)
    report = hf.check_model(model)
    assert report.exact is (report.pooling is None) is not add_pooling_layer
    own = PooledOutput(config_of("llama", transformers.LlamaForCausalLM))  # type: ignore[arg-type]
    assert hf.check_model(own).pooling == "SequenceClassifierOutputWithPast"


class OwnAttention(nn.Module):
    """Attention that does not use transformers' registry; only this code is read."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return scaled_dot_product_attention(x, x, x)


class AliasedAttention(nn.Module):
    """Attention that uses transformers' registry by another name."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        return _attend(hidden_states)


def _attend(x: Tensor) -> Any:
    return REGISTRY["sdpa"](x)


@pytest.mark.parametrize(
    ("place", "part", "is_exact"),
    [
        ("mlp.extra", partial(nn.Conv1d, 32, 32, 3, padding=1), False),
        ("mlp.extra", partial(nn.Conv1d, 32, 32, 1), True),
        ("mlp.extra", partial(nn.LSTM, 32, 32), False), ("mlp.extra", partial(nn.Linear, 32, 32), True),
        ("self_attn", OwnAttention, False), ("self_attn", AliasedAttention, True),
    ],
)  # fmt: skip
def test_parts_that_users_add(place: str, part: Callable[[], nn.Module], is_exact: bool) -> None:
    """Ask about a model of two layers, of which the first has a part that users add."""
    model: Any = build("LlamaForCausalLM")
    model.model.layers[0].set_submodule(place, part())
    assert hf.check_model(model).exact is is_exact


def test_the_routers_loss_within_a_users_module() -> None:
    model = on_meta("MixtralForCausalLM", output_router_logits=True)
    outer = nn.ModuleDict({"inner": model})
    assert hf.check_model(outer).reasons == hf.check_model(model).reasons != ()
    assert report_of(outer, joins_router=True).exact
    refused("must be a model of transformers", hf.parallelize, outer, ContextParallel())
    unsupported("output_router_logits", shard, GIVEN, outer)
    assert hf.check_model(nn.Linear(2, 2)) == hf.ModelReport()


@on_ranks
def test_wrapped_models_count_as_what_is_wrapped() -> None:
    import peft

    adapted = partial(peft.get_peft_model, peft_config=peft.LoraConfig(target_modules=["query"]))
    wraps: dict[str, Any] = {
        "peft": adapted, "module": lambda x: nn.ModuleDict({"inner": nn.ModuleDict({"model": x})}),
        "compiled": torch.compile, "compiled peft": lambda x: torch.compile(adapted(x)),
        "ddp": DistributedDataParallel, "fsdp": fully_shard,
    }  # fmt: skip
    names = ("RobertaForMaskedLM", "RobertaForSequenceClassification")
    for name, (kind, wrap) in product(names, wraps.items()):
        model = build(name)
        expected = hf.check_model(model)
        assert expected.position_offset == 2
        assert hf.check_model(wrap(model)) == expected, kind


def test_a_model_is_checked_once_and_not_kept() -> None:
    model = build("BertForMaskedLM")
    with patch.object(batch_by_hand, "check_model", side_effect=hf.check_model) as spy:
        for _ in range(3):
            shard(GIVEN, model)
        spy.assert_called_once_with(model)
    kept = ref(model)
    del model, spy
    gc.collect()
    assert kept() is None


#: Losses that read the mask.
NO_LABELS = (
    "BioGptForTokenClassification", "XLMRobertaXLForTokenClassification", "ElectraForPreTraining",
    "GraniteSpeechForConditionalGeneration", "Qwen2AudioForConditionalGeneration",
)  # fmt: skip


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", *NO_LABELS])
@on_ranks
def test_it_is_refused_before_anything_is_sent(rank: int, name: str) -> None:
    """Refuse a batch on one rank alone: if it sent anything, it would wait for the other."""
    message = "leave labels out" if name in NO_LABELS else "pools"
    model = build(name)
    report, labels = hf.check_model(model), {} if message == "pools" else {"labels": TOKENS}
    assert message in (report.no_labels or "; ".join(report.reasons))
    assert report.exact == bool(labels)
    if rank == 0:
        unsupported(message, shard, GIVEN | labels, model)
    if labels:  # the model itself is exact
        shard(GIVEN, model)
