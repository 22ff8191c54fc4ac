"""What a model needs beside ring attention: hooks that ``hf.parallelize`` puts on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ring_torch.models.code import names_in, names_in_forward, parameters_of, reads_global
from ring_torch.models.pooling import name_of
from ring_torch.models.written import (
    counts_positions,
    is_recurrent,
    makes_bias,
    makes_positions,
    written_form,
)


def hooks_for(
    model: Any, parts: Mapping[str, nn.Module], layers: tuple[str, ...]
) -> tuple[str, ...]:
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
        "chunks": "chunked_attention" in layers and any(map(makes_chunks, modules)),
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
    own = sorted({
        type(x).__name__
        for x in model.modules()
        if "Attention" in type(x).__name__ and not any(map(has_attention, x.modules()))
    })  # fmt: skip
    if own:
        yield f"modules {', '.join(own)} attend in a way of their own, to a rank's tokens"
    if any("expert_capacity" in names_in(type(x)) for x in model.modules()):
        yield "its experts take as many tokens as fit, counted among a rank's own"


def takes_positions(given: frozenset[str], hooks: tuple[str, ...]) -> bool:
    """Whether positions reach its layers; others' ``**`` may swallow them."""
    if {"positions", "alibi", "bias"} & {*hooks}:
        return True
    return bool(({"position_ids"} if "attention" in hooks else {"position_ids", "**"}) & given)


def makes_chunks(module: nn.Module) -> bool:
    """Whether it makes masks of chunks, unless it is given masks by kind of layer."""
    return {"create_chunked_causal_mask", "causal_mask_mapping"} <= names_in_forward(type(module))


def has_written_attention(model: nn.Module) -> bool:
    """Whether it calls no attention function of transformers' registry."""
    return any(map(written_form, model.modules()))


def has_attention(module: nn.Module) -> bool:
    """Whether its attention is one that a ring can compute."""
    return written_form(module) is not None or reads_global(type(module), "AttentionInterface")


def makes_masks(cls: type) -> bool:
    """Whether its code calls mask functions of transformers."""
    return any(map(is_mask_function, names_in(cls)))


def is_mask_function(name: str) -> bool:
    """Whether a name is one of those."""
    return name.startswith("create_") and "mask" in name
