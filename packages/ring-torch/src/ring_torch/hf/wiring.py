"""Forward hooks inside a transformers model, for what its attention function alone cannot do.

Examples are position ids that a module counts itself, relative position biases, ALiBi, chunked
masks, recurrent layers, and rotary embeddings that depend on a sequence's length.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ring_core import UnsupportedError
from ring_torch.capture import untraced
from ring_torch.hf.masks import LayerMask
from ring_torch.hf.mixers import MaskKeeper, SplitLayer, WholeLayer
from ring_torch.hf.models.check import text_modules
from ring_torch.hf.models.classes import (
    CACHES,
    counts_positions,
    counts_queries,
    eager_attention_spec,
    is_whole_embedding,
    makes_bias,
    makes_chunks,
    makes_positions,
)
from ring_torch.hf.models.code import by_name, parameters_of
from ring_torch.hf.models.hooks import ModelHooks, replace_attribute
from ring_torch.hf.models.parts import tell_keys, text_model
from ring_torch.hf.models.placeholders import ShardedMask
from ring_torch.hf.models.recurrent import is_recurrent
from ring_torch.hf.models.rope import depends_on_length
from ring_torch.hf.products import EagerAttentionHooks
from ring_torch.hf.scores import ScoreBias

_Undo = Callable[[], object]


def wire(hooks: ModelHooks, model: Any) -> Iterator[_Undo]:
    """Install hooks on the modules of a model that need them; yield a function that removes each.

    A module's class tells what it needs; hooks for positions and chunked masks are installed only
    if the model's report names them, or for positions in an encoder-decoder. Of a multimodal model
    ``hooks.takes_merged`` is set as well. Recurrent layers are split if ``hooks.splits_recurrent``.
    """
    if (text := text_model(model)) is not None:
        hooks.takes_merged = True
        yield text.register_forward_pre_hook(hooks.split_text, with_kwargs=True).remove
    if hooks.is_pair:
        decoder = model.get_decoder()
        yield decoder.register_forward_pre_hook(tell_keys, with_kwargs=True).remove
    if "positions" in hooks.report.hooks or hooks.is_pair:
        yield from _hook_positions(model)
    yield from _hook_rotary(model)
    has_chunks = "chunks" in hooks.report.hooks
    for _, module in text_modules(model):
        if (spec := eager_attention_spec(module)) is not None:
            layer = EagerAttentionHooks(spec, model.config)
            yield module.register_forward_pre_hook(layer.begin, with_kwargs=True).remove
            yield module.register_forward_hook(layer.end, with_kwargs=True, always_call=True).remove
        # Replace its masks before it makes chunked ones itself, which would read the given mask.
        if has_chunks and makes_chunks(module):
            yield module.register_forward_pre_hook(_chunk_masks, with_kwargs=True).remove
        if counts_queries(module):
            yield module.register_forward_pre_hook(_add_offsets, with_kwargs=True).remove
        if makes_bias(module):
            bias = _PositionBias(module)
            yield module.register_forward_pre_hook(bias.begin, with_kwargs=True).remove
            yield module.register_forward_hook(bias.end, always_call=True).remove
            yield replace_attribute(module, "compute_bias", bias.compute)
            yield replace_attribute(module, "has_relative_attention_bias", True)
        if is_recurrent(module) and hooks.splits_recurrent:
            split = SplitLayer(module, may_be_whole=hooks.recurrent == "auto")
            yield module.register_forward_pre_hook(split.begin, with_kwargs=True).remove
            yield replace_attribute(module, "forward", split.forward)
            yield module.register_forward_hook(split.end, always_call=True).remove
        elif is_recurrent(module) or is_whole_embedding(module):
            whole = WholeLayer()
            yield module.register_forward_pre_hook(whole.gather, with_kwargs=True).remove
            yield module.register_forward_hook(whole.scatter).remove
            yield module.register_forward_hook(whole.end, always_call=True).remove
    yield from _replace_slopes(model)


class _Positions(MaskKeeper):
    """Hooks that give a module the positions of this rank's tokens, where it would count from 0."""

    def count(self, *_: object, **__: object) -> Tensor:
        """Return the batch's position ids ``[B, T_local]`` instead of the module's own."""
        return self.mask.position_ids

    @untraced
    def add(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass ``position_ids [T_local]`` to a module that would make them from a length.

        Positions that it was given already are taken to count from 0, and are replaced.

        Raises:
            UnsupportedError: It was given positions of another shape.
        """
        mask = self.mask
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        positions = mask.sharding.positions(mask.seq_len, device=mask.position_ids.device)
        passed = bound.arguments.get("position_ids")
        if passed is not None and passed.shape != positions.shape:
            raise UnsupportedError(
                f"{type(module).__name__} is given positions of shape {tuple(passed.shape)}, and "
                f"only those that count from 0, {tuple(positions.shape)}, can be split; leave them out"
            )
        # Padding of the layout lies past the last position: give it position 0.
        bound.arguments["position_ids"] = positions.where(positions < mask.length, 0)
        return bound.args[1:], bound.kwargs


def _hook_positions(model: nn.Module) -> Iterator[_Undo]:
    """Install hooks on modules that make position ids, and on the modules around them.

    The inner module is given no mask, so the nearest module around it that is given one keeps it.
    """
    for name, module in model.named_modules():
        takes_positions = makes_positions(module)
        if not takes_positions and not counts_positions(module):
            continue
        positions, stack = _Positions(), _stack_of(model, name)
        yield stack.register_forward_pre_hook(positions.begin, with_kwargs=True).remove
        yield stack.register_forward_hook(positions.end, always_call=True).remove
        if takes_positions:
            yield module.register_forward_pre_hook(positions.add, with_kwargs=True).remove
        else:
            yield replace_attribute(module, "create_position_ids_from_input_ids", positions.count)


class _LastPosition(MaskKeeper):
    """Hooks that show rotary embeddings the largest position of the whole sequence.

    It is put behind a rank's own positions, and the angles of it are cut off again.
    """

    @untraced
    def append(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Append the position to ``position_ids [..., T_local]`` before the forward."""
        arguments = by_name(module, args, kwargs)
        positions = arguments["position_ids"]
        last = torch.as_tensor(
            self.mask.last_position, dtype=positions.dtype, device=positions.device
        ).expand(*positions.shape[:-1], 1)
        return (), {**arguments, "position_ids": torch.cat([positions, last], dim=-1)}

    @untraced
    def cut(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Return the angles ``[..., T_local, D]`` of this rank's tokens, after the forward.

        Raises:
            UnsupportedError: The module returns something else.
        """
        angles, length = output if isinstance(output, tuple) else (output,), self.mask.shape[1]
        if not all(isinstance(x, Tensor) and x.shape[-2:-1] == (length + 1,) for x in angles):
            raise UnsupportedError(
                f"{type(module).__name__} must return angles [..., T, D] of each position, as its "
                f"type depends on the length of the sequence; take another rope_type"
            )
        local = tuple(x.narrow(-2, 0, length) for x in angles)
        return local if isinstance(output, tuple) else local[0]


def _hook_rotary(model: nn.Module) -> Iterator[_Undo]:
    """Install hooks on rotary embeddings that depend on the length of the sequence."""
    rotary = {id(x) for _, x in text_modules(model) if depends_on_length(x)}
    for name, module in model.named_modules():
        if id(module) in rotary:
            positions, stack = _LastPosition(), _stack_of(model, name)
            yield stack.register_forward_pre_hook(positions.begin, with_kwargs=True).remove
            yield stack.register_forward_hook(positions.end, always_call=True).remove
            yield module.register_forward_pre_hook(positions.append, with_kwargs=True).remove
            yield module.register_forward_hook(positions.cut).remove


def _stack_of(model: nn.Module, name: str) -> nn.Module:
    """Return the nearest module around the named one whose forward takes an ``attention_mask``."""
    while name:
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
        if "attention_mask" in parameters_of(type(module)):
            return module
    raise AssertionError("a model of transformers takes an attention_mask")


class _PositionBias:
    """Hooks that compute the relative position bias of this rank's queries and all ranks' keys.

    Args:
        module: An attention module like T5's, whose ``compute_bias`` is replaced.
    """

    def __init__(self, module: Any) -> None:
        self.compute_own_bias: Callable[..., Tensor] = module.compute_bias
        self.has_bias: bool = module.has_relative_attention_bias
        self.mask: LayerMask | None = None

    @untraced
    def begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the layer's mask, which says where its queries are, before the forward."""
        masks = [x for x in (*args, *kwargs.values()) if isinstance(x, LayerMask)]
        self.mask = masks[0] if len(masks) == 1 else None

    def end(self, *_: object) -> None:
        """Forget the mask after the forward, also when it raised."""
        self.mask = None

    def compute(
        self, queries: int, keys: int, device: Any = None, past_seen_tokens: object = 0
    ) -> Tensor:
        """Return the bias ``[1, H, T_local, T_kv]``; a scalar 0 for cross attention.

        Raises:
            UnsupportedError: There is no mask, or it does not fit the kind of attention.
        """
        del queries, keys, past_seen_tokens
        mask = self.mask
        if mask is None or (mask.keys is None) is not self.has_bias:
            raise UnsupportedError(
                "relative positions need the mask of a split batch, and tokens of one sequence: call the whole "
                "model, with a batch that hf.parallelize splits"
            )
        if mask.keys is not None:
            return torch.zeros((), device=device)
        positions = mask.batch.sharding.positions(mask.batch.seq_len, device=device)
        # The module's queries are at `arange(T_local) + past_seen_tokens`: let that be their
        # positions in the whole sequence.
        offsets = (positions - torch.arange(len(positions), device=device))[:, None]
        return self.compute_own_bias(
            len(positions), mask.batch.seq_len, device=device, past_seen_tokens=offsets
        )


def _replace_slopes(model: Any) -> Iterator[_Undo]:
    """Replace functions that build ALiBi's tensor by ones that return slopes only.

    The ring kernel computes the bias ``-slope * (i - j)`` from positions. A model adds ``slope *
    j`` instead. The difference, ``slope * i``, is equal in a whole row, so the softmax is the same.
    """
    names = {
        spec.slopes for _, x in text_modules(model) if (spec := eager_attention_spec(x)) is not None
    }
    for _, module in text_modules(model):
        for name in names:
            if name and name in vars(type(module)):
                yield replace_attribute(module, name, partial(_SLOPES[name], getattr(module, name)))


def _slopes_from_mask(
    build_alibi: Callable[..., Tensor], attention_mask: ShardedMask, *args: Any, **kwargs: Any
) -> ScoreBias:
    """Return the ALiBi slopes of a model whose function takes the mask (Bloom, Falcon).

    Raises:
        UnsupportedError: There is padding between tokens, which the model would not count.
    """
    if attention_mask.has_holes:
        raise UnsupportedError(
            "attention_mask with padding between tokens: this model's ALiBi counts distances without "
            "it, and a ring's with it; put padding to the left or right of all tokens"
        )
    pair = torch.ones(1, 2, dtype=torch.int64, device="cpu")
    slopes = _slopes_from_pair(build_alibi(pair, *args, **kwargs))
    rows, length = attention_mask.shape
    return ScoreBias((rows * len(slopes), 1, length), slopes=slopes)


def _slopes_from_length(
    build_alibi: Callable[..., Tensor], heads: int, length: int, *args: Any, **kwargs: Any
) -> ScoreBias:
    """Return the ALiBi slopes of a model whose function takes heads and length (MPT)."""
    return ScoreBias(
        (heads, 1, length), slopes=_slopes_from_pair(build_alibi(heads, 2, *args, **kwargs))
    )


def _slopes_from_pair(pair: Tensor) -> Tensor:
    """Return ALiBi slopes ``[H]`` from a model's bias at two neighbouring keys, ``[H, 1, 2]``."""
    return (pair[..., 1] - pair[..., 0]).flatten()


_SLOPES: Mapping[str, Callable[..., ScoreBias]] = {
    "build_alibi_tensor": _slopes_from_mask,
    "build_mpt_alibi_tensor": _slopes_from_length,
}


def _chunk_masks(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace a model's mask by one for each kind of layer: full, and chunked attention (Llama 4).

    Otherwise the model would read its mask to make them. Without documents the kernel knows chunks;
    with documents each chunk becomes a document of its own.
    """
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
    """Stand-in for a KV cache that holds no keys, and tells a layer where this rank's tokens are.

    Args:
        offsets: Position of each local token minus its index on this rank, ``[T_local]``.
    """

    def __init__(self, offsets: Tensor) -> None:
        self.offsets = offsets

    def get_seq_length(self, _: int = 0) -> Tensor:
        """Return the offsets, which the model adds to a token's index to get its position."""
        return self.offsets

    def update(
        self, key: Tensor, value: Tensor, _: int, kwargs: object = None
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values as they are, and keep nothing.

        Since transformers 5.24 a layer passes its attention arguments too; they are not used.
        """
        del kwargs
        return key, value


def _add_offsets(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]]:
    """Give attention that scales queries by position a stand-in cache with this rank's positions.

    Raises:
        UnsupportedError: It is given a cache already, or no mask of the batch.
    """
    arguments = by_name(module, args, kwargs)
    (cache,) = CACHES & parameters_of(type(module))
    masks = [x for x in arguments.values() if isinstance(x, LayerMask)]
    if len(masks) != 1 or arguments.get(cache) is not None:
        raise UnsupportedError(
            f"{type(module).__name__} is given a cache, or no mask of the batch: a split sequence has no KV "
            f"cache; call the whole model, with use_cache=False"
        )
    batch = masks[0].batch
    positions = batch.sharding.positions(batch.seq_len, device=arguments["hidden_states"].device)
    return (), {
        **arguments,
        cache: _Offsets(positions - torch.arange(len(positions), device=positions.device)),
    }
