"""A model is refused if transformers' code lacks a name that a hook needs; the error says it.

Each case renames something in the code of one class, as a release may do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hf_models import Wide, build
from hf_rows import padded
from refused import refused
from sweep.compare import batch_of
from torch import nn
from transformers import AttentionMaskInterface, Trainer, TrainingArguments, masking_utils

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.hf.models import classes, missing, recurrent
from ring_torch.hf.models.code import _undecorated
from ring_torch.hf.models.releases import TESTED_RELEASES

LLAMA, LLAMA4, ROBERTA = "LlamaForCausalLM", "Llama4ForCausalLM", "RobertaForMaskedLM"
BART, BART_PAIR = "BartForCausalLM", "BartForConditionalGeneration"
T5_PAIR, M2M = "T5ForConditionalGeneration", "M2M100ForConditionalGeneration"
BLOOM, MPT, NEO = "BloomForCausalLM", "MptForCausalLM", "GPTNeoForCausalLM"
NEXT, GRIFFIN = "Qwen3NextForCausalLM", "RecurrentGemmaForCausalLM"

CACHES = ("past_key_values", "cache")
CACHE = CACHES[transformers.__version__ >= "5.24"]
LENGTHS = ("past_key_values_length", "cache_length")


def with_class(model: Any, name: str, change: Callable[[type], dict[str, Any]]) -> int:
    """Change modules of a class to a modified copy of it; return how many there were."""
    modules = [x for x in model.modules() if type(x).__name__ == name]
    for module in modules:
        cls = type(module)
        own = {n: x for n, x in vars(cls).items() if n not in ("__dict__", "__weakref__")}
        changed = {"__name__": name} | own | change(cls)
        module.__class__ = type(changed.pop("__name__"), cls.__bases__, changed)
    return len(modules)


def renamed(function: Any, names: tuple[str, ...]) -> FunctionType:
    """Return a function without these names: arguments, variables, globals and attributes."""
    function = _undecorated(function)
    code = _renamed(function.__code__, names)
    assert code != function.__code__, f"{function.__qualname__} has none of {', '.join(names)}"
    return FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def _renamed(code: CodeType, names: tuple[str, ...]) -> CodeType:
    """Return code, and the code within it, without these names."""

    def others(old: tuple[str, ...]) -> tuple[str, ...]:
        return tuple("renamed" if name in names else name for name in old)

    def constant(x: object) -> object:
        if isinstance(x, tuple) and all(isinstance(name, str) for name in x):
            return others(x)  # keyword names of a call
        return _renamed(x, names) if isinstance(x, CodeType) else x

    return code.replace(
        co_varnames=others(code.co_varnames), co_names=others(code.co_names),
        co_cellvars=others(code.co_cellvars), co_freevars=others(code.co_freevars),
        co_consts=tuple(map(constant, code.co_consts)),
    )  # fmt: skip


Change = Callable[[Any], object]


def lacks(owner: str, *names: str, method: str = "forward") -> Change:
    """Return what removes names from a method of a class."""

    def change(cls: type) -> dict[str, Any]:
        return {method: renamed(getattr(cls, method), names)}

    return lambda model: with_class(model, owner, change)


def is_called_otherwise(name: str) -> Change:
    """Return what renames a class that is known by its name."""
    return lambda model: with_class(model, name, lambda _: {"__name__": "Renamed"})


def has_no(attribute: str, owner: str) -> Change:
    """Return what removes an attribute of modules of a class, or of their configs."""

    def change(model: Any) -> None:
        for module in (x for x in model.modules() if type(x).__name__ == owner):
            if attribute == "config":
                module.config = SimpleNamespace()
            else:
                delattr(module, attribute)

    return change


def _half_a_pair(model: Any) -> None:
    """Leave positions to the encoder alone: the decoder would count from 0."""
    lacks("BartLearnedPositionalEmbedding", "position_ids")(model.get_decoder())


def _another_scan(model: Any) -> None:
    model.model.layers[0].mlp = type("OtherMamba", (nn.Identity,), {})()


#: Models, what is changed in their code, and the error: names of methods that are others, classes
#: of other names, attributes that are gone.
CHANGED: dict[str, Any] = {
    "cache": (LLAMA4, lacks("Llama4TextAttention", *CACHES), "Llama4TextAttention .* no argument cache"),
    "counted-queries": (LLAMA4, lacks("Llama4TextAttention", "get_seq_length"), "no get_seq_length"),
    "mask-of-queries": (LLAMA4, lacks("Llama4TextAttention", "attention_mask"), "no attention_mask"),
    "chunks": (LLAMA4, lacks("Llama4TextModel", "causal_mask_mapping"), "no causal_mask_mapping"),
    "chunk-masks": (LLAMA4, lacks("Llama4TextModel", "create_chunked_causal_mask"), "chunked_attention"),
    "positions": (BART, lacks("BartLearnedPositionalEmbedding", *LENGTHS), "no argument cache_length"),
    "position-ids": (BART, lacks("BartLearnedPositionalEmbedding", "position_ids"), "position_ids"),
    "positions-of-pairs": (BART_PAIR, lacks("BartLearnedPositionalEmbedding", *LENGTHS), "no argument cache_length"),
    "counted-positions": (M2M, lacks("M2M100SinusoidalPositionalEmbedding", "create_position_ids_from_input_ids"), "no module that calls its create_position_ids"),
    "mask-of-pairs": (BART_PAIR, lacks("BartForConditionalGeneration", "decoder_attention_mask"), "no argument decoder_attention_mask"),
    "cross-mask": (BART_PAIR, lacks("BartDecoder", "encoder_attention_mask"), "no encoder_attention_mask"),
    "bias-lengths": (T5_PAIR, lacks("T5Attention", "past_seen_tokens", method="compute_bias"), "no argument past_seen_tokens"),
    "bias-switch": (T5_PAIR, lacks("T5Attention", "has_relative_attention_bias"), "no has_relative_attention_bias"),
    "bias": (T5_PAIR, lacks("T5Attention", "compute_bias"), "no compute_bias"),
    "slopes": (BLOOM, lacks("BloomModel", "build_alibi_tensor"), r"no build_alibi_tensor\(\)"),
    "slopes-by-length": (MPT, lacks("MptModel", "build_mpt_alibi_tensor"), r"no build_mpt_alibi_tensor\(\)"),
    "recurrent": (NEXT, lacks("Qwen3NextGatedDeltaNet", "hidden_states"), "no argument hidden_states"),
    "recurrent-others": (NEXT, lacks("Qwen3NextGatedDeltaNet", *CACHES, "cache_params"), "no known use of its argument renamed"),
    "registry": (LLAMA, lacks("LlamaAttention", "ALL_ATTENTION_FUNCTIONS"), "calls no attention function"),
    "masks": (LLAMA, lacks("LlamaModel", "create_causal_mask"), "makes its masks itself"),
    "padding-idx": (ROBERTA, lacks("RobertaEmbeddings", "create_position_ids_from_input_ids"), "no create_position_ids_from_input_ids"),
    "one-of-two-sequences": (BART_PAIR, _half_a_pair, "BartDecoder .* no position_ids, nor module that makes positions"),
    "attention-class": (BLOOM, is_called_otherwise("BloomAttention"), "calls no attention function"),
    "recurrent-class": (GRIFFIN, is_called_otherwise("RecurrentGemmaRecurrentBlock"), "layers of type linear_attention|Conv1d mix tokens"),
    "another-scan": (NEXT, _another_scan, "OtherMamba mix tokens"),
    "attention_type": (NEO, has_no("attention_type", "GPTNeoSelfAttention"), "no attention_type"),
    "window_size": (NEO, has_no("config", "GPTNeoSelfAttention"), r"no config\.window_size"),
    "attention_chunk_size": (LLAMA4, has_no("config", "Llama4TextModel"), r"no config\.attention_chunk_size"),
}  # fmt: skip


def given(owner: str, **values: Any) -> Change:
    """Return what gives modules of a class other arguments."""

    def give(_module: object, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, **values}

    def change(model: Any) -> None:
        module = next(x for x in model.modules() if type(x).__name__ == owner)
        module.register_forward_pre_hook(give, with_kwargs=True, prepend=True)

    return change


def returns(change: Callable[[Any], Any], part: str = "") -> Change:
    """Return what changes the output of a module."""
    return lambda model: model.get_submodule(part).register_forward_hook(
        lambda _module, _args, output: change(output), prepend=True
    )


def _without_coefficient(model: Any) -> None:
    model.renamed = model.router_aux_loss_coef
    del model.router_aux_loss_coef
    lacks("MixtralForCausalLM", "router_aux_loss_coef")(model)


def _other_loss(model: Any) -> None:
    """Return another name's loss, which would be that of this rank's tokens."""
    forward = model.forward
    model.forward = lambda *args, **kwargs: {"total_loss": forward(*args, **kwargs).loss}


def _unknown_call(model: Any) -> int:
    """Let a layer call a function that no table knows."""

    def change(cls: Any) -> dict[str, Any]:
        own = renamed(cls.forward, ("apply_mask_to_padding_states",))
        known = own.__globals__ | {"renamed": lambda x, _: x.flip(1)}
        return {"forward": FunctionType(own.__code__, known, "forward", own.__defaults__)}

    return with_class(model, "Qwen3NextGatedDeltaNet", change)


def _own_forward(model: Any) -> None:
    layer = model.model.layers[0].conv
    layer.forward = layer.forward


def _without_router_logits(output: Any) -> Any:
    output["router_logits"] = None
    return output


#: What ``hf.parallelize`` alone needs, and what a hook is not given in a forward: models, what is
#: changed before they are parallelized, and after, and the error.
CALLED: dict[str, Any] = {
    "head": ("LlamaForSequenceClassification", lambda x: delattr(x, "score"), None, r"LlamaForSequenceClassification .* has no score"),
    "attention": (LLAMA, lambda x: setattr(x, "set_attn_implementation", lambda _: None), None, "no attention that set_attn_implementation sets"),
    "loss": (LLAMA, None, _other_loss, "the output of LlamaForCausalLM .* has no loss"),
    # Each rank would count its own router's loss.
    "router-loss": ("Mixtral", returns(lambda x: {"other" * (n == "aux_loss") + n: y for n, y in x.items()}), None, "output of MixtralForCausalLM .* has no aux_loss"),
    "router-logits": ("Mixtral", returns(_without_router_logits, "model"), None, "MixtralModel has no router_logits of every token"),
    "coefficient": ("Mixtral", _without_coefficient, None, "a router's loss and no router_aux_loss_coef"),
    # No mask for a decoder of the encoder's tokens; for a recurrent layer, which finds its batch by
    # it; for attention that counts its queries.
    "encoder": (BART_PAIR, None, given("BartDecoder", encoder_attention_mask=None), "BartDecoder is given ShardedMask and NoneType"),
    "rows": (GRIFFIN, None, returns(lambda x: x[0][:, 1:], "model.layers.0.temporal_block"), "RecurrentGemmaRecurrentBlock must return"),
    "state": ("Lfm2ForCausalLM", None, lambda x: given("Lfm2ShortConv", **{CACHE: transformers.DynamicCache(config=x.config)})(x), r"Lfm2ShortConv is split .* there is no cache"),
    "layer": (NEXT, None, given("Qwen3NextGatedDeltaNet", attention_mask=None), "without the mask of a split batch"),
    # Layers that are asked to be split.
    "mixer": (NEXT, _unknown_call, None, "Qwen3NextGatedDeltaNet calls renamed, which may mix tokens"),
    "forward": ("Lfm2ForCausalLM", _own_forward, None, "was replaced"),
    "queries": (LLAMA4, None, given("Llama4TextAttention", attention_mask=None), "Llama4TextAttention is given a cache, or no mask"),
}  # fmt: skip


RECURRENT: dict[str, Any] = {"rows": "whole", "mixer": "split", "forward": "split"}
if transformers.__version__ < "5.20":  # there these layers run on whole sequences
    for case in ("state", "mixer", "forward"):
        del CALLED[case]


@pytest.mark.parametrize("case", [*CHANGED, *CALLED])
def test_code_that_is_another_is_refused(case: str) -> None:
    name, before, *afterwards, message = (CHANGED | CALLED)[case]
    changes: dict[str, Any] = {"output_router_logits": True} if name == "Mixtral" else {}
    model = build(name, **changes)
    batch = batch_of(model)
    labels = {"labels": batch["input_ids"]} if name in (LLAMA, "Mixtral") else {}
    if before is not None:
        assert before(model) != 0
    if case in CHANGED:
        reasons = "; ".join(hf.check_model(model).reasons)
        assert re.search(message, reasons), reasons
        if case == "cache":  # which names releases, too
            assert f"of transformers {transformers.__version__} has no argument" in reasons
            assert f"(tested: {', '.join(TESTED_RELEASES)})" in reasons

    def run() -> None:
        hf.parallelize(model, ContextParallel(), recurrent=RECURRENT.get(case, "auto"))
        for after in filter(None, afterwards):
            after(model)
        model(**batch, **labels)

    with Wide(), pytest.raises(UnsupportedError, match=message):
        run()


@pytest.mark.parametrize("name", ["Lfm2ForCausalLM", "BartForCausalLM"])
def test_a_part_that_is_not_told_its_batch_is_refused(name: str) -> None:
    model = build(name)
    before = hf.check_model(model)
    handle = hf.parallelize(model, ContextParallel())
    assert hf.check_model(model) == before
    model(**padded(12)).loss.backward()
    part = "model.layers.0.conv" if "Lfm2" in name else "model.decoder.embed_positions"
    module, hidden = model.get_submodule(part), torch.zeros(1, 12, 32).double()
    refused("without the mask of a split batch", module, hidden, error=UnsupportedError)
    handle.remove()
    module(hidden)


METHODS = ("floating_point_ops", "_track_num_input_tokens", "get_tp_size")
MASKS = ("bidirectional_mask_function", "sliding_window_causal_mask_function")


@pytest.mark.parametrize("name", [*METHODS, *MASKS])
def test_a_function_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in MASKS:
        monkeypatch.delattr(masking_utils, name)
        refused(f"masking_utils .* has no {name}", hf.register, error=UnsupportedError)
        return
    trainer = Trainer(build(LLAMA), TrainingArguments(str(tmp_path), report_to="none"))
    if name == "get_tp_size":  # found in the code of the method that calls it
        monkeypatch.setattr(Trainer, "compute_loss", lambda *_: None)
        if transformers.__version__ < "5.20":
            return
    else:
        monkeypatch.delattr(Trainer, name)
    with pytest.raises(UnsupportedError, match=f"Trainer .* has no {name}"):
        hf.parallelize(trainer, ContextParallel())


def test_an_argument_of_masks() -> None:
    function = AttentionMaskInterface()[hf.register()]
    with pytest.raises(UnsupportedError, match="no known use of blocks"):
        function(batch_size=1, q_length=4, kv_length=4, blocks=2)


#: Names missing in a release: the models that use them are newer, or older.
ABSENT = {
    "5.14": {"BailingHybridDeltaAttention", "KimiLinearDeltaAttention", "Lfm3ShortConv"},
    "5.24": {"past_key_values_length"},
}


def test_names_that_refuse_are_in_transformers() -> None:
    """Names by which models are refused exist in transformers' code."""
    release = ".".join(transformers.__version__.split(".")[:2])
    assert transformers.__file__ is not None
    words_of_sources = set[str]()
    for path in Path(transformers.__file__).parent.rglob("*.py"):
        if path.name.startswith(("modeling", "generation", "masking", "cache")):
            words_of_sources.update(re.findall(r"\w+", path.read_text("utf-8")))
    names = {
        *classes._POOLED, *recurrent.RECURRENT, *classes.EAGER_ATTENTION, *classes.CACHES,
        *classes.PAST_LENGTHS, *missing._WHOLE_INPUTS, "expert_capacity", "get_seq_length",
        "make_default_2d_attention_mask", "patch_lengths", "question_token_id", "question_lengths",
    }  # fmt: skip
    parts = {*classes._POOLED_TYPES, *classes._POOLED_HEADS, *classes._TOKEN_HEADS}
    assert names - words_of_sources == ABSENT.get(release, set())
    # Reward models have their own code, in other libraries.
    assert {x for x in parts if not any(x in word for word in words_of_sources)} == {"RewardModel"}
