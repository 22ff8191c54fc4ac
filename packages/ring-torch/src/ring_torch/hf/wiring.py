"""Hooks inside a model, where its attention function alone is not enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ring_core import UnsupportedError
from ring_torch.hf.masks import LayerMask
from ring_torch.hf.models.check import text_parts
from ring_torch.hf.models.classes import (
    CACHES,
    counts_positions,
    counts_queries,
    is_recurrent,
    makes_bias,
    makes_chunks,
    makes_positions,
    written_form,
)
from ring_torch.hf.models.code import by_name, parameters_of
from ring_torch.hf.models.hooks import ModelHooks, replace_attribute
from ring_torch.hf.models.parts import Merged, Pair, Part, text_model
from ring_torch.hf.models.sealed import ShardedMask
from ring_torch.hf.scores import Term, WrittenAttention

_Undo = Callable[[], object]


def wire(hooks: ModelHooks, model: Any) -> Iterator[_Undo]:
    """Put on what a report's ``hooks`` name; yields what takes each off."""
    has_chunks = "chunks" in hooks.report.hooks
    for _, module in text_parts(model):
        if (form := written_form(module)) is not None:
            layer = WrittenAttention(form, model.config)
            yield module.register_forward_pre_hook(layer.begin, with_kwargs=True).remove
            yield module.register_forward_hook(layer.end, with_kwargs=True, always_call=True).remove
        if has_chunks and makes_chunks(module):  # it would read its mask to make them
            yield module.register_forward_pre_hook(_chunk_masks, with_kwargs=True).remove
        if counts_queries(module):
            yield module.register_forward_pre_hook(_add_offsets, with_kwargs=True).remove
        if makes_bias(module):
            bias = _PositionBias(module)
            yield module.register_forward_pre_hook(bias.begin, with_kwargs=True).remove
            yield replace_attribute(module, "compute_bias", bias.compute)
            yield replace_attribute(module, "has_relative_attention_bias", True)
        if is_recurrent(module):
            part = hooks.part
            yield module.register_forward_pre_hook(part.gather, with_kwargs=True).remove
            yield module.register_forward_hook(part.scatter).remove
    yield from _slopes(model)
    if (text := text_model(model)) is not None:
        hooks.takes_merged = True
        yield text.register_forward_pre_hook(Merged(hooks.part).split, with_kwargs=True).remove
    if hooks.is_pair:
        pair, decoder = Pair(hooks.source, hooks.part), model.get_decoder()
        yield decoder.register_forward_pre_hook(pair.cross, with_kwargs=True).remove
        yield from _positions(hooks.source, model.get_encoder())
        yield from _positions(hooks.part, decoder)
    elif "positions" in hooks.report.hooks:
        yield from _positions(hooks.part, model)


def _positions(part: Part, model: nn.Module) -> Iterator[_Undo]:
    """Positions of this rank's tokens, where a module makes them of what it is given."""
    for module in model.modules():
        if makes_positions(module):
            yield module.register_forward_pre_hook(part.add_positions, with_kwargs=True).remove
        elif counts_positions(module):
            yield replace_attribute(
                module, "create_position_ids_from_input_ids", part.counted_positions
            )


class _PositionBias:
    """The bias of relative positions of a module: rows of this rank's queries, all columns.

    Args:
        module: As T5's attention, which makes it of as many queries and keys as it sees.
    """

    def __init__(self, module: Any) -> None:
        self.own: Callable[..., Tensor] = module.compute_bias
        self.has_bias: bool = module.has_relative_attention_bias
        self.mask: LayerMask | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before its forward: whom its queries see."""
        masks = [x for x in (*args, *kwargs.values()) if isinstance(x, LayerMask)]
        self.mask = masks[0] if len(masks) == 1 else None

    def compute(
        self, queries: int, keys: int, device: Any = None, past_seen_tokens: object = 0
    ) -> Tensor:
        """``[1, H, T_local, T_kv]``; of cross attention, which has none, a single zero."""
        del queries, keys, past_seen_tokens
        mask = self.mask
        if mask is None or (mask.keys is None) is not self.has_bias:
            raise UnsupportedError("relative positions of tokens of two sequences, or of no batch")
        if mask.keys is not None:
            return torch.zeros((), device=device)
        at = mask.batch.sharding.positions(mask.batch.seq_len)
        offsets = (at - torch.arange(len(at)))[:, None].to(device)
        return self.own(len(at), mask.batch.seq_len, device=device, past_seen_tokens=offsets)


def _slopes(model: Any) -> Iterator[_Undo]:
    """In place of ALiBi's tensor, of positions from 0 on: its slopes; attention makes the rest.

    A model adds ``slope * j``. Softmax does not see what is added to a whole row, so that is
    as ``-slope * (i - j)``.
    """
    names = {form.slopes for _, x in text_parts(model) if (form := written_form(x)) is not None}
    for _, module in text_parts(model):
        for name in names:
            if name and name in vars(type(module)):
                yield replace_attribute(module, name, partial(_SLOPES[name], getattr(module, name)))


def _of_mask(
    own: Callable[..., Tensor], attention_mask: ShardedMask, *args: Any, **kwargs: Any
) -> Term:
    slopes = _step(own(torch.ones(1, 2, dtype=torch.int64), *args, **kwargs))
    rows, length = attention_mask.shape
    return Term((rows * len(slopes), 1, length), slopes=slopes)


def _of_length(
    own: Callable[..., Tensor], heads: int, length: int, *args: Any, **kwargs: Any
) -> Term:
    return Term((heads, 1, length), slopes=_step(own(heads, 2, *args, **kwargs)))


def _step(pair: Tensor) -> Tensor:
    """Slopes of ALiBi, from what is added at two neighbours, ``[H, 1, 2]``."""
    return (pair[..., 1] - pair[..., 0]).flatten()


_SLOPES: Mapping[str, Callable[..., Term]] = {
    "build_alibi_tensor": _of_mask,
    "build_mpt_alibi_tensor": _of_length,
}


def _chunk_masks(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    mask = kwargs.get("attention_mask")
    if isinstance(mask, ShardedMask):
        size = module.config.attention_chunk_size
        chunks = LayerMask(mask, causal=True, chunk_size=size)
        if not mask.single:
            chunks = LayerMask(mask.with_chunks(size, kwargs["position_ids"]), causal=True)
        kwargs = {**kwargs, "attention_mask": {
            "full_attention": LayerMask(mask, causal=True), "chunked_attention": chunks,
        }}  # fmt: skip
    return args, kwargs


class _Offsets:
    """In place of a cache: it holds no keys, and says where tokens stand.

    Args:
        offsets: From a token's place on its rank to its position, ``[T_local]``.
    """

    def __init__(self, offsets: Tensor) -> None:
        self.offsets = offsets

    def get_seq_length(self, _: int = 0) -> Tensor:
        """What a model adds to a token's place."""
        return self.offsets

    def update(
        self, key: Tensor, value: Tensor, _: int, kwargs: object = None
    ) -> tuple[Tensor, Tensor]:
        """Keep nothing. Since transformers 5.24 it is given what attention takes besides."""
        del kwargs
        return key, value


def _add_offsets(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]]:
    """Before attention that scales queries by where they stand, counted from a rank's first."""
    given = by_name(module, args, kwargs)
    (cache,) = CACHES & parameters_of(type(module))
    masks = [x for x in given.values() if isinstance(x, LayerMask)]
    if len(masks) != 1 or given.get(cache) is not None:
        raise UnsupportedError(f"{type(module).__name__} is given a cache, or no mask of the batch")
    batch = masks[0].batch
    at = batch.sharding.positions(batch.seq_len, device=given["hidden_states"].device)
    return (), {**given, cache: _Offsets(at - torch.arange(len(at), device=at.device))}
