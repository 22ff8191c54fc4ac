"""Buffers that hold several tensors, so that these travel as one message.

K and V of a token lie side by side in a message and in gathered K/V, so that neighbouring tokens
are fetched by one copy. Their gradients return in buffers of the same kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_ALIGNED_BYTES = 16

#: For each tensor the global positions of rank 0's tokens, then of rank 1's, ..., int64 ``[T]``;
#: ``None`` where they are in natural order.
Orders = Sequence[Tensor | None]
#: Layouts that are kept: more than there are launches kept for them, which know them by identity.
_MOST_SPECS = 4096
Shapes = list[tuple[tuple[int, ...], torch.dtype]]  # of several tensors


def aligned_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes that a tensor takes in a buffer; of a compiler's symbols an expression."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNED_BYTES) * _ALIGNED_BYTES


@dataclass(frozen=True, eq=False)
class BufferSpec:
    """Layout of several tensors in a flat buffer of bytes, which is one message.

    Each tensor begins at a multiple of 16 bytes. It is compared by identity, which makes it a cheap
    part of a key: :meth:`of` returns the same object for equal arguments.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]  # bytes
    size: int  # bytes of the whole buffer

    @staticmethod
    @lru_cache(maxsize=_MOST_SPECS)
    def of(*tensors: tuple[tuple[int, ...], torch.dtype]) -> BufferSpec:
        """Lay out tensors of these shapes and dtypes one after the other."""
        *offsets, size = accumulate([aligned_bytes(*x) for x in tensors], initial=0)
        return BufferSpec(
            tuple(tuple(shape) for shape, _ in tensors),
            tuple(dtype for _, dtype in tensors),
            tuple(offsets),
            size,
        )

    def buffer(self, device: torch.device) -> Tensor:
        """Allocate an uninitialised buffer."""
        return torch.empty(self.size, dtype=torch.uint8, device=device)

    def pair(self, device: torch.device) -> list[Tensor]:
        """Allocate two uninitialised buffers: one is sent while the other is received."""
        return [torch.empty(self.size, dtype=torch.uint8, device=device) for _ in range(2)]

    @cached_property
    def _strided(self) -> list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]]:
        """Return each tensor's dtype, shape, strides, and offset in numbers of its dtype."""
        return [
            (dtype, shape, torch.empty(shape, device="meta").stride(), offset // dtype.itemsize)
            for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True)
        ]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors inside a buffer, as views, of which each is one operation of torch.

        The buffer has :attr:`size` bytes, or more by a multiple of 16.
        """
        assert buffer.nbytes >= self.size
        views: list[Tensor] = []
        typed: dict[torch.dtype, Tensor] = {}  # the whole buffer in each dtype
        for dtype, shape, strides, offset in self._strided:
            if (x := typed.get(dtype)) is None:
                x = typed[dtype] = buffer.view(dtype)
            # The buffer may be a part of larger memory, from whose start torch counts.
            views.append(x.as_strided(shape, strides, x.storage_offset() + offset))
        return views

    def pack(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Copy tensors of these shapes and dtypes into a new buffer."""
        buffer = torch.empty(self.size, dtype=torch.uint8, device=device)
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view.copy_(tensor)
        return buffer


@lru_cache(maxsize=_MOST_SPECS)
def flat(numel: int, dtype: torch.dtype) -> BufferSpec:
    """Return the layout of a single flat tensor of ``numel`` numbers."""
    return BufferSpec.of(((numel,), dtype))


def packing_of(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> BufferSpec:
    """Return the layout of tensors of the same shapes, in their dtypes or in ``dtype``."""
    return BufferSpec.of(*[(x.shape, dtype or x.dtype) for x in tensors])


class HeadGroups(NamedTuple):
    """Numbers of groups into which heads are cut in each pass."""

    forward: int
    backward: int  # a multiple of ``forward``: saved K/V of a group are cut once more
    #: True if the last group's gradients travel in two parts: those that are final before its last
    #: launch travel during that launch.
    before_last_item: bool


ONE_GROUP = HeadGroups(1, 1, before_last_item=False)


@dataclass(frozen=True, eq=False)
class KVPayload:
    """Shape of a rank's K/V as they travel, side by side: ``[B, T_kv_local, K * D + K * Dv]``.

    ``K`` is the number of K/V heads of a group, which is all of them unless heads are cut. It is
    compared by identity, which makes it a cheap part of a key: :meth:`of` returns the same object
    for equal arguments.
    """

    batch: int
    length: int
    heads: int
    dim: int
    v_dim: int
    dtype: torch.dtype
    segments: bool  # True if segment ids, int32 ``[B, T_kv_local]``, travel with them

    @staticmethod
    @lru_cache(maxsize=_MOST_SPECS)
    def of(
        batch: int,
        length: int,
        heads: int,
        dim: int,
        v_dim: int,
        dtype: torch.dtype,
        segments: bool,
    ) -> KVPayload:
        """Return the shape of a rank's K/V, the same object for equal calls."""
        return KVPayload(batch, length, heads, dim, v_dim, dtype, segments)

    def of_group(self, groups: int) -> KVPayload:
        """Return the shape of one of ``groups`` equal groups of heads; equal calls share it."""
        if groups == 1:
            return self
        return KVPayload.of(
            self.batch,
            self.length,
            self.heads // groups,
            self.dim,
            self.v_dim,
            self.dtype,
            self.segments,
        )

    @cached_property
    def width(self) -> int:
        """Elements per token: K and V of all heads of a group."""
        return self.heads * (self.dim + self.v_dim)

    @cached_property
    def message(self) -> BufferSpec:
        """Layout of a rank's whole K/V in one buffer, with segment ids if there are any."""
        return BufferSpec.of(*self.gathered_shapes(self.length, groups=1))

    def size(self, length: int) -> int:
        """Return the bytes of ``length`` tokens, segment ids included, without padding."""
        token = self.width * self.dtype.itemsize + (4 if self.segments else 0)
        return self.batch * length * token

    def gathered_shapes(self, length: int, groups: int) -> Shapes:
        """Return the shapes and dtypes of ``length`` gathered tokens, group of heads by group."""
        kv: Shapes = [((self.batch, length, self.width), self.dtype)]
        ids: Shapes = [((self.batch, length), torch.int32)] if self.segments else []
        return (kv + ids) * groups

    def split(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``k [B, n, K, D]`` and ``v [B, n, K, Dv]`` as views of ``kv [B, n, width]``."""
        if self.dim == self.v_dim:
            k, v = kv.view(*kv.shape[:2], 2, self.heads, self.dim).unbind(dim=2)
            return k, v
        k, v = kv.split([self.heads * self.dim, self.heads * self.v_dim], dim=-1)
        return k.unflatten(-1, (self.heads, self.dim)), v.unflatten(-1, (self.heads, self.v_dim))

    def columns(self, gathered: Sequence[Tensor], length: int) -> list[Tensor]:
        """Return K and V of ``length`` gathered tokens and, if any, their segment ids.

        The first gathered tensor has unit stride in its last dimension; the views are those of
        :meth:`split`. Each is one ``as_strided``: a repeated call makes them for every launch, on
        the host.
        """
        kv, *ids = gathered
        (batch_step, step, unit), shape = kv.stride(), (self.batch, length, self.heads)
        assert unit == 1
        k_dim, v_dim, first = self.dim, self.v_dim, kv.storage_offset()
        k = kv.as_strided((*shape, k_dim), (batch_step, step, k_dim, 1), first)
        first += self.heads * k_dim
        return [k, kv.as_strided((*shape, v_dim), (batch_step, step, v_dim, 1), first), *ids]


class KeyGradBuffer(NamedTuple):
    """Memory order of dK/dV sums in a flat buffer, in the accumulators' dtype.

    It is by token, ``[B, n, K * D + K * Dv]``, or with ``head_major`` by head: ``[B, K, n, D]`` and
    then ``[B, K, n, Dv]``, the order in which some kernels add them up.
    """

    keys: KVPayload
    head_major: bool

    def numel(self, length: int) -> int:
        """Return the number of elements that the sums of ``length`` tokens take."""
        return self.keys.batch * length * self.keys.width

    def views(self, flat: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return views of the sums of dK and of dV, in the buffer's own order of dimensions."""
        keys = self.keys
        if not self.head_major:
            return keys.split(flat.view(keys.batch, length, keys.width))
        cut = keys.batch * keys.heads * length * keys.dim
        shape = (keys.batch, keys.heads, length, -1)
        return flat[:cut].view(shape), flat[cut:].view(shape)

    def strided_views(self, flat: Tensor, length: int, span: slice) -> list[Tensor]:
        """Return views that together are the sums of a span of tokens, as few as possible.

        Each is ``[rows, n, m]`` and contiguous in its last two dimensions, so it moves as one
        two-dimensional copy.
        """
        keys = self.keys
        if not self.head_major:
            return [flat.view(keys.batch, length, keys.width)[:, span]]
        if keys.dim == keys.v_dim:
            return [flat.view(-1, length, keys.dim)[:, span]]
        return [x.flatten(0, 1)[:, span] for x in self.views(flat, length)]


def are_rows(x: Tensor) -> bool:
    """Return True if all heads of a token are contiguous in ``x [B, n, K, D]``."""
    return x.stride(3) == 1 and x.stride(2) == x.shape[3]


class HeadPart(NamedTuple):
    """Shape of one tensor in an exchange that trades tokens for heads.

    Attributes:
        batch: Batch size B.
        length: Tokens that a rank holds, T_local; there are ``T = P * T_local`` on P ranks.
        heads: Heads that a rank attends with, padding included: H / P of those that travel.
        dim: Numbers of a head, D.
        dtype: The tensor's dtype.
        head_major: True if results lie as ``[B, H, T, D]`` in memory, as ``lse`` does with D = 1;
            otherwise as ``[B, T, H, D]``.
    """

    batch: int
    length: int
    heads: int
    dim: int
    dtype: torch.dtype
    head_major: bool = False

    def empty(self, tokens: int, heads: int, device: torch.device) -> Tensor:
        """Allocate ``[B, tokens, heads, D]``, in its order of memory."""
        order = (0, 2, 1, 3) if self.head_major else (0, 1, 2, 3)
        shape = (self.batch, tokens, heads, self.dim)
        return torch.empty_permuted(shape, order, dtype=self.dtype, device=device)


@dataclass(frozen=True, eq=False)
class HeadBuffer:
    """Layout of the messages of an exchange, one for each rank, ``[P, bytes]`` together.

    A message holds a part ``[B, T_local, H / P, D]`` of each of several tensors. It is
    compared by identity: :meth:`of` returns the same object for equal arguments.

    Attributes:
        ranks: Number of ranks P.
        parts: Shapes of the tensors.
        blocks: Shape of each tensor's parts in all messages, ``[P, B, T_local, H / P, D]``.
        message: Layout of the message to one rank.
        launches: Launches of the kernel that packs and unpacks, kept by shapes, dtypes and strides.
    """

    ranks: int
    parts: tuple[HeadPart, ...]
    blocks: tuple[tuple[int, ...], ...]
    message: BufferSpec
    launches: dict[object, Any] = field(default_factory=dict)

    @staticmethod
    @lru_cache(maxsize=_MOST_SPECS)
    def of(ranks: int, *parts: HeadPart) -> HeadBuffer:
        """Return the layout of an exchange of tensors of these shapes, made once."""
        shapes = [(x.batch, x.length, x.heads, x.dim) for x in parts]
        message = BufferSpec.of(*zip(shapes, [x.dtype for x in parts], strict=True))
        return HeadBuffer(ranks, parts, tuple([(ranks, *shape) for shape in shapes]), message)


class HeadCarrier(Protocol):
    """A way to move the messages of an exchange between ranks."""

    def __call__(
        self,
        layout: HeadBuffer,
        sources: Sequence[Tensor],
        results: Sequence[Tensor],
        orders: Orders,
        *,
        splits_heads: bool,
    ) -> None:
        """Send each rank its part of ``sources``, and write what all ranks send into ``results``.

        With ``splits_heads`` sources are ``[B, T_local, H, D]``, of which rank n gets the n-th
        range of heads, and results ``[B, T, H / P, D]`` in natural order: ``orders`` say where the
        ranks' tokens belong. Otherwise it is the other way round. The current stream waits for the
        exchange. All ranks call it at once.

        Raises:
            PeerError: A peer failed, or did not answer within the group's timeout.
        """

    def to_heads(
        self, layout: HeadBuffer, tensors: Sequence[Tensor], orders: Orders
    ) -> list[Tensor]:
        """Send each rank its heads of our tokens; return all tokens of our heads, in natural order.

        Args:
            layout: How the messages hold the tensors; each rank has a contiguous range of heads.
            tensors: ``[B, T_local, H, D]`` each, any strides but a contiguous last dimension.
            orders: For each tensor the positions of rank 0's tokens, then those of rank 1, ...,
                int64 ``[T]``; ``None`` if they are in natural order.

        Returns:
            ``[B, T, H / P, D]`` of each.

        Raises:
            PeerError: A peer failed, or did not answer within the group's timeout.
        """
        device = tensors[0].device
        results = [x.empty(layout.ranks * x.length, x.heads, device) for x in layout.parts]
        self(layout, tensors, results, orders, splits_heads=True)
        return results

    def to_tokens(
        self, layout: HeadBuffer, tensors: Sequence[Tensor], orders: Orders
    ) -> list[Tensor]:
        """Undo :meth:`to_heads`: return ``[B, T_local, H, D]`` of each ``[B, T, H / P, D]``.

        The arguments and errors are those of :meth:`to_heads`.
        """
        device = tensors[0].device
        results = [x.empty(x.length, layout.ranks * x.heads, device) for x in layout.parts]
        self(layout, tensors, results, orders, splits_heads=False)
        return results
