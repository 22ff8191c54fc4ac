"""Mask function for transformers that records a layer's mask pattern and builds no tensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from ring_core import UnsupportedError
from ring_torch.capture import untraced
from ring_torch.hf.cached import ServedMask
from ring_torch.hf.models.check import SERVED_LAYERS
from ring_torch.hf.models.placeholders import (
    AnyDevice,
    CrossMask,
    Placeholder,
    PlaceholderError,
    ShardedMask,
    keeps_all,
)
from ring_torch.hf.models.releases import lacks

MaskFunction = Callable[..., Any]

_NO_SHARD = (
    "ring attention was given {}: the batch must come from hf.shard_batch, and its "
    "attention_mask reach every attention layer. To generate, to run an unsplit batch, or for parts "
    "of the model that see no split sequence (images, sound), use another attn_implementation"
)


#: Functions of ``transformers.masking_utils`` that define the patterns recognized here.
_PATTERNS = (
    "causal_mask_function", "bidirectional_mask_function", "sliding_window_causal_mask_function",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class LayerMask(AnyDevice):
    """Stand-in for a layer's attention mask: the batch's documents and the layer's mask pattern.

    Attributes:
        batch: The batch whose tokens are the queries, and the keys too in self-attention.
        causal: True if a token attends only to itself and earlier tokens.
        window: Numbers of keys to the left and right that a token attends to besides its own;
            ``None`` for no limit.
        chunk_size: Length of the chunks to which attention is confined; ``None`` for none. Only
            layers of Llama 4 have it, whose masks :mod:`ring_torch.hf.wiring` makes.
        keys: The batch whose tokens are the keys in cross attention; ``None`` in self-attention.
    """

    batch: ShardedMask
    causal: bool
    window: tuple[int, int] | None = None
    chunk_size: int | None = None
    keys: ShardedMask | None = None

    _refusal = (
        "ring attention has no mask that could be read or changed: a layer of this model does more "
        "with its attention_mask than hand it to the attention function, which is not supported"
    )

    ndim = 4  # of a mask [B, 1, T_local, T_kv_local]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the mask tensor that a layer expects, ``(B, 1, T_local, T_kv_local)``."""
        rows, length = self.batch.shape
        return rows, 1, length, (self.keys or self.batch).shape[1]

    def __getitem__(self, index: object) -> LayerMask:
        """Return self for an index that cuts nothing off; refuse any other."""
        if not keeps_all(index, self.shape):
            raise PlaceholderError(self._refusal)
        return self

    def documents(
        self, device: torch.device
    ) -> tuple[tuple[int, ...] | None, Tensor | tuple[Tensor, Tensor] | None]:
        """Return the ``cu_seqlens`` and ``segment_ids`` arguments of the attention call.

        Documents are stated by offsets where they are the same in all rows, and by one id a token
        otherwise. Cross attention has no documents; ids are used only to hide padding among the
        keys: queries have id 0, keys 0 or -1.

        Args:
            device: Device to put the segment ids on.

        Returns:
            ``cu_seqlens`` or ``None``, and segment ids or ``None``: int32 ``[B, T_local]``, or a
            pair of them for queries and keys.
        """
        if self.keys is None and not self.batch.padding_sees:
            ids = None if self.batch.cu_seqlens is not None else self.batch.segment_ids
            return self.batch.cu_seqlens, None if ids is None else ids.to(device)
        keys = self.keys or self.batch
        if not keys.has_padding:
            return None, None
        assert keys.segment_ids is not None
        padding = -(keys.segment_ids < 0).to(device, torch.int32)
        return None, (torch.zeros(self.batch.shape, dtype=torch.int32, device=device), padding)


class NoMask(Placeholder):
    """Stand-in for an absent attention mask, which raises an error when a layer reads it.

    Layers that use no mask can still run with it.
    """

    _refusal = _NO_SHARD.format("no attention_mask")


def ring_mask(
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: object = None,
    *,
    cache_position: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: object = None,
    device: object = None,
    dtype: object = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **unknown: object,
) -> LayerMask | NoMask | ServedMask:
    """Return the mask pattern that transformers asks for, instead of a mask tensor.

    Without ``attention_mask`` that is a :class:`NoMask`: only a layer that reads it is an error. A
    :class:`LayerMask`, of a model round this one, is returned as it is, as transformers does with a
    mask of four dimensions.
    It is registered as transformers' mask function for ring attention. The arguments are those of
    the mask functions in ``transformers.masking_utils``; releases before 5.2 pass
    ``cache_position`` instead of ``q_length`` and ``q_offset``.

    Raises:
        ValueError: ``attention_mask`` does not come from ``shard_batch``.
        UnsupportedError: The pattern is unknown, the keys are not the batch's own tokens (a KV
            cache, a prefix), the model has layers of a type that is not served, or transformers
            passes an argument that this function does not know.
    """
    # These only say how a mask tensor is to be made.
    del device, dtype, allow_is_causal_skip, allow_is_bidirectional_skip, use_vmap
    if unknown:  # a newer transformers passes more: say so, instead of a TypeError
        raise UnsupportedError(
            lacks("masking_utils", f"known use of {', '.join(unknown)} of mask functions")
        )
    if cache_position is not None:
        q_length = cache_position.shape[0]
    # The offset is a tensor with a static KV cache. -1 lets it be refused below.
    offset = q_offset if isinstance(q_offset, int) else -1
    if isinstance(attention_mask, LayerMask):
        return attention_mask
    if isinstance(attention_mask, ServedMask):
        function = _without_blocks(mask_function)
        return attention_mask.of_pattern(lambda length: _pattern(function, local_size, length))
    if isinstance(attention_mask, CrossMask):
        return _cross_mask(attention_mask, mask_function, (batch_size, q_length, kv_length))
    # Models ask for a cross attention mask even without cross attention, so this is no error yet.
    if attention_mask is None:
        return NoMask()
    batch = sharded(attention_mask)
    if (batch_size, q_length, kv_length, offset, kv_offset) != (*batch.shape, batch.shape[1], 0, 0):
        raise UnsupportedError(
            f"{q_length} queries from {q_offset} on and {kv_length} keys, where the batch holds "
            f"{batch.shape[1]} tokens a rank: a split sequence has no KV cache, prefix or cross "
            f"attention; generate with another attn_implementation"
        )
    unserved = sorted({*(getattr(config, "layer_types", None) or ())}.difference(SERVED_LAYERS))
    if unserved and not batch.gathers:
        raise UnsupportedError(
            f"the model has layers of type {', '.join(unserved)}, which would see this rank's tokens "
            f"only; ring attention serves models of {' and '.join(SERVED_LAYERS)} alone"
        )
    causal, window = _pattern(_without_blocks(mask_function), local_size, batch.length)
    return LayerMask(batch, causal, window)


def check_mask_functions() -> None:
    """Raise an UnsupportedError if transformers lacks a mask function needed to name patterns."""
    for name in _PATTERNS:
        if not inspect.isfunction(getattr(masking_utils, name, None)):
            raise UnsupportedError(lacks("masking_utils", f"{name}()"))


def _cross_mask(
    mask: CrossMask, mask_function: MaskFunction, lengths: tuple[int, int | None, int]
) -> LayerMask:
    """Return the mask of cross attention: each query attends to all keys that are no padding.

    Raises:
        UnsupportedError: Lengths are not those of the batch, or the mask function hides more.
    """
    if lengths != (*mask.queries.shape, mask.keys.shape[1]):
        raise UnsupportedError(
            f"cross attention of [B, T_local, T_kv_local] = {lengths} is not supported where the batch "
            f"holds {(*mask.queries.shape, mask.keys.shape[1])}: give the model its whole sequences"
        )
    if not _is_same(mask_function, masking_utils.bidirectional_mask_function):
        raise UnsupportedError(
            "cross attention in which a query does not see all of the other sequence is not supported"
        )
    return LayerMask(mask.queries, causal=False, keys=mask.keys)


def sharded(attention_mask: object) -> ShardedMask:
    """Return the mask if it is a :class:`ShardedMask`, and raise an error for anything else.

    Raises:
        ValueError: It is not one, so it does not come from ``shard_batch``.
    """
    if isinstance(attention_mask, ShardedMask):
        return attention_mask
    is_empty = attention_mask is None or isinstance(attention_mask, NoMask)
    raise ValueError(
        _NO_SHARD.format("no attention_mask" if is_empty else type(attention_mask).__name__)
    )


def _pattern(
    mask_function: MaskFunction, size: int | None, length: int
) -> tuple[bool, tuple[int, int] | None]:
    """Return ``causal`` and ``window`` of a mask function of transformers; chunks are refused.

    transformers passes a closure without a name. The known closures are built again and compared
    with it: two closures are equal if they have the same code and equal enclosed values. Others,
    which models make themselves, are asked for some rows of a mask of ``length`` tokens.

    Raises:
        UnsupportedError: It is none of the known ones, and no band.
    """
    if _is_same(mask_function, masking_utils.causal_mask_function):
        return True, None
    if _is_same(mask_function, masking_utils.bidirectional_mask_function):
        return False, None
    if size is not None:
        if _is_same(mask_function, masking_utils.sliding_window_causal_mask_function(size)):
            return True, (size - 1, 0)
        bidirectional = getattr(masking_utils, "sliding_window_bidirectional_mask_function", None)
        if bidirectional is not None and _is_same(mask_function, bidirectional(size)):
            return False, (size, size)
    band = _band(mask_function, length) if _is_of_indices(mask_function) else None
    if band is None:
        raise UnsupportedError(
            "the model asks for a mask other than causal, bidirectional or sliding attention (chunks, "
            "or blocks of tokens that see each other, as those of images, or prefixes); it is not "
            "supported"
        )
    left, right = band
    # A side that reaches all tokens has no bound.
    is_whole = left >= length - 1 and right in (0, length - 1)
    return right == 0, None if is_whole else (left, right)


def _without_blocks(function: MaskFunction) -> MaskFunction:
    """Return a mask function without its blocks of tokens that see each other, if all are empty.

    Models for text and images add such blocks to a batch without images, too.
    """
    parts = _inner_values(function) if isinstance(function, FunctionType) else ()
    functions = parts[0] if len(parts) == 1 else None
    if not isinstance(functions, tuple):
        return function
    others = [x for x in functions if not _is_without_tokens(x)]
    is_union = _is_same(function, masking_utils.or_masks(*functions))
    return others[0] if is_union and len(others) == 1 else function


def _is_without_tokens(function: object) -> bool:
    """Return True for transformers' mask function of blocks where no token is in a block."""
    if not isinstance(function, FunctionType) or len(parts := _inner_values(function)) != 1:
        return False
    blocks = getattr(masking_utils, "blockwise_overlay", None)
    (ids,) = parts
    return (
        blocks is not None
        and isinstance(ids, Tensor)
        and _is_same(function, blocks(ids))
        and bool((ids < 0).all())
    )


def _is_of_indices(value: object) -> bool:
    """Return True if a mask function depends on the indices of queries and keys alone.

    It then encloses numbers and other such functions, and no tensor.
    """
    if isinstance(value, FunctionType):
        return all(map(_is_of_indices, (*_inner_values(value), *(value.__defaults__ or ()))))
    if isinstance(value, tuple):
        return all(map(_is_of_indices, value))
    return value is None or isinstance(value, int)


@untraced
def _band(function: MaskFunction, length: int) -> tuple[int, int] | None:
    """Return how many keys to the left and right of itself a token sees; ``None`` if it varies.

    Rows at both ends and pairs of neighbours between them are compared with the band.
    """
    middle = [length * n // 7 + m for n in range(1, 7) for m in (0, 1)]
    rows = torch.tensor([x for x in (0, *middle, length - 1) if x < length], device="cpu")[:, None]
    keys = torch.arange(length, device="cpu")
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    seen = torch.as_tensor(function(zero, zero, rows, keys), device="cpu").expand(len(rows), length)
    # The first row has all keys to its right, the last one all to its left.
    left, right = int(seen[-1].sum()) - 1, int(seen[0].sum()) - 1
    expected = (keys >= rows - left) & (keys <= rows + right)
    return (left, right) if torch.equal(seen, expected) else None


def _is_same(a: object, b: object) -> bool:
    """Return True if two functions have the same code and enclose equal values, recursively.

    Tensors are equal only if they are one object.
    """
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        return a.__code__ is b.__code__ and _is_same(_inner_values(a), _inner_values(b))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    return type(a) is type(b) and a == b


def _inner_values(function: FunctionType) -> tuple[object, ...]:
    """Return the values that a closure encloses."""
    return tuple(cell.cell_contents for cell in function.__closure__ or ())
