"""Set ring attention as a model's ``attn_implementation``, and what it had before back again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from ring_core import StrategyConfig, UnsupportedError
from ring_torch.hf.models.check import is_of_transformers, text_modules, towers
from ring_torch.hf.models.classes import has_attention, has_eager_attention, name_of
from ring_torch.hf.models.releases import lacks
from ring_torch.hf.register import attention_of, is_ring, register, registered_name, strategy_of


def set_ring_attention(model: Any, strategy: StrategyConfig) -> Callable[[], object]:
    """Set ring attention on the model, unless it has it; return a function that sets its own back.

    Towers for images or sound get whole inputs on every rank. They keep their attention, or get
    that of :func:`_whole_attention` if it is a ring's.

    Raises:
        ValueError: It has ring attention that was registered with another strategy.
        UnsupportedError: ``set_attn_implementation`` does not reach the model's attention.
    """
    if is_ring(attention_of(model)):
        own = strategy_of(attention_of(model))
        if strategy not in (own, StrategyConfig("auto")):
            raise ValueError(
                f"strategy={strategy.name!r}: the model's attention {attention_of(model)!r} was "
                f"registered with strategy={own.name!r}. Instead: leave strategy out here, or "
                f"register the attention with this one, under a name of its own"
            )
        # Loaded with ring attention everywhere: towers get whole inputs, which it cannot attend to.
        with_ring = [
            x for x in towers(model)
            if is_ring(attention_of(x)) and x.config is not model.config
        ]  # fmt: skip
        tower_attention = [(x.config, attention_of(x)) for x in with_ring]
        _set_attention((x.config, _whole_attention(x)) for x in with_ring)
        return partial(_set_attention, tower_attention)
    attention_before = [
        (config, config._attn_implementation)  # noqa: SLF001 - transformers has no other name
        for config in _configs(model)
    ]
    tower_attention = [(module.config, attention_of(module)) for module in towers(model)]
    set_attention = model.set_attn_implementation
    # transformers refuses to set attention on a model that writes out its own: set the field.
    if has_eager_attention(model):
        set_attention = partial(setattr, model.config, "_attn_implementation")
    set_attention(register(registered_name(strategy), strategy=strategy))
    # In some models, set_attn_implementation changes the text part only. So look at all text
    # modules that attend, not at the model's own config.
    attending = [x for _, x in text_modules(model) if has_attention(x) and hasattr(x, "config")]
    if not all(is_ring(attention_of(x)) for x in attending or [model]):
        _set_attention(attention_before)
        raise UnsupportedError(lacks(name_of(model), "attention that set_attn_implementation sets"))
    _set_attention(
        [(config, name) for config, name in tower_attention if config is not model.config]
    )
    return partial(_set_attention, attention_before)


def _whole_attention(tower: Any) -> str:
    """Return the attention that transformers gives such a model by default: sdpa where it can."""
    return "sdpa" if tower._supports_sdpa else "eager"  # noqa: SLF001 - it has no other name


def _configs(model: Any) -> Iterator[Any]:
    """Yield the configs of a model and of its parts, each before the configs nested in it."""
    pending = [model.config, *(x.config for x in model.modules() if is_of_transformers(x))]
    while pending:
        config = pending.pop(0)
        yield config
        inner = (getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())
        pending += [x for x in inner if x is not None]


def _set_attention(attention: Iterable[tuple[Any, str]]) -> None:
    """Set the attention of configs in the order given; each also sets those nested in it."""
    for config, name in attention:
        config._attn_implementation = name  # noqa: SLF001 - transformers has no other name
