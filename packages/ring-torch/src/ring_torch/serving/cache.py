"""The K/V cache as users see it; what it holds is :class:`ring_torch.serving.state.CacheState`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ring_core import LayoutSpec
from ring_core.base.arguments import numbers_as_python
from ring_torch.recurrent.arguments import SplitsSequences, sharding_of
from ring_torch.serving.state import CacheState


class KVCache:
    """Keys and values of many requests, whose pages are spread over the ranks of a group.

    Position ``t`` of a request is in its page ``t // page_size``, and page ``n`` is on rank ``n %
    P``. All ranks make the same changes in the same order: a rank that does not ends the next
    :meth:`ContextParallel.decode` or :meth:`~ContextParallel.prefill` in a ``RankMismatchError``.

    A step reserves positions by :meth:`extend`, writes each layer's keys and values of these
    positions, and attends to them. :meth:`extend` is the only place where memory can run out.

    Args:
        cp: A ``ContextParallel``, whose ranks share the cache.
        num_layers: Number of layers of attention.
        num_kv_heads: Heads of keys and values, ``K``.
        head_dim: Numbers of a key, ``D``.
        v_head_dim: Numbers of a value, ``Dv``; ``None`` is ``head_dim``.
        max_requests: Most requests at a time.
        max_tokens: Tokens of all requests on all ranks together, rounded up to pages, as many on
            each rank.
        page_size: Tokens of a page, a power of two.
        dtype: Of keys, values and queries.
        device: ``None`` is the device on which the group communicates.

    Raises:
        ValueError: An argument is malformed.

    Example::

        cache = KVCache(
            cp,
            num_layers=32,
            num_kv_heads=8,
            head_dim=128,
            max_requests=16,
            max_tokens=1 << 20,
            dtype=torch.bfloat16,
        )
        (request,) = cache.add()
        cache.extend([request], 1)
        cache.write(k, v, layer=0)  # [1, 1, K, D], the same on all ranks
        out = cp.decode(q, cache, layer=0)  # [1, 1, H, Dv]
    """

    @numbers_as_python
    def __init__(
        self, cp: SplitsSequences, *, num_layers: int, num_kv_heads: int, head_dim: int,
        v_head_dim: int | None = None, max_requests: int, max_tokens: int, page_size: int = 128,
        dtype: torch.dtype, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        self._state = CacheState(
            sharding_of(cp).ranks, num_layers, num_kv_heads, head_dim,
            head_dim if v_head_dim is None else v_head_dim, max_requests, max_tokens, page_size,
            dtype, device,
        )  # fmt: skip

    @property
    def page_size(self) -> int:
        """Number of tokens of a page."""
        return self._state.page_size

    @property
    def lengths(self) -> dict[int, int]:
        """Number of tokens of each request, over all ranks."""
        return self._state.lengths

    @property
    def bytes(self) -> int:
        """Bytes of keys and values on this rank, free pages included.

        Pages that are behind the windows of all layers are kept, and counted.
        """
        return self._state.bytes

    @property
    def version(self) -> int:
        """Number of times that the cache has grown: CUDA graphs of an earlier version are void."""
        return self._state.version

    @property
    def block_table(self) -> Tensor:
        """Numbers of this rank's pages of the last :meth:`extend`'s requests, int32 ``[B, width]``.

        Beside :attr:`seqused_k` it is what ``torch.nn.attention.varlen.varlen_attn`` takes.
        """
        return self._state.block_table

    @property
    def seqused_k(self) -> Tensor:
        """Number of tokens of the last :meth:`extend`'s requests on this rank, int32 ``[B]``."""
        return self._state.seqused_k

    @numbers_as_python
    def add(self, n: int = 1) -> tuple[int, ...]:
        """Add ``n`` empty requests, and return their numbers.

        Raises:
            ValueError: ``n`` is no positive integer, or there would be more than ``max_requests``.

        Example::

            first, second = cache.add(2)
        """
        return self._state.add(n)

    @numbers_as_python
    def extend(self, requests: Sequence[int], n: int) -> None:
        """Reserve ``n`` positions behind each of some requests, which become that much longer.

        Nothing is sent. A page that is shared by forks, and gets new tokens, is copied.

        Args:
            requests: The requests of a step. Later calls without ``requests`` are about these, in
                this order.
            n: Number of positions.

        Raises:
            ValueError: A request is unknown or there twice, ``n`` is no positive integer, or pages
                run out: then nothing has changed.

        Example::

            cache.extend([first, second], 1)
        """
        self._state.extend(requests, n)

    @numbers_as_python
    def truncate(self, request: int, length: int) -> None:
        """Forget the tokens of a request from position ``length`` on.

        Raises:
            ValueError: The request is unknown, or not that long.

        Example::

            cache.truncate(request, cache.lengths[request] - 2)  # two drafts were rejected
        """
        self._state.truncate(request, length)

    @numbers_as_python
    def fork(self, request: int) -> int:
        """Return a new request with the tokens of another.

        They share pages; the first of them that writes to a shared page gets a copy. What was
        reserved must be written before: after it neither can write before its next :meth:`extend`.

        Raises:
            ValueError: The request is unknown, or there would be more than ``max_requests``.

        Example::

            beams = [request, cache.fork(request), cache.fork(request)]
        """
        return self._state.fork(request)

    @numbers_as_python
    def evict(self, request: int) -> None:
        """Forget a request, and free its pages.

        Raises:
            ValueError: The request is unknown.

        Example::

            cache.evict(request)
        """
        self._state.evict(request)

    @numbers_as_python
    def grow(self, tokens: int) -> None:
        """Make room for ``tokens`` more tokens; CUDA graphs made before read memory that is gone.

        Layers move one after the other, so that one layer of pages is there twice.

        Raises:
            ValueError: ``tokens`` is no positive integer.

        Example::

            cache.grow(1 << 16)
        """
        self._state.grow(tokens)

    @numbers_as_python
    def write(
        self, k: Tensor, v: Tensor | None = None, *, layer: int,
        requests: Sequence[int] | None = None, layout: LayoutSpec | None = None,
    ) -> None:  # fmt: skip
        """Write a layer's keys and values of the positions that :meth:`extend` has reserved.

        Args:
            k: Keys ``[B, n, K, D]``, equal on all ranks; or with ``layout`` this rank's shards of
                the new tokens, ``[B, T_local, K, D]``, which move to the ranks of their pages.
            v: Values ``[B, n, K, Dv]``. ``None``, of all layers and writes alike, if they are the
                first ``Dv`` numbers of the keys, as of MLA's latents.
            layer: Number of the layer.
            requests: The requests, a row each; ``None`` for those of the last :meth:`extend`, in
                its order. Rows behind them are padding, as of a CUDA graph for more requests.
            layout: The layout of sharded rows, with padding behind ``n`` tokens as it needs.

        Raises:
            ValueError: An argument is malformed, or these are not the positions that were reserved.
            RankMismatchError: With ``layout``, ranks make different calls.

        Example::

            cache.write(k, v, layer=3)
        """
        self._state.write(k, v, layer, requests, layout)


def state_of(cache: object) -> CacheState:
    """Return what a cache holds.

    Raises:
        ValueError: It is no :class:`KVCache`.
    """
    if not isinstance(cache, KVCache):
        raise ValueError(f"cache must be a KVCache, got {type(cache).__name__}")
    return cache._state  # noqa: SLF001 - private to users, not to this package
