"""Names that hooks need of a model's code, and that a release of transformers may have renamed.

If a hook then did nothing, each rank would count positions from its own first token, or see its own
tokens only, without an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ring_torch.hf.models.classes import (
    CACHES,
    PAST_LENGTHS,
    counts_positions,
    counts_queries,
    eager_attention_spec,
    has_attention,
    is_pair,
    is_whole_embedding,
    makes_bias,
    makes_chunks,
    makes_positions,
    name_of,
)
from ring_torch.hf.models.code import names_in, names_in_forward, parameters_of
from ring_torch.hf.models.recurrent import is_recurrent
from ring_torch.hf.models.releases import lacks
from ring_torch.hf.models.rope import depends_on_length

_COUNTER = "create_position_ids_from_input_ids"

#: First arguments of modules that run on whole sequences, which are gathered, and their other known
#: arguments.
_WHOLE_INPUTS = frozenset({"hidden_states", "input_states", "input_ids"})
_WHOLE_OTHERS = CACHES | {
    "**", "attention_mask", "cache_params", "inputs_embeds", "position_embeddings", "position_ids", "self", "seq_idx",
    "use_cache",
}  # fmt: skip


def missing_names(model: Any, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield a reason for each name that a hook of this model needs, and its code does not have.

    A model with a reason is refused. So is one with a module that runs on whole sequences and has
    an argument that no hook knows.

    Args:
        model: The model, without wrappers.
        modules: Its modules that see the sequence of tokens, by name.
    """
    for module in modules.values():
        yield from (lacks(type(module).__name__, name) for name in _missing_in(module))
    for name in {spec.slopes for x in modules.values() if (spec := eager_attention_spec(x))} - {""}:
        owners = [type(x) for x in modules.values() if callable(vars(type(x)).get(name))]
        if not any(name in names_in_forward(cls) for cls in owners):
            yield lacks(name_of(model), f"{name}()")
    if is_pair(model):
        yield from _missing_in_pair(model)
    if not any(_COUNTER in names_in(type(x)) for x in modules.values()) and any(
        isinstance(x, nn.Embedding) and x.padding_idx is not None and "position" in name
        for name, x in modules.items()
    ):
        yield lacks(f"{name_of(model)}, whose position embeddings have a padding_idx,", _COUNTER)


def _missing_in(module: nn.Module) -> Iterator[str]:
    """Yield what the hooks of one module need and do not find in its code, for :func:`lacks`."""
    names, parameters = names_in_forward(type(module)), parameters_of(type(module))
    config = getattr(module, "config", None)
    spec = eager_attention_spec(module)
    if spec is not None and spec.local and not hasattr(module, spec.local):
        yield spec.local
    if spec is not None and spec.local and not hasattr(config, "window_size"):
        yield "config.window_size"
    if makes_chunks(module):
        yield from sorted({"attention_mask", "position_ids"} - parameters)
        if not hasattr(config, "attention_chunk_size"):
            yield "config.attention_chunk_size"
    elif "create_chunked_causal_mask" in names:
        yield "causal_mask_mapping"
    yield from _missing_for_bias(module, names)
    yield from _missing_for_positions(module, names, parameters)
    if is_recurrent(module) or is_whole_embedding(module):
        if not _WHOLE_INPUTS & parameters:
            yield f"argument {' or '.join(sorted(_WHOLE_INPUTS))}"
        if unknown := sorted(parameters - _WHOLE_INPUTS - _WHOLE_OTHERS):
            yield f"known use of its argument {', '.join(unknown)}"


def _missing_for_bias(module: nn.Module, names: frozenset[str]) -> Iterator[str]:
    """Yield the names that a relative position bias needs and a module's code does not have."""
    if makes_bias(module):
        yield from sorted({"compute_bias", "has_relative_attention_bias"} - names)
    elif inspect.isfunction(getattr(type(module), "compute_bias", None)):
        yield "argument past_seen_tokens of compute_bias"


def _missing_for_positions(
    module: nn.Module, names: frozenset[str], parameters: frozenset[str]
) -> Iterator[str]:
    """Yield the names missing in a module that counts positions from its input's first token."""
    if counts_queries(module):
        if len(CACHES & parameters) != 1:
            yield f"argument {' or '.join(sorted(CACHES))}"
        yield from sorted({"attention_mask", "hidden_states"} - parameters)
    elif has_attention(module) and "arange" in names and "position_ids" not in names:
        yield "get_seq_length of a cache, nor position_ids, beside its arange"
    if depends_on_length(module) and "position_ids" not in parameters:
        yield "argument position_ids"
    is_embedding = "Position" in type(module).__name__ and "position_ids" in parameters
    if is_embedding and "arange" in names and not PAST_LENGTHS & parameters:
        yield f"argument {' or '.join(sorted(PAST_LENGTHS))}"


def _missing_in_pair(model: Any) -> Iterator[str]:
    """Yield reasons against an encoder-decoder: missing arguments, or no use of positions."""
    for name in sorted({"attention_mask", "decoder_attention_mask"} - parameters_of(type(model))):
        yield lacks(name_of(model), f"argument {name}")
    for submodel in (model.get_encoder(), model.get_decoder()):
        # Modules that count positions from token ids alone, not from a length.
        counters = (x for x in submodel.modules() if counts_positions(x) and not makes_positions(x))
        if any(_COUNTER not in names_in_forward(type(x)) for x in counters):
            yield lacks(type(submodel).__name__, f"module that calls its {_COUNTER}")
        if "position_ids" not in parameters_of(type(submodel)) and not any(
            makes_positions(x) or counts_positions(x) or makes_bias(x) for x in submodel.modules()
        ):
            yield lacks(type(submodel).__name__, "position_ids, nor module that makes positions")
