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
from hf_models import Wide, build as build_known, whole
from sweep.compare import batch_of, build
from torch import Tensor, nn
from transformers import AttentionMaskInterface, Trainer, TrainingArguments, masking_utils

from ring_core import UnsupportedError
from ring_torch import ContextParallel, hf
from ring_torch.hf.models import classes, missing, recurrent
from ring_torch.hf.models.code import _undecorated
from ring_torch.hf.models.releases import TESTED_RELEASES
from ring_torch.local import LocalRanks

LLAMA4, BART = ("Llama4ForCausalLM", "llama4"), ("BartForCausalLM", "bart")
BART_PAIR = ("BartForConditionalGeneration", "bart")
T5_PAIR = ("T5ForConditionalGeneration", "t5")
BLOOM, MPT = ("BloomForCausalLM", "bloom"), ("MptForCausalLM", "mpt")
NEO, NEXT = ("GPTNeoForCausalLM", "gpt_neo"), ("Qwen3NextForCausalLM", "qwen3_next")
GRIFFIN = ("RecurrentGemmaForCausalLM", "recurrent_gemma")
LLAMA, ROBERTA = ("LlamaForCausalLM", "llama"), ("RobertaForMaskedLM", "roberta")
M2M = ("M2M100ForConditionalGeneration", "m2m_100")

CACHES = ("past_key_values", "cache")
LENGTHS = ("past_key_values_length", "cache_length")

#: Models, the class of the changed method, the names removed from it, and the error.
RENAMED: dict[str, tuple[tuple[str, str], str, str, tuple[str, ...], str]] = {
    "cache": (LLAMA4, "Llama4TextAttention", "forward", CACHES, "Llama4TextAttention .* no argument cache"),
    "counted-queries": (LLAMA4, "Llama4TextAttention", "forward", ("get_seq_length",), "no get_seq_length"),
    "mask-of-queries": (LLAMA4, "Llama4TextAttention", "forward", ("attention_mask",), "no attention_mask"),
    "chunks": (LLAMA4, "Llama4TextModel", "forward", ("causal_mask_mapping",), "no causal_mask_mapping"),
    "chunk-masks": (LLAMA4, "Llama4TextModel", "forward", ("create_chunked_causal_mask",), "chunked_attention"),
    "positions": (BART, "BartLearnedPositionalEmbedding", "forward", LENGTHS, "no argument cache_length"),
    "position-ids": (BART, "BartLearnedPositionalEmbedding", "forward", ("position_ids",), "position_ids"),
    "positions-of-pairs": (BART_PAIR, "BartLearnedPositionalEmbedding", "forward", LENGTHS, "no argument cache_length"),
    "counted-positions": (M2M, "M2M100SinusoidalPositionalEmbedding", "forward", ("create_position_ids_from_input_ids",), "no module that calls its create_position_ids"),
    "mask-of-pairs": (BART_PAIR, "BartForConditionalGeneration", "forward", ("decoder_attention_mask",), "no argument decoder_attention_mask"),
    "cross-mask": (BART_PAIR, "BartDecoder", "forward", ("encoder_attention_mask",), "no encoder_attention_mask"),
    "bias-lengths": (T5_PAIR, "T5Attention", "compute_bias", ("past_seen_tokens",), "no argument past_seen_tokens"),
    "bias-switch": (T5_PAIR, "T5Attention", "forward", ("has_relative_attention_bias",), "no has_relative_attention_bias"),
    "bias": (T5_PAIR, "T5Attention", "forward", ("compute_bias",), "no compute_bias"),
    "slopes": (BLOOM, "BloomModel", "forward", ("build_alibi_tensor",), r"no build_alibi_tensor\(\)"),
    "slopes-by-length": (MPT, "MptModel", "forward", ("build_mpt_alibi_tensor",), r"no build_mpt_alibi_tensor\(\)"),
    "recurrent": (NEXT, "Qwen3NextGatedDeltaNet", "forward", ("hidden_states",), "no argument hidden_states"),
    "recurrent-others": (NEXT, "Qwen3NextGatedDeltaNet", "forward", (*CACHES, "cache_params"), "no known use of its argument renamed"),
    "registry": (LLAMA, "LlamaAttention", "forward", ("ALL_ATTENTION_FUNCTIONS",), "calls no attention function"),
    "masks": (LLAMA, "LlamaModel", "forward", ("create_causal_mask",), "makes its masks itself"),
    "padding-idx": (ROBERTA, "RobertaEmbeddings", "forward", ("create_position_ids_from_input_ids",), "no create_position_ids_from_input_ids"),
}  # fmt: skip
#: Classes known by their names, and the error for a model in which one is renamed.
CLASSES = {
    "BloomAttention": (BLOOM, "calls no attention function"),
    "RecurrentGemmaRecurrentBlock": (GRIFFIN, "layers of type linear_attention|Conv1d mix tokens"),
}
#: Attributes that are removed from modules of a class, or from their configs.
ATTRIBUTES = {
    "attention_type": (NEO, "GPTNeoSelfAttention", "no attention_type"),
    "config.window_size": (NEO, "GPTNeoSelfAttention", r"no config\.window_size"),
    "config.attention_chunk_size": (LLAMA4, "Llama4TextModel", r"no config\.attention_chunk_size"),
}


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


def is_served(model: Any) -> bool:
    """Return False for T5 before transformers 5.20, which had its own attention code."""
    report = hf.check_model(model)
    if not report.exact:
        assert "T5Attention" in report.reasons[0], report.reasons
        assert "attend in a way of their own" in report.reasons[0]
    return report.exact


def check_refused(model: Any, message: str) -> None:
    """Check that a model is refused before it runs, with one message everywhere."""
    report = hf.check_model(model)
    assert not report.exact
    assert re.search(message, "; ".join(report.reasons)), report.reasons
    with pytest.raises(UnsupportedError, match=message):
        hf.parallelize(model, ContextParallel())


@pytest.mark.parametrize("case", RENAMED)
def test_a_name_that_is_another(case: str) -> None:
    (name, kind), owner, method, names, message = RENAMED[case]
    model = build(name, kind)
    if is_served(model):
        assert with_class(model, owner, lambda cls: _with_other_names(cls, method, names))
        check_refused(model, message)


def test_a_reason_names_the_releases() -> None:
    (name, kind), owner, method, names, _ = RENAMED["cache"]
    model = build(name, kind)
    with_class(model, owner, lambda cls: _with_other_names(cls, method, names))
    (reason,) = hf.check_model(model).reasons
    assert f"of transformers {transformers.__version__} has no argument" in reason
    assert f"(tested: {', '.join(TESTED_RELEASES)})" in reason


def test_one_of_two_sequences_that_loses_its_positions() -> None:
    """A model is refused if only its encoder's positions are found: its decoder counts from 0."""
    model = build(*BART_PAIR)
    decoder = model.get_decoder()
    assert with_class(
        decoder,
        "BartLearnedPositionalEmbedding",
        lambda cls: _with_other_names(cls, "forward", ("position_ids",)),
    )
    check_refused(model, "BartDecoder .* no position_ids, nor module that makes positions")


def _with_other_names(cls: type, method: str, names: tuple[str, ...]) -> dict[str, Any]:
    return {method: renamed(getattr(cls, method), names)}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_another_name(name: str) -> None:
    model_of, message = CLASSES[name]
    model = build(*model_of)
    assert with_class(model, name, lambda _: {"__name__": "Renamed"})
    check_refused(model, message)


def test_a_recurrent_layer_beside_known_ones() -> None:
    model = build(*NEXT)
    model.model.layers[0].mlp = type("OtherMamba", (nn.Identity,), {})()
    check_refused(model, "OtherMamba mix tokens")


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_is_gone(name: str) -> None:
    model_of, owner, message = ATTRIBUTES[name]
    model = build(*model_of)
    for module in model.modules():
        if type(module).__name__ == owner and name.startswith("config"):
            module.config = SimpleNamespace()
        elif type(module).__name__ == owner:
            delattr(module, name)
    check_refused(model, message)


def test_a_head_that_is_gone() -> None:
    model = build("LlamaForSequenceClassification", "llama")
    del model.score
    with pytest.raises(UnsupportedError, match=r"LlamaForSequenceClassification .* has no score"):
        hf.parallelize(model, ContextParallel())


def test_attention_that_is_not_set() -> None:
    model = build(*LLAMA)
    model.set_attn_implementation = lambda _: None
    with pytest.raises(UnsupportedError, match="no attention that set_attn_implementation sets"):
        hf.parallelize(model, ContextParallel())


def test_a_loss_of_another_name() -> None:
    """A renamed loss is refused, as it would be the loss of this rank's tokens."""
    model = build(*LLAMA)
    batch = batch_of(model)
    hf.parallelize(model, ContextParallel())
    forward = model.forward
    model.forward = lambda *args, **kwargs: {"total_loss": forward(*args, **kwargs).loss}
    with pytest.raises(UnsupportedError, match=r"the output of LlamaForCausalLM .* has no loss"):
        model(**batch, labels=batch["input_ids"])


def test_attention_of_a_text_part_alone() -> None:
    """Only the text part's attention of GOT-OCR2 is replaced; that of images stays."""
    model = build("GotOcr2ForConditionalGeneration", "got_ocr2")
    language = next(x for x in model.modules() if type(x).__name__ == "Qwen2Model")
    before = language.config._attn_implementation, model.config._attn_implementation
    handle = hf.parallelize(model, ContextParallel())
    assert language.config._attn_implementation.startswith("ring")
    handle.remove()
    assert (language.config._attn_implementation, model.config._attn_implementation) == before


def test_a_routers_loss_of_another_name() -> None:
    """A renamed router loss is refused, as each rank would count its own."""
    model = build_known("Mixtral", output_router_logits=True)

    def rename(_module: object, _args: object, output: Any) -> Any:
        return {f"other_{n}" if n == "aux_loss" else n: x for n, x in output.items()}

    model.register_forward_hook(rename)
    hf.parallelize(model, ContextParallel())
    with pytest.raises(UnsupportedError, match=r"output of MixtralForCausalLM .* has no aux_loss"):
        model(**whole("plain"))


def _without_router_logits(model: Any) -> None:
    def rename(_module: object, _args: object, output: Any) -> Any:
        output["router_logits"] = None
        return output

    model.model.register_forward_hook(rename)


def _without_coefficient(model: Any) -> None:
    model.renamed = model.router_aux_loss_coef
    del model.router_aux_loss_coef
    names = ("router_aux_loss_coef",)
    assert with_class(
        model, "MixtralForCausalLM", lambda cls: _with_other_names(cls, "forward", names)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_router_logits, "MixtralModel has no router_logits of every token"),
        (_without_coefficient, "a router's loss and no router_aux_loss_coef"),
    ],
)
def test_a_part_of_a_routers_loss_that_is_gone(change: Callable[[Any], None], message: str) -> None:
    model = build_known("Mixtral", output_router_logits=True)
    change(model)
    hf.parallelize(model, ContextParallel())
    with pytest.raises(UnsupportedError, match=message):
        model(**whole("plain"))


def without_masks(model: Any) -> None:
    """Let the model pass its decoder no mask of the encoder's sequence."""

    def rename(_module: object, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "encoder_attention_mask": None}

    model.get_decoder().register_forward_pre_hook(rename, with_kwargs=True, prepend=True)


def with_other_rows(model: Any) -> None:
    """Let a recurrent layer that runs whole return another number of rows than it is given."""
    layer = next(x for x in model.modules() if type(x).__name__ == "RecurrentGemmaRecurrentBlock")
    layer.register_forward_hook(lambda _module, _args, output: output[0][:, 1:], prepend=True)


def without_layers_mask(model: Any) -> None:
    """Give no mask to attention that counts its queries."""

    def drop(_module: object, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": None}

    layer = next(x for x in model.modules() if type(x).__name__ == "Llama4TextAttention")
    layer.register_forward_pre_hook(drop, with_kwargs=True, prepend=True)


def without_a_layers_mask(model: Any) -> None:
    """Give no mask to a recurrent layer, which finds its batch by it."""

    def drop(_module: object, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": None}

    layer = next(x for x in model.modules() if type(x).__name__ == "Qwen3NextGatedDeltaNet")
    layer.register_forward_pre_hook(drop, with_kwargs=True, prepend=True)


@pytest.mark.parametrize(
    ("model_of", "change", "message"),
    [
        (BART_PAIR, without_masks, "BartDecoder is given ShardedMask and NoneType"),
        (GRIFFIN, with_other_rows, r"RecurrentGemmaRecurrentBlock must return"),
        (NEXT, without_a_layers_mask, "without the mask of a split batch"),
        (LLAMA4, without_layers_mask, "Llama4TextAttention is given a cache, or no mask"),
    ],
)
def test_what_a_hook_is_not_given_in_a_forward(
    model_of: tuple[str, str], change: Callable[[Any], None], message: str
) -> None:
    model = build(*model_of)
    batch = batch_of(model)
    hf.parallelize(model, ContextParallel(), recurrent="whole" if model_of is GRIFFIN else "auto")
    change(model)
    with Wide(), pytest.raises(UnsupportedError, match=message):
        model(**batch)


@pytest.mark.parametrize("name", ["floating_point_ops", "_track_num_input_tokens", "get_tp_size"])
def test_a_method_of_the_trainer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(build(*LLAMA), TrainingArguments(str(tmp_path), report_to="none"))
    if name == "get_tp_size":  # found in the code of the method that calls it
        monkeypatch.setattr(Trainer, "compute_loss", lambda *_: None)
        if transformers.__version__ < "5.20":
            return
    else:
        monkeypatch.delattr(Trainer, name)
    with pytest.raises(UnsupportedError, match=f"Trainer .* has no {name}"):
        hf.parallelize(trainer, ContextParallel())


@pytest.mark.parametrize(
    "name", ["bidirectional_mask_function", "sliding_window_causal_mask_function"]
)
def test_a_function_of_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(masking_utils, name)
    with pytest.raises(UnsupportedError, match=f"masking_utils .* has no {name}"):
        hf.register()


def test_an_argument_of_masks() -> None:
    function = AttentionMaskInterface()[hf.register()]
    with pytest.raises(UnsupportedError, match="no known use of blocks"):
        function(batch_size=1, q_length=4, kv_length=4, blocks=2)


def _exact(
    _: int, name: str, kind: str, prepare: Callable[[Any], None] | None, changes: Any
) -> None:
    model = build(name, kind, **changes)
    if prepare is not None:
        prepare(model)
    batch: dict[str, Tensor] = batch_of(model)
    with Wide(), torch.no_grad():
        expected = model(**batch).logits
        hf.parallelize(model, ContextParallel(), logits="gather")
        logits = model(**batch).logits
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


def hide_signatures(model: Any) -> None:
    """Decorate recurrent layers as transformers 5.14 does, which hides the wrapped signature."""

    def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

        return wrapped

    for owner in ("Qwen3NextGatedDeltaNet", "Lfm2ShortConv"):
        with_class(model, owner, lambda cls: {"forward": decorated(vars(cls)["forward"])})


@pytest.mark.parametrize(
    ("model_of", "prepare", "changes"),
    [
        pytest.param(
            LLAMA4, None, {"layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 0]},
            id="temperature-without-chunks",
        ),
        pytest.param(NEXT, hide_signatures, {}, id="hidden-signatures"),
        pytest.param(("Lfm2ForCausalLM", "lfm2"), hide_signatures, {}, id="hidden-convolutions"),
    ],
)  # fmt: skip
def test_two_ranks_are_as_one(
    pool: LocalRanks, model_of: tuple[str, str], prepare: Any, changes: dict[str, Any]
) -> None:
    pool.run(_exact, *model_of, prepare, changes)


#: Names missing in a release: the models that use them are newer, or older.
ABSENT = {
    "5.14": {"BailingHybridDeltaAttention", "KimiLinearDeltaAttention", "Lfm3ShortConv"},
    "5.24": {"past_key_values_length"},
}


def test_names_that_refuse_are_in_transformers() -> None:
    """Names by which models are refused exist in transformers' code.

    A renamed one would let a model pass unnoticed. Checked are the names of pooled outputs, heads,
    experts with a capacity, layers, and models with their own attention code.
    """
    release = ".".join(transformers.__version__.split(".")[:2])
    assert transformers.__file__ is not None
    sources = Path(transformers.__file__).parent.rglob("*.py")
    words_of_sources = {
        word for path in sources for word in re.findall(r"\w+", path.read_text("utf-8"))
    }
    names = {
        *classes._POOLED, *recurrent.RECURRENT, *classes.EAGER_ATTENTION, *classes.CACHES,
        *classes.PAST_LENGTHS, *missing._WHOLE_INPUTS, "expert_capacity", "get_seq_length",
        "make_default_2d_attention_mask", "patch_lengths", "question_token_id", "question_lengths",
    }  # fmt: skip
    parts = {*classes._POOLED_TYPES, *classes._POOLED_HEADS, *classes._TOKEN_HEADS}
    assert names - words_of_sources == ABSENT.get(release, set())
    # Reward models have their own code, in other libraries.
    assert {x for x in parts if not any(x in word for word in words_of_sources)} == {"RewardModel"}
