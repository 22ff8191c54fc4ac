"""Hooks inside a model, where its attention function alone is not enough."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ring_core import UnsupportedError
from ring_torch.hf.masks import LayerMask
from ring_torch.hf.models.check import text_parts
from ring_torch.hf.models.classes import (
    counts_positions,
    is_recurrent,
    makes_bias,
    makes_chunks,
    makes_positions,
    written_form,
)
from ring_torch.hf.models.code import by_name, parameters_of
from ring_torch.hf.models.hooks import ModelHooks, replace_attribute
from ring_torch.hf.models.parts import tell_keys, text_model
from ring_torch.hf.models.sealed import ShardedMask
from ring_torch.hf.scores import Term, WrittenAttention

_Undo = Callable[[], object]


def wire(hooks: ModelHooks, model: Any) -> Iterator[_Undo]:
    """Put on what a report's ``hooks`` name; yields what takes each off."""
    if (text := text_model(model)) is not None:
        hooks.takes_merged = True
        yield text.register_forward_pre_hook(hooks.split_text, with_kwargs=True).remove
    if hooks.is_pair:
        decoder = model.get_decoder()
        yield decoder.register_forward_pre_hook(tell_keys, with_kwargs=True).remove
    if "positions" in hooks.report.hooks or hooks.is_pair:
        yield from _positions(model)
    has_chunks = "chunks" in hooks.report.hooks
    for _, module in text_parts(model):
        if (form := written_form(module)) is not None:
            layer = WrittenAttention(form, model.config)
            yield module.register_forward_pre_hook(layer.begin, with_kwargs=True).remove
            yield module.register_forward_hook(layer.end, with_kwargs=True, always_call=True).remove
        if has_chunks and makes_chunks(module):  # it would read its mask to make them
            yield module.register_forward_pre_hook(_chunk_masks, with_kwargs=True).remove
        if has_chunks and getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            yield module.register_forward_pre_hook(_add_offsets, with_kwargs=True).remove
        if makes_bias(module):
            bias = _PositionBias(module)
            yield module.register_forward_pre_hook(bias.begin, with_kwargs=True).remove
            yield module.register_forward_hook(bias.end, always_call=True).remove
            yield replace_attribute(module, "compute_bias", bias.compute)
            yield replace_attribute(module, "has_relative_attention_bias", True)
        if is_recurrent(module):
            whole = _WholeLayer()
            yield module.register_forward_pre_hook(whole.gather, with_kwargs=True).remove
            yield module.register_forward_hook(whole.scatter).remove
            yield module.register_forward_hook(whole.end, always_call=True).remove
    yield from _slopes(model)


class _Forward:
    """The batch that a module's forward is of, while it is under way.

    It is told by the mask that the forward is given: where checkpointing runs it again, other
    batches may have come since.
    """

    def __init__(self) -> None:
        self._mask: ShardedMask | None = None

    @property
    def mask(self) -> ShardedMask:
        """The batch.

        Raises:
            UnsupportedError: None is known.
        """
        if self._mask is None:
            raise UnsupportedError(
                "a part of this model that has to know where its tokens stand was called, or run "
                "again by checkpointing, without the mask of a split batch: call the whole model, and "
                "checkpoint whole layers, or modules that are given the attention_mask"
            )
        return self._mask

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the forward: keep the batch that it is given."""
        mask = by_name(module, args, kwargs).get("attention_mask")
        mask = mask.batch if isinstance(mask, LayerMask) else mask
        self._mask = mask if isinstance(mask, ShardedMask) else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, *_: object) -> None:
        """After the forward, also where it failed: forget it."""
        self._mask = None


class _WholeLayer(_Forward):
    """The hooks of a layer that mixes tokens one after another: it is given whole sequences."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gather(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Before it: the whole sequence in place of this rank's part."""
        self.begin(module, args, kwargs)
        given = by_name(module, args, kwargs)
        name = next(iter(given))
        given[name] = self.mask.unshard(given[name])
        given["attention_mask"] = self.mask.whole
        if isinstance(given.get("position_ids"), Tensor):
            given["position_ids"] = self.mask.unshard(given["position_ids"])
        return (), given

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def scatter(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """After it: this rank's part of what it made.

        Raises:
            UnsupportedError: It made something else than one row of each token.
        """
        first = output[0] if isinstance(output, tuple) else output
        if first.shape[:2] != (self.mask.shape[0], self.mask.length):
            raise UnsupportedError(f"{type(module).__name__} returns {tuple(first.shape)}")
        own = self.mask.shard(first)
        return (own, *output[1:]) if isinstance(output, tuple) else own


class _Positions(_Forward):
    """The positions of this rank's tokens, for a module that would count them from 0."""

    def count(self, *_: object, **__: object) -> Tensor:
        """In place of positions that are counted among tokens: ``[B, T_local]``."""
        return self.mask.position_ids

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def add(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a module that is told a sequence's length: where the tokens stand.

        The module that calls it makes positions from 0 on, or none.
        """
        mask = self.mask
        given = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        at = mask.sharding.positions(mask.seq_len, device=mask.position_ids.device)
        old = given.arguments.get("position_ids")
        if old is not None and old.shape != at.shape:
            raise UnsupportedError(
                f"{type(module).__name__} is given positions {tuple(old.shape)}, other than from 0 on"
            )
        given.arguments["position_ids"] = at.where(at < mask.length, 0)  # 0 for the padding
        return given.args[1:], given.kwargs


def _positions(model: nn.Module) -> Iterator[_Undo]:
    """Put hooks on modules that make positions of what they are given, and on those round them."""
    for name, module in model.named_modules():
        is_told = makes_positions(module)
        if not is_told and not counts_positions(module):
            continue
        positions, stack = _Positions(), _stack_of(model, name)
        yield stack.register_forward_pre_hook(positions.begin, with_kwargs=True).remove
        yield stack.register_forward_hook(positions.end, always_call=True).remove
        if is_told:
            yield module.register_forward_pre_hook(positions.add, with_kwargs=True).remove
        else:
            yield replace_attribute(module, "create_position_ids_from_input_ids", positions.count)


def _stack_of(model: nn.Module, name: str) -> nn.Module:
    """Return the nearest module round that of a name which is given a mask."""
    while name:
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
        if "attention_mask" in parameters_of(type(module)):
            return module
    raise AssertionError("a model of transformers takes an attention_mask")


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

    def end(self, *_: object) -> None:
        """After it, also where it failed."""
        self.mask = None

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
    if attention_mask.has_holes:
        raise UnsupportedError(
            "attention_mask with padding between tokens: this model's ALiBi counts distances without "
            "it, and a ring's with it; put padding to the left or right of all tokens"
        )
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

    def update(self, key: Tensor, value: Tensor, _: int) -> tuple[Tensor, Tensor]:
        return key, value


def _add_offsets(
    _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before attention that scales queries by where they stand, counted from a rank's first."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, LayerMask) and kwargs.get("past_key_values") is None:
        at = mask.batch.sharding.positions(
            mask.batch.seq_len, device=kwargs["hidden_states"].device
        )
        offsets = at - torch.arange(len(at), device=at.device)
        kwargs = {**kwargs, "past_key_values": _Offsets(offsets)}
    return args, kwargs
