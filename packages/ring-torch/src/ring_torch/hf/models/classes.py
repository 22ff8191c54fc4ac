"""Facts about transformers models that are read from their classes.

They say how a model attends, what it pools, and what it needs besides ring attention: hooks that
``hf.parallelize`` installs.
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
from ring_torch.hf.models.recurrent import is_recurrent

#: Heads in which token ``i`` predicts label ``i``: their loss does not shift labels.
_SAME_LABELS = ("ForMaskedLM", "ForTokenClassification")


@dataclass(frozen=True)
class EagerAttentionSpec:
    """Facts about a class whose forward writes out its attention as matrix products and a softmax.

    Attributes:
        hides_by_itself: True if it hides later tokens by a buffer, besides the mask that it is
            given.
        local: Name of its attribute that is ``"local"`` in layers with a window, of the config's
            ``window_size``; empty if it has none.
        slopes: Name of the function in its model that builds ALiBi's tensor; empty if it has none.
    """

    hides_by_itself: bool = False
    local: str = ""
    slopes: str = ""


_PLAIN = EagerAttentionSpec()

#: Parameter names for a KV cache, and for the number of tokens in it: before transformers 5.24,
#: and since.
CACHES = frozenset({"past_key_values", "cache"})
PAST_LENGTHS = frozenset({"past_key_values_length", "cache_length"})

#: Classes with written-out attention that are known to work, by name. ``tests/sweep`` runs each.
EAGER_ATTENTION: Mapping[str, EagerAttentionSpec] = MappingProxyType({
    "BigBirdPegasusSelfAttention": _PLAIN,
    "BigBirdSelfAttention": _PLAIN,
    "BloomAttention": EagerAttentionSpec(slopes="build_alibi_tensor"),
    "CodeGenAttention": _PLAIN,
    "FalconAttention": _PLAIN,
    "GPTJAttention": _PLAIN,
    "GPTNeoSelfAttention": EagerAttentionSpec(hides_by_itself=True, local="attention_type"),
    "GPTNeoXJapaneseAttention": _PLAIN,
    "MegatronBertSelfAttention": _PLAIN,
    "MptAttention": EagerAttentionSpec(slopes="build_mpt_alibi_tensor"),
    "MvpAttention": _PLAIN,
    "RemBertSelfAttention": _PLAIN,
    "RoFormerSelfAttention": _PLAIN,
    "TrOCRAttention": _PLAIN,
    "XGLMAttention": _PLAIN,
})  # fmt: skip


#: Embeddings that read the mask and all ids of a row, which run on whole ids on every rank.
WHOLE_EMBEDDINGS = frozenset({"EsmEmbeddings"})

#: Output fields with one entry for each sequence, not for each token, and their names in messages.
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


def is_whole_embedding(module: nn.Module) -> bool:
    """Return True for known embeddings of a token that depend on its whole sequence."""
    return type(module).__name__ in WHOLE_EMBEDDINGS


def eager_attention_spec(module: nn.Module) -> EagerAttentionSpec | None:
    """Return the facts of a known module with written-out attention; ``None`` for other modules.

    A class may call transformers' attention registry in a newer release; then it is ``None`` too.
    """
    spec = EAGER_ATTENTION.get(type(module).__name__)
    return None if spec is None or _calls_registry(type(module)) else spec


def makes_positions(module: nn.Module) -> bool:
    """Return True if a module makes position ids from a length when it is given none."""
    parameters = parameters_of(type(module))
    return (
        "Position" in type(module).__name__
        and "position_ids" in parameters
        and bool(PAST_LENGTHS & parameters)
    )


def counts_queries(module: nn.Module) -> bool:
    """Return True if attention scales queries by position, from a cache's length (Llama 4)."""
    names = names_in_forward(type(module))
    return has_attention(module) and {"arange", "get_seq_length"} <= names


def counts_positions(module: nn.Module) -> bool:
    """Return True if a module counts positions from token ids, leaving out padding (RoBERTa)."""
    return hasattr(type(module), "create_position_ids_from_input_ids")


def makes_bias(module: nn.Module) -> bool:
    """Return True if a module builds a relative position bias of the lengths it sees (T5)."""
    function = getattr(type(module), "compute_bias", None)
    return function is not None and "past_seen_tokens" in inspect.signature(function).parameters


def hooks_for(model: Any, modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Return the names of the hooks that a model needs, besides those for its batch and loss.

    Args:
        model: The model, without wrappers.
        modules: Its modules that see the sequence of tokens, by name.
    """
    specs = [spec for x in modules.values() if (spec := eager_attention_spec(x)) is not None]
    takes_position_ids = any(
        "position_ids" in parameters_of(type(x)) for x in modules.values() if makes_masks(type(x))
    )
    hooks = {
        "encoder-decoder": is_pair(model),
        "attention": bool(specs),
        "bias": any(map(makes_bias, modules.values())),
        "alibi": any(spec.slopes for spec in specs),
        "positions": (
            (not takes_position_ids and any(map(makes_positions, modules.values())))
            or (is_pair(model) and any(map(counts_positions, modules.values())))
        ),
        "recurrent": any(map(is_recurrent, modules.values())),
        "embeddings": any(map(is_whole_embedding, modules.values())),
        "chunks": any(map(makes_chunks, modules.values())),
        "offsets": any(map(counts_queries, modules.values())),
    }
    return tuple(name for name, is_needed in hooks.items() if is_needed)


def is_pair(model: Any) -> bool:
    """Return True for an encoder-decoder both of whose sequences are tokens."""
    return (
        "decoder_input_ids" in parameters_of(type(model))
        and not {"vision_config", "audio_config", "text_config"}
        & {*(model.config.sub_configs or ())}
        and model.main_input_name == "input_ids"
    )


def pair_reasons(model: Any) -> Iterator[str]:
    """Yield the reasons, if any, why an encoder-decoder cannot be split."""
    name = name_of(model)
    if not is_pair(model):
        yield (
            f"{name} has an encoder and a decoder, and not of tokens alone: split a decoder or an "
            f"encoder alone"
        )
        return
    parameters, submodels = parameters_of(type(model)), (model.get_encoder(), model.get_decoder())
    for submodel, argument in zip(submodels, ("position_ids", "decoder_position_ids"), strict=True):
        if "position_ids" in parameters_of(type(submodel)) and argument not in parameters:
            yield f"{name} takes no {argument}: its {type(submodel).__name__} would count from 0"
    if "encoder_attention_mask" not in parameters_of(type(model.get_decoder())):
        yield f"{name} has a decoder that takes no encoder_attention_mask"
    if unknown := sorted({
        type(x).__name__
        for x in model.modules()
        if "Attention" in type(x).__name__ and not any(map(has_attention, x.modules()))
    }):  # fmt: skip
        yield f"modules {', '.join(unknown)} attend in a way of their own, to a rank's tokens"
    if any("expert_capacity" in names_in(type(x)) for x in model.modules()):
        yield "its experts take as many tokens as fit, counted among a rank's own"


def takes_positions(parameters: frozenset[str], hooks: tuple[str, ...]) -> bool:
    """Return True if position ids reach a model's layers, as an argument or by hooks.

    Args:
        parameters: Parameters of the model's forward. A ``**`` counts, except for models with
            written-out attention, which may drop what it takes.
        hooks: The hooks that the model needs.
    """
    names = {"position_ids"} if "attention" in hooks else {"position_ids", "**"}
    return bool({"positions", "alibi", "bias"} & {*hooks} or names & parameters)


def makes_chunks(module: nn.Module) -> bool:
    """Return True if a module builds chunked masks, unless given a mask for each kind of layer."""
    return {"create_chunked_causal_mask", "causal_mask_mapping"} <= names_in_forward(type(module))


def has_eager_attention(model: nn.Module) -> bool:
    """Return True if any module of a model has written-out attention."""
    return any(map(eager_attention_spec, model.modules()))


def has_attention(module: nn.Module) -> bool:
    """Return True if ring attention can compute a module's attention."""
    return eager_attention_spec(module) is not None or _calls_registry(type(module))


def _calls_registry(cls: type) -> bool:
    """Return True if a class calls an attention function of transformers' registry."""
    return reads_global(cls, "AttentionInterface")


def makes_masks(cls: type) -> bool:
    """Return True if a class's code calls a mask function of transformers."""
    return any(map(is_mask_function, names_in(cls)))


def is_mask_function(name: str) -> bool:
    """Return True for names of transformers' mask functions, as ``create_causal_mask``."""
    return name.startswith("create_") and "mask" in name


def name_of(model: nn.Module) -> str:
    """Return the name of a model's class, skipping the one that FSDP puts before it."""
    return next(x.__name__ for x in type(model).__mro__ if not x.__module__.startswith("torch."))


def pooling_of(model: Any) -> str | None:
    """Return the name of the output or head that makes one entry a sequence, or ``None``."""
    heads = [base.__name__ for base in type(model).__mro__]
    if pooled := [word for word in _POOLED_HEADS if any(word in head for head in heads)]:
        return pooled[0]
    class_name = next(x.__name__ for x in type(model).__mro__ if "forward" in vars(x))
    # Annotations of some heads name another output class than they return: trust the head's name.
    if any(word in class_name for word in _TOKEN_HEADS):
        return None
    for output in _output_types(model):
        if any(word in output.__name__ for word in _POOLED_TYPES):
            return str(output.__name__)
        for output_field in fields(output):
            if output_field.name in _POOLED and getattr(model, "pooler", model) is not None:
                return _POOLED[output_field.name]
    return None


def _output_types(model: Any) -> list[Any]:
    """Return the dataclasses in the return annotation of a model's ``forward``."""
    try:
        annotation = typing.get_type_hints(forward_of(type(model))).get("return")
    except (NameError, TypeError, AttributeError):
        return []
    return [
        x
        for x in (annotation, *typing.get_args(annotation))
        if isinstance(x, type) and is_dataclass(x)
    ]


def pooling_reason(model: Any, pooling: str) -> str:
    """Return the reason why a model that pools is not exact on split sequences, and what to do."""
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


def position_offset(modules: Mapping[str, nn.Module]) -> int:
    """Return a first token's position id: ``padding_idx + 1`` if made from token ids, else 0."""
    # transformers counts from here if it makes position ids of token ids itself. ESM does so with
    # rotary embeddings as well, and those count from 0.
    paddings = (
        getattr(x, "padding_idx", None)
        for x in modules.values()
        if "create_position_ids_from_input_ids" in names_in(type(x))
        and getattr(x, "position_embedding_type", "") != "rotary"
    )
    return next((padding + 1 for padding in paddings if isinstance(padding, int)), 0)


def counts_real_tokens(module: nn.Module) -> bool:
    """Return True if a module makes position ids from the attention mask, as OPT does."""
    return "cumsum" in names_in_forward(type(module)) and (
        {"inputs_embeds", "attention_mask", "position_ids"} <= parameters_of(type(module))
    )


def predicts_labelled(model: Any) -> bool:
    """Return True if a model makes logits of labelled tokens alone (ModernBERT)."""
    names = {"sparse_prediction", "sparse_pred_ignore_index"}
    return getattr(model, "sparse_prediction", False) and names <= names_in_forward(type(model))


def shifts_labels(model: Any) -> bool:
    """Return True if the model's loss shifts labels, False if it takes them as they are."""
    if any(word in base.__name__ for word in _SAME_LABELS for base in type(model).__mro__):
        return False
    names = names_in_forward(type(model))
    if "loss_function" in names:
        # transformers picks the loss by the head: only these two do not shift.
        loss = getattr(model, "loss_function", None)
        return getattr(loss, "__name__", "") not in ("ForMaskedLMLoss", "ForTokenClassification")
    return not ({"CrossEntropyLoss", "cross_entropy"} & names) or any("shift" in n for n in names)


def labels_reason(model: Any) -> str:
    """Return the reason why a model's loss cannot be computed from a rank's labels, or nothing."""
    # Losses that pick tokens by the mask have these local variables.
    if not {"active_loss", "shift_attention_mask"} & names_in_forward(type(model)):
        return ""
    return (
        f"the loss of {name_of(model)} reads the attention_mask, and that of a split batch cannot be "
        f"read: leave labels out, and compute it on every rank from "
        f"ContextParallel.unshard(logits, grad='slice')"
    )
