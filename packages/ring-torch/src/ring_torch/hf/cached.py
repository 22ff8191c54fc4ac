"""A cache of transformers whose keys and values are spread over ranks, and what stands for them.

During ``generate`` the model's layers hand new keys to :meth:`ShardedCache.update`, which returns a
stand-in that Ring's attention alone can read. Attention then writes them to the
:class:`ring_torch.KVCache` and attends to it, by :meth:`Step.attend`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ring_core import UnsupportedError
from ring_core.base.arguments import check_size, not_none, numbers_as_python
from ring_torch.context import ContextParallel, check_context
from ring_torch.hf.models.placeholders import AnyDevice, Placeholder
from ring_torch.serving import KVCache, decode
from ring_torch.serving.arguments import ServingOptions
from ring_torch.serving.cache import state_of
from ring_torch.serving.prefilling import prefill_padded

_PAGE_SIZE = 128
#: Tokens of a part of a prompt, unless the cache is told otherwise.
_CHUNK = 1 << 15
#: Rows that a cache has room for, of which there are twice as many as beams while these change.
_MOST_ROWS = 64
#: Least number of pages by which a cache grows on each rank.
_BLOCK = 16


class CachedKeys(Placeholder):
    """Stand-in for keys and values that are in a sharded cache, with the new ones of a layer.

    Attributes:
        layer: Number of the layer.
        k: New keys ``[B, K, n, D]``.
        v: New values ``[B, K, n, Dv]``.
    """

    _refusal = (
        "a ShardedCache keeps keys and values spread over ranks, and only Ring's attention reads them: this "
        "layer does something else with what past_key_values.update() returns, as attention by another "
        "attn_implementation, or the expansion of MLA's latents (DeepSeek), which is not supported"
    )

    def __init__(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.layer, self.k, self.v = layer, k, v


class ShardedCache(Cache):
    """K/V cache for ``model.generate`` whose pages are spread over the ranks of a ring.

    Each rank holds a part of the keys and values of all layers, so that a prompt may be longer than
    one device's memory. Prompts are computed in parts, each split over the ranks; new tokens are
    computed on every rank, and all get the logits of rank 0. The model is one that
    :func:`parallelize` was called with, over the same ranks.

    Args:
        cp: The ranks.
        chunk: Tokens of a part of a prompt, over all ranks.
        page_size: Tokens of a page, a power of two.

    Raises:
        ValueError: An argument is malformed.

    Example::

        hf.parallelize(model, cp)
        tokens = model.generate(**prompt, past_key_values=hf.ShardedCache(cp), max_new_tokens=64)
    """

    is_compileable = False
    is_croppable = True

    @numbers_as_python
    def __init__(
        self, cp: ContextParallel, *, chunk: int = _CHUNK, page_size: int = _PAGE_SIZE
    ) -> None:
        super().__init__(layers=[])
        check_context(cp)
        self.cp, self.chunk = cp, check_size("chunk", chunk)
        self.page_size = check_size("page_size", page_size)
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {page_size}")
        #: Made with the first keys, whose sizes it has.
        self.cache: KVCache | None = None
        # `generate` sets how many layers the model has, and how many tokens a row may have.
        self.num_layers, self.expected = 0, 0
        self.rows: tuple[int, ...] = ()  # requests of the cache
        self.padding: tuple[int, ...] = ()  # tokens before each row's first, which are not written
        self.length = 0  # tokens of a row, padding included
        self.step: Step | None = None  # the forward under way
        self.is_new = True  # False once ranks have compared their random generators

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:  # fmt: skip
        """Return stand-ins for the keys and values of a layer, for Ring's attention.

        Raises:
            ValueError: No ``generate`` of a parallelized model is under way.
        """
        if self.step is None:
            raise ValueError(
                "a ShardedCache serves generate() of a model that hf.parallelize was called with, over the "
                "same ranks: call hf.parallelize(model, cp) first"
            )
        keys = CachedKeys(layer_idx, key_states, value_states)
        return keys, keys

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens of a row, padding included."""
        del layer_idx
        return self.length

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys that a mask would have, which nobody makes."""
        del layer_idx
        n = query_length if isinstance(query_length, int) else len(query_length)
        return self.length + n, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1, as there is no limit."""
        del layer_idx
        return -1

    get_max_cache_shape = get_max_length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the number of tokens of a row, padding included."""
        return self.get_seq_length(layer_idx)

    @property
    def batch_size(self) -> int:
        """Number of rows, -1 before the first forward."""
        return len(self.rows) or -1

    def activate_past_recording(self) -> None:
        """Do nothing: all tokens are kept."""

    def reset(self) -> None:
        """Forget all tokens; pages are kept."""
        for request in self.rows:
            not_none(self.cache).evict(request)
        self.rows, self.padding, self.length = (), (), 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end of each row.

        Args:
            tokens_to_remove: How many, as a number that is not positive; a positive one, as of
                earlier releases, is the length that is left.
        """
        n = int(tokens_to_remove)
        self.length = min(self.length, n) if n > 0 else max(0, self.length + n)
        if self.rows:  # which there are from the first keys on
            cache = not_none(self.cache)
        for request, padding in zip(self.rows, self.padding, strict=False):
            cache.truncate(request, min(cache.lengths[request], max(0, self.length - padding)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row ``n`` go on from what row ``beam_idx[n]`` holds; pages are shared."""
        self._take(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row; pages are shared."""
        self._take([n for n in range(len(self.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the rows."""
        self._take(torch.arange(len(self.rows), device="cpu")[indices.cpu()].tolist())

    def _take(self, indices: Sequence[int]) -> None:
        """Make new rows of old ones: the first use of a row keeps it, others are forks."""
        if not self.rows:
            return
        cache, kept = not_none(self.cache), set()
        for n in set(range(len(self.rows))).difference(indices):
            cache.evict(self.rows[n])
        rows = []
        for n in indices:
            rows.append(cache.fork(self.rows[n]) if n in kept else self.rows[n])
            kept.add(n)
        self.rows = tuple(rows)
        self.padding = tuple(self.padding[n] for n in indices)


@dataclass
class Step:
    """Forward of a model: the tokens of a part of a prompt, or new ones.

    Attributes:
        owner: The cache.
        new: Number of new tokens of each row; in a row that is shorter padding precedes them.
        tokens: Number of tokens of a row in this forward, padding included.
        is_split: True if these are split over the ranks.
        is_reserved: True once their positions are reserved.
    """

    owner: ShardedCache
    new: tuple[int, ...]
    tokens: int
    is_split: bool
    is_reserved: bool = False

    def _cache(self, k: Tensor, v: Tensor) -> KVCache:
        """Return the cache, made for keys ``[B, K, n, D]`` and values ``[B, K, n, Dv]`` like these.

        Raises:
            UnsupportedError: It was made for others.
        """
        owner, shape = self.owner, (*k.shape[1::2], v.shape[3])
        if owner.cache is None:
            heads, dim, v_dim = shape
            owner.cache = KVCache(
                owner.cp, num_layers=owner.num_layers, num_kv_heads=heads, head_dim=dim,
                v_head_dim=v_dim, max_requests=max(_MOST_ROWS, 2 * len(k)), page_size=owner.page_size, dtype=k.dtype,
                max_tokens=len(k) * max(owner.expected, 1), device=k.device,
            )  # fmt: skip
            owner.rows = owner.cache.add(len(k))
        state = state_of(owner.cache)
        if shape != (*state.key_shape, state.value_dim) or k.shape[1] != v.shape[1]:
            raise UnsupportedError(
                f"a layer has keys of [B, {k.shape[1]}, n, {k.shape[3]}] and values of [B, {v.shape[1]}, n, "
                f"{v.shape[3]}], and others {[*state.key_shape, state.value_dim]}: a ShardedCache "
                f"has layers of one size"
            )
        return owner.cache

    def reserve(self, cache: KVCache) -> None:
        """Reserve the positions of the new tokens, and let the cache grow if it has to."""
        if self.is_reserved:
            return
        if not self.owner.rows:  # after `reset`
            self.owner.rows = cache.add(len(self.new))
        for requests, n in self._groups():
            names = [self.owner.rows[row] for row in requests]
            if pages := state_of(cache).lacks(names, n):
                turn = cache.page_size * self.owner.cp.cp_size
                cache.grow(max(pages, _BLOCK) * turn)
            cache.extend(names, n)
        self.is_reserved = True

    def _groups(self) -> list[tuple[list[int], int]]:
        """Return rows with the same number of new tokens, with this number; none without any."""
        counts = sorted({*self.new} - {0})
        return [([row for row, x in enumerate(self.new) if x == n], n) for n in counts]

    def attend(self, q: Tensor, keys: CachedKeys, options: ServingOptions) -> Tensor:
        """Write new keys and values, and return the attention of ``q [B, H, n, D]`` to the cache.

        Returns:
            ``[B, n, H, Dv]``; zeros in padding.
        """
        cache = self._cache(keys.k, keys.v)
        self.reserve(cache)
        q, k, v = (x.transpose(1, 2) for x in (q, keys.k, keys.v))
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        cp, rows = self.owner.cp, self.owner.rows
        if self.is_split:
            for row, n in enumerate(self.new):
                if n:
                    one = slice(row, row + 1)
                    out[one] = cast("Tensor", prefill_padded(
                        cp, q[one], k[one], v[one], cache, keys.layer, rows[row], options,
                        skipped=self.tokens - n,
                    ))  # fmt: skip
            return out
        for group, n in self._groups():
            names = [rows[row] for row in group]
            cache.write(k[group, -n:], v[group, -n:], layer=keys.layer, requests=names)
            out[group, -n:] = decode(
                cp, q[group, -n:], cache, layer=keys.layer, requests=names, **options
            )
        return out


@dataclass(frozen=True, eq=False)
class ServedMask(AnyDevice):
    """Stand-in for the attention mask of a forward of ``generate``, and for a layer's.

    Attributes:
        step: The forward.
        shape: ``(B, n)``, as of a mask of this forward's tokens.
        causal: True, once a layer's pattern is known.
        window: Numbers of keys to the left and right that a token sees; ``None`` for no limit.
    """

    step: Step
    shape: tuple[int, ...]
    causal: bool = False
    window: tuple[int, int] | None = None

    _refusal = (
        "generate() with a ShardedCache has no mask that could be read or changed: this model does more "
        "with its attention_mask than hand it to the attention function, which is not supported"
    )

    ndim = 2

    def of_pattern(
        self, pattern: Callable[[int], tuple[bool, tuple[int, int] | None]]
    ) -> ServedMask:
        """Return the mask of layers with a pattern, of which ``pattern(length)`` tells.

        Raises:
            UnsupportedError: It is not causal.
        """
        causal, window = pattern(self.step.owner.length + self.step.tokens)
        if not causal:
            raise UnsupportedError(
                "generate() with a ShardedCache: a layer's attention is not causal, and a cache holds what "
                "precedes a token"
            )
        return replace(self, causal=causal, window=window)
