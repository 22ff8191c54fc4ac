"""What is known of a model of transformers by its classes: how it attends, pools, what it needs.

What a model needs beside ring attention are hooks that ``hf.parallelize`` puts on it.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from ring_torch.hf.models.code import (
    forward_of,
    names_in,
    names_in_forward,
    parameters_of,
    reads_global,
)
from ring_torch.hf.models.releases import lacks


@dataclass(frozen=True)
class Written:
    """What is known of a class whose attention is written out.

    Attributes:
        hides_by_itself: It hides later tokens by a buffer, beside the mask that it is given.
        local: The attribute that says ``"local"``, where the config's ``window_size`` counts.
        slopes: The method of its model that makes slopes of ALiBi.
    """

    hides_by_itself: bool = False
    local: str = ""
    slopes: str = ""


_PLAIN = Written()

#: Names that releases have for a cache, and for how many tokens it holds: before 5.24, and since.
CACHES = frozenset({"past_key_values", "cache"})
PAST_LENGTHS = frozenset({"past_key_values_length", "cache_length"})

#: By the name of the class. Each is run by ``tests/sweep``.
WRITTEN: Mapping[str, Written] = MappingProxyType({
    "BigBirdPegasusSelfAttention": _PLAIN,
    "BigBirdSelfAttention": _PLAIN,
    "BloomAttention": Written(slopes="build_alibi_tensor"),
    "CodeGenAttention": _PLAIN,
    "FalconAttention": _PLAIN,
    "GPTJAttention": _PLAIN,
    "GPTNeoSelfAttention": Written(hides_by_itself=True, local="attention_type"),
    "GPTNeoXJapaneseAttention": _PLAIN,
    "MegatronBertSelfAttention": _PLAIN,
    "MptAttention": Written(slopes="build_mpt_alibi_tensor"),
    "MvpAttention": _PLAIN,
    "RemBertSelfAttention": _PLAIN,
    "RoFormerSelfAttention": _PLAIN,
    "TrOCRAttention": _PLAIN,
    "XGLMAttention": _PLAIN,
})  # fmt: skip


#: Classes of layers that mix tokens one after another: they are given whole sequences.
RECURRENT = frozenset({
    "BailingHybridDeltaAttention", "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer",
    "JambaMambaMixer", "KimiLinearDeltaAttention", "Lfm2MoeShortConv", "Lfm2ShortConv",
    "Lfm3ShortConv", "MiniMaxLightningAttention", "NemotronHMamba2Mixer", "OlmoHybridGatedDeltaNet",
    "Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet",
    "RecurrentGemmaRecurrentBlock", "Zamba2MambaMixer",
})  # fmt: skip

#: Outputs that hold one entry a sequence, made of one token or of all.
_POOLED = {
    "pooler_output": "pooler_output",
    "seq_relationship_logits": "next sentence",
    "sop_logits": "sentence order",
    "image_embeds": "image_embeds",
    "text_embeds": "text_embeds",
    "logits_per_text": "logits_per_text",
}
_POOLED_TYPES = (
    "SequenceClassifier",
    "NextSentencePredictor",
    "MultipleChoice",
    "ImageClassifier",
)
_POOLED_HEADS = (
    "ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction", "ForRetrieval",
    "ForImageClassification", "RewardModel", "DoubleHeads",
)  # fmt: skip
_TOKEN_HEADS = ("TokenClassification", "QuestionAnswering", "MaskedLM", "CausalLM", "LMHead")


def is_recurrent(module: nn.Module) -> bool:
    """Whether it mixes tokens one after another, and can be given whole sequences."""
    return type(module).__name__ in RECURRENT


def written_form(module: nn.Module) -> Written | None:
    """Return what is known of a module whose attention is written out in this release."""
    form = WRITTEN.get(type(module).__name__)
    return None if form is None or _calls_registry(type(module)) else form


def makes_positions(module: nn.Module) -> bool:
    """Return True if a module makes positions of a sequence's length, where it is given none."""
    parameters = parameters_of(type(module))
    return (
        "Position" in type(module).__name__
        and "position_ids" in parameters
        and bool(PAST_LENGTHS & parameters)
    )


def counts_queries(module: nn.Module) -> bool:
    """Return True if attention counts queries from those that a cache holds, as Llama 4 does."""
    names = names_in_forward(type(module))
    return has_attention(module) and {"arange", "get_seq_length"} <= names


def counts_positions(module: nn.Module) -> bool:
    """Whether it counts positions among the tokens it is given, padding left out."""
    return hasattr(type(module), "create_position_ids_from_input_ids")


def makes_bias(module: nn.Module) -> bool:
    """Whether it makes a bias of relative positions, as T5 does, of as many queries as it sees."""
    function = getattr(type(module), "compute_bias", None)
    return function is not None and "past_seen_tokens" in inspect.signature(function).parameters


def hooks_for(model: Any, parts: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """What has to be hooked, beside batch and loss."""
    modules = parts.values()
    written = [form for x in modules if (form := written_form(x)) is not None]
    takes = any("position_ids" in parameters_of(type(x)) for x in modules if makes_masks(type(x)))
    hooks = {
        "encoder-decoder": is_pair(model),
        "attention": bool(written),
        "bias": any(map(makes_bias, modules)),
        "alibi": any(form.slopes for form in written),
        "positions": (
            (not takes and any(map(makes_positions, modules)))
            or (is_pair(model) and any(map(counts_positions, modules)))
        ),
        "recurrent": any(map(is_recurrent, modules)),
        "chunks": any(map(makes_chunks, modules)),
        "offsets": any(map(counts_queries, modules)),
    }
    return tuple(name for name, is_needed in hooks.items() if is_needed)


def is_pair(model: Any) -> bool:
    """Whether it has an encoder and a decoder of tokens."""
    return (
        "decoder_input_ids" in parameters_of(type(model))
        and not {"vision_config", "audio_config", "text_config"}
        & {*(model.config.sub_configs or ())}
        and model.main_input_name == "input_ids"
    )


def of_pair(model: Any) -> Iterator[str]:
    """Reasons that lie in there being two sequences."""
    name = name_of(model)
    if not is_pair(model):
        yield (
            f"{name} has an encoder and a decoder, and not of tokens alone: split a decoder or an "
            f"encoder alone"
        )
        return
    given, parts = parameters_of(type(model)), (model.get_encoder(), model.get_decoder())
    for part, wanted in zip(parts, ("position_ids", "decoder_position_ids"), strict=True):
        if "position_ids" in parameters_of(type(part)) and wanted not in given:
            yield f"{name} takes no {wanted}: its {type(part).__name__} would count from 0"
    if "encoder_attention_mask" not in parameters_of(type(model.get_decoder())):
        yield f"{name} has a decoder that takes no encoder_attention_mask"
    if own := sorted({
        type(x).__name__
        for x in model.modules()
        if "Attention" in type(x).__name__ and not any(map(has_attention, x.modules()))
    }):  # fmt: skip
        yield f"modules {', '.join(own)} attend in a way of their own, to a rank's tokens"
    if any("expert_capacity" in names_in(type(x)) for x in model.modules()):
        yield "its experts take as many tokens as fit, counted among a rank's own"


def takes_positions(given: frozenset[str], hooks: tuple[str, ...]) -> bool:
    """Whether positions reach its layers; others' ``**`` may swallow them."""
    names = {"position_ids"} if "attention" in hooks else {"position_ids", "**"}
    return bool({"positions", "alibi", "bias"} & {*hooks} or names & given)


def makes_chunks(module: nn.Module) -> bool:
    """Whether it makes masks of chunks, unless it is given masks by kind of layer."""
    return {"create_chunked_causal_mask", "causal_mask_mapping"} <= names_in_forward(type(module))


def has_written_attention(model: nn.Module) -> bool:
    """Whether it calls no attention function of transformers' registry."""
    return any(map(written_form, model.modules()))


def has_attention(module: nn.Module) -> bool:
    """Whether its attention is one that a ring can compute."""
    return written_form(module) is not None or _calls_registry(type(module))


def _calls_registry(cls: type) -> bool:
    return reads_global(cls, "AttentionInterface")


def makes_masks(cls: type) -> bool:
    """Whether its code calls mask functions of transformers."""
    return any(map(is_mask_function, names_in(cls)))


def is_mask_function(name: str) -> bool:
    """Whether a name is one of those."""
    return name.startswith("create_") and "mask" in name


def name_of(model: nn.Module) -> str:
    """The name of its class, not of the one that FSDP puts before it."""
    return next(x.__name__ for x in type(model).__mro__ if not x.__module__.startswith("torch."))


def pooling_of(model: Any) -> str | None:
    """What is one entry a sequence among the outputs."""
    heads = [base.__name__ for base in type(model).__mro__]
    if found := [word for word in _POOLED_HEADS if any(word in head for head in heads)]:
        return found[0]
    own = next(x.__name__ for x in type(model).__mro__ if "forward" in vars(x))
    if any(word in own for word in _TOKEN_HEADS):  # some say that they return something else
        return None
    for output in _output_types(model):
        if any(word in output.__name__ for word in _POOLED_TYPES):
            return str(output.__name__)
        for each in fields(output):
            if each.name in _POOLED and getattr(model, "pooler", model) is not None:
                return _POOLED[each.name]
    return None


def _output_types(model: Any) -> list[Any]:
    """Classes of outputs that ``forward`` is annotated with."""
    try:
        kind = typing.get_type_hints(forward_of(type(model))).get("return")
    except (NameError, TypeError, AttributeError):
        return []
    return [x for x in (kind, *typing.get_args(kind)) if isinstance(x, type) and is_dataclass(x)]


def pooled_words(model: Any, pooling: str) -> str:
    """Why a model that does so is not exact on split sequences."""
    name = name_of(model)
    if pooling == "pooler_output":
        return (
            f"{name} makes a pooler_output of one token, which one rank has; build it with "
            f"add_pooling_layer=False, or take the hidden states of a model without pooling"
        )
    return (
        f"{name} pools ({pooling}): it makes one output of a sequence, of which a rank holds a part; "
        f"run the model without that head, pool ContextParallel.unshard(hidden states, grad='sum'), "
        f"and divide the loss by cp_size"
    )


# A release of transformers may rename an argument or a method. A hook that found nothing would
# leave each rank with positions, biases or masks of its own tokens, and nothing would tell.

_COUNTER = "create_position_ids_from_input_ids"

#: First arguments of recurrent layers, which are gathered, and others: gathered, unread, or none.
_RECURRENT_INPUTS = frozenset({"hidden_states", "input_states"})
_RECURRENT_OTHERS = CACHES | {
    "**", "attention_mask", "cache_params", "position_embeddings", "position_ids", "self", "seq_idx",
    "use_cache",
}  # fmt: skip


def missing_names(model: Any, parts: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield a reason for each name that a hook of this model needs, and its code does not have."""
    for module in parts.values():
        yield from (lacks(type(module).__name__, name) for name in _missing_in(module))
    for name in {form.slopes for x in parts.values() if (form := written_form(x))} - {""}:
        owners = [type(x) for x in parts.values() if callable(vars(type(x)).get(name))]
        if not any(name in names_in_forward(cls) for cls in owners):
            yield lacks(name_of(model), f"{name}()")
    if is_pair(model):
        yield from _missing_in_pair(model)
    if not any(_COUNTER in names_in(type(x)) for x in parts.values()) and any(
        isinstance(x, nn.Embedding) and x.padding_idx is not None and "position" in name
        for name, x in parts.items()
    ):
        yield lacks(f"{name_of(model)}, whose position embeddings have a padding_idx,", _COUNTER)


def _missing_in(module: nn.Module) -> Iterator[str]:
    """Yield names that the hooks of one module need."""
    names, parameters = names_in_forward(type(module)), parameters_of(type(module))
    config = getattr(module, "config", None)
    form = written_form(module)
    if form is not None and form.local and not hasattr(module, form.local):
        yield form.local
    if form is not None and form.local and not hasattr(config, "window_size"):
        yield "config.window_size"
    if makes_chunks(module):
        yield from sorted({"attention_mask", "position_ids"} - parameters)
        if not hasattr(config, "attention_chunk_size"):
            yield "config.attention_chunk_size"
    elif "create_chunked_causal_mask" in names:
        yield "causal_mask_mapping"
    yield from _missing_for_bias(module, names)
    yield from _missing_for_positions(module, names, parameters)
    if is_recurrent(module):
        if not _RECURRENT_INPUTS & parameters:
            yield f"argument {' or '.join(sorted(_RECURRENT_INPUTS))}"
        if others := sorted(parameters - _RECURRENT_INPUTS - _RECURRENT_OTHERS):
            yield f"known use of its argument {', '.join(others)}"


def _missing_for_bias(module: nn.Module, names: frozenset[str]) -> Iterator[str]:
    if makes_bias(module):
        yield from sorted({"compute_bias", "has_relative_attention_bias"} - names)
    elif inspect.isfunction(getattr(type(module), "compute_bias", None)):
        yield "argument past_seen_tokens of compute_bias"


def _missing_for_positions(
    module: nn.Module, names: frozenset[str], parameters: frozenset[str]
) -> Iterator[str]:
    """Yield what a module lacks that counts tokens from the first one that it is given."""
    if counts_queries(module):
        if len(CACHES & parameters) != 1:
            yield f"argument {' or '.join(sorted(CACHES))}"
        yield from sorted({"attention_mask", "hidden_states"} - parameters)
    elif has_attention(module) and "arange" in names and "position_ids" not in names:
        yield "get_seq_length of a cache, nor position_ids, beside its arange"
    is_embedding = "Position" in type(module).__name__ and "position_ids" in parameters
    if is_embedding and "arange" in names and not PAST_LENGTHS & parameters:
        yield f"argument {' or '.join(sorted(PAST_LENGTHS))}"


def _missing_in_pair(model: Any) -> Iterator[str]:
    """Yield reasons that lie in an encoder-decoder's arguments, and in what places its tokens."""
    for name in sorted({"attention_mask", "decoder_attention_mask"} - parameters_of(type(model))):
        yield lacks(name_of(model), f"argument {name}")
    for part in (model.get_encoder(), model.get_decoder()):
        if any(_COUNTER not in names_in_forward(type(x)) for x in filter(_counts, part.modules())):
            yield lacks(type(part).__name__, f"module that calls its {_COUNTER}")
        if "position_ids" not in parameters_of(type(part)) and not any(
            makes_positions(x) or counts_positions(x) or makes_bias(x) for x in part.modules()
        ):
            yield lacks(type(part).__name__, "position_ids, nor module that makes positions")


def _counts(module: nn.Module) -> bool:
    return counts_positions(module) and not makes_positions(module)
