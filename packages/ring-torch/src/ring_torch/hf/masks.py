"""The mask function that transformers is given: it names a pattern, in place of building a mask."""

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
from ring_torch.hf.models.check import SERVED_LAYERS
from ring_torch.hf.models.releases import lacks
from ring_torch.hf.models.sealed import AnyDevice, CrossMask, Sealed, ShardedMask

MaskFunction = Callable[..., Any]

_NO_SHARD = (
    "ring attention was given {}: the batch must come from hf.shard_batch, and its "
    "attention_mask reach every attention layer. To generate, to run an unsplit batch, or for parts "
    "of the model that see no split sequence (images, sound), use another attn_implementation"
)


#: Functions of ``transformers.masking_utils`` by which patterns are told.
_PATTERNS = (
    "causal_mask_function", "bidirectional_mask_function", "sliding_window_causal_mask_function",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class LayerMask(AnyDevice):
    """What a layer's attention needs: the batch's documents and the layer's pattern.

    Attributes:
        batch: The sequences that queries are of.
        causal: Whether a token sees what comes before it alone.
        window: Other keys to the left and right.
        chunk_size: A token sees its own chunk alone.
        keys: The sequences that keys are of, where they are others (cross attention).
    """

    batch: ShardedMask
    causal: bool
    window: tuple[int, int] | None = None
    chunk_size: int | None = None
    keys: ShardedMask | None = None

    _words = (
        "ring attention has no mask that could be read or changed: a layer of this model does more "
        "with its attention_mask than hand it to the attention function, which is not supported"
    )

    def documents(
        self, device: torch.device
    ) -> tuple[tuple[int, ...] | None, Tensor | tuple[Tensor, Tensor] | None]:
        """``cu_seqlens`` and ``segment_ids`` of a call of attention."""
        if self.keys is None:
            ids = None if self.batch.cu_seqlens is not None else self.batch.segment_ids
            return self.batch.cu_seqlens, None if ids is None else ids.to(device)
        if not self.keys.has_padding:
            return None, None
        assert self.keys.segment_ids is not None
        padding = -(self.keys.segment_ids < 0).to(device, torch.int32)
        return None, (torch.zeros(self.batch.shape, dtype=torch.int32, device=device), padding)


class NoMask(Sealed):
    """Where a model was given no mask: as good as an error, but for layers that use none."""

    _words = _NO_SHARD.format("no attention_mask")


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
) -> LayerMask | NoMask:
    """Name the pattern that transformers asks for, in place of building a mask.

    The arguments are those of the mask functions of ``transformers.masking_utils`` (before 5.2
    with ``cache_position`` for lengths and offset of the queries).

    Raises:
        ValueError: The batch is not one of ``shard_batch``.
        UnsupportedError: The pattern is not known, or keys are others than the batch's.
    """
    del device, dtype, allow_is_causal_skip, allow_is_bidirectional_skip  # of masks in memory
    if unknown:  # in place of a TypeError
        raise UnsupportedError(
            lacks("masking_utils", f"known use of {', '.join(unknown)} of mask functions")
        )
    if cache_position is not None:
        q_length = cache_position.shape[0]
    offset = q_offset if isinstance(q_offset, int) else -1  # a tensor: a cache of fixed size
    if isinstance(attention_mask, CrossMask):
        return _cross_mask(attention_mask, mask_function, (batch_size, q_length, kv_length))
    if attention_mask is None:  # of cross attention, maybe, where there is none
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
    if use_vmap:
        raise UnsupportedError(
            "the model lays another mask over its pattern (tokens of images that see each other, "
            "prefixes, blocks); only causal, bidirectional and sliding ones are supported"
        )
    causal, window = _pattern(mask_function, local_size)
    return LayerMask(batch, causal, window)


def check_mask_functions() -> None:
    """Raise an UnsupportedError if transformers lacks a function that names a pattern."""
    for name in _PATTERNS:
        if not inspect.isfunction(getattr(masking_utils, name, None)):
            raise UnsupportedError(lacks("masking_utils", f"{name}()"))


def _cross_mask(
    mask: CrossMask, mask_function: MaskFunction, lengths: tuple[int, int | None, int]
) -> LayerMask:
    if lengths != (*mask.queries.shape, mask.keys.shape[1]):
        raise UnsupportedError(
            f"cross attention of [B, T_local, T_kv_local] = {lengths}, where the batch holds "
            f"{(*mask.queries.shape, mask.keys.shape[1])}"
        )
    if not _is_same(mask_function, masking_utils.bidirectional_mask_function):
        raise UnsupportedError("cross attention that does not see all of the other sequence")
    return LayerMask(mask.queries, causal=False, keys=mask.keys)


def sharded(attention_mask: object) -> ShardedMask:
    """The batch that a mask is of.

    Raises:
        ValueError: It is none of ``shard_batch``.
    """
    if isinstance(attention_mask, ShardedMask):
        return attention_mask
    is_empty = attention_mask is None or isinstance(attention_mask, NoMask)
    raise ValueError(
        _NO_SHARD.format("no attention_mask" if is_empty else type(attention_mask).__name__)
    )


def _pattern(mask_function: MaskFunction, size: int | None) -> tuple[bool, tuple[int, int] | None]:
    """``causal`` and ``window`` of a mask function of transformers.

    It is told by building the known ones again and comparing: their closures hold all they do.
    """
    if _is_same(mask_function, masking_utils.causal_mask_function):
        return True, None
    if _is_same(mask_function, masking_utils.bidirectional_mask_function):
        return False, None
    if size is not None:
        if _is_same(mask_function, masking_utils.sliding_window_causal_mask_function(size)):
            return True, (size - 1, 0)
        both = getattr(masking_utils, "sliding_window_bidirectional_mask_function", None)
        if both is not None and _is_same(mask_function, both(size)):
            return False, (size, size)
    raise UnsupportedError(
        "the model asks for a mask other than causal, bidirectional or sliding attention (chunks, or "
        "blocks of tokens that see each other, as those of images); it is not supported"
    )


def _is_same(one: object, other: object) -> bool:
    """Whether functions are of one definition and enclose the same."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        return one.__code__ is other.__code__ and _is_same(_inner_values(one), _inner_values(other))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return type(one) is type(other) and one == other


def _inner_values(function: FunctionType) -> tuple[object, ...]:
    return tuple(cell.cell_contents for cell in function.__closure__ or ())
