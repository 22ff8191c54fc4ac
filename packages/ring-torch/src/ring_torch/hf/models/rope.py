"""Rotary embeddings whose frequencies depend on the largest position of their input.

In transformers these are the types ``longrope`` (one of two sets of factors) and ``dynamic`` (NTK
scaling). A rank sees the positions of its own tokens alone: ``hf.parallelize`` lets it see the
largest one of the whole sequence, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ring_core import UnsupportedError
from ring_torch.hf.models.code import names_in_forward


def depends_on_length(module: nn.Module) -> bool:
    """Return True for rotary embeddings that depend on the largest position they are given."""
    types = _types_of(module)
    return any(map(_is_by_length, types)) or (
        bool(types) and "max" in names_in_forward(type(module))  # PhiMoE looks itself
    )


def check_last_positions(model: nn.Module, last_positions: tuple[int, ...]) -> None:
    """Refuse a batch that is split by hand if ranks would turn its tokens by different angles.

    Args:
        model: The model, whose rotary embeddings have no hooks.
        last_positions: Largest position id on each rank.

    Raises:
        UnsupportedError: Ranks would use other frequencies than the whole sequence has.
    """
    low, high = min(last_positions), max(last_positions)
    if low == high:
        return
    for rope_type, longest in _limits(model):
        if (rope_type == "dynamic" or low < longest) and longest <= high:
            raise UnsupportedError(
                f"rotary embeddings of type {rope_type} depend on the largest position, and a "
                f"rank's own is from {low} to {high}, beyond {longest}: ranks would turn by other "
                f"angles. Give the model to ring_torch.hf.parallelize, and whole batches to it: "
                f"there every rank uses the largest position of the whole sequence"
            )


def _limits(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield kinds of rotary embeddings, and the position from which on their frequencies change."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        rope = getattr(config, "rope_parameters", None)
        if rope is None or not depends_on_length(module):
            continue
        for parameters in (rope, *(x for x in rope.values() if isinstance(x, Mapping))):
            longest = config.max_position_embeddings
            if "dynamic" in str(parameters.get("rope_type")):
                yield "dynamic", longest
            elif "rope_type" in parameters:
                yield (
                    str(parameters["rope_type"]),
                    parameters.get("original_max_position_embeddings", longest),
                )


def _types_of(module: nn.Module) -> tuple[str, ...]:
    """Return the ``rope_type`` of a module, or those of its kinds of layers; empty for others."""
    types = getattr(module, "rope_type", None)
    values = types.values() if isinstance(types, Mapping) else (types,)
    return tuple(x for x in values if isinstance(x, str))


def _is_by_length(rope_type: str) -> bool:
    """Return True for a type whose frequencies transformers chooses by the largest position."""
    return rope_type == "longrope" or "dynamic" in rope_type
