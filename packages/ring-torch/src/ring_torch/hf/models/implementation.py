"""Attention implementations of models, which transformers keeps by name in their configs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ring_torch.hf.models.check import is_of_transformers


def attention_of(model: Any) -> str:
    """Return the name of a model's attention implementation."""
    name: str = model.config._attn_implementation  # noqa: SLF001 - transformers has no other name
    return name


def whole_attention(tower: Any) -> str:
    """Return the attention that transformers gives such a model by default: sdpa where it can."""
    return "sdpa" if tower._supports_sdpa else "eager"  # noqa: SLF001 - it has no other name


def attention_of_parts(model: Any) -> list[tuple[Any, str]]:
    """Return the configs of a model and of its parts, each before those nested in it, with names.

    The names are those of their attention implementations.
    """
    pending = [model.config, *(x.config for x in model.modules() if is_of_transformers(x))]
    attention: list[tuple[Any, str]] = []
    while pending:
        config = pending.pop(0)
        attention.append((config, config._attn_implementation))  # noqa: SLF001 - as `attention_of`
        inner = (getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())
        pending += [x for x in inner if x is not None]
    return attention


def set_attention(attention: Iterable[tuple[Any, str]]) -> None:
    """Set the attention of configs in the order given; each also sets those nested in it."""
    for config, name in attention:
        config._attn_implementation = name  # noqa: SLF001 - transformers has no other name
