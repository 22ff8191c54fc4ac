"""Whether a model of transformers makes one output of a sequence, told from its classes."""

from __future__ import annotations

import typing
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from ring_torch.models.code import forward_of

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
    function = forward_of(type(model))
    try:
        kind = typing.get_type_hints(function).get("return")
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
        f"run the model without that head, ContextParallel.unshard the hidden states and pool those"
    )
