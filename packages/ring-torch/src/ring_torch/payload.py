"""Memory layout of gathered K/V and of their gradients.

K and V of a token lie side by side, so that neighbouring tokens are fetched by one copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ring_torch.buffers import BufferSpec
from ring_torch.records import Inputs

Shapes = list[tuple[tuple[int, ...], torch.dtype]]  # of several tensors


class HeadGroups(NamedTuple):
    """Numbers of groups into which heads are cut in each pass."""

    forward: int
    backward: int  # a multiple of ``forward``: saved K/V of a group are cut once more
    #: True if the last group's gradients travel in two parts: those that are final before its last
    #: launch travel during that launch.
    before_last_item: bool


ONE_GROUP = HeadGroups(1, 1, before_last_item=False)


@dataclass(frozen=True)
class KVPayload:
    """Shape of a rank's K/V as they travel, side by side: ``[B, T_kv_local, K * D + K * Dv]``.

    ``K`` is the number of K/V heads of a group, which is all of them unless heads are cut.
    """

    batch: int
    length: int
    heads: int
    dim: int
    v_dim: int
    dtype: torch.dtype
    segments: bool  # True if segment ids, int32 ``[B, T_kv_local]``, travel with them

    @classmethod
    def of(cls, inputs: Inputs, groups: int = 1) -> KVPayload:
        """Return the shape of a call's K/V for one of ``groups`` equal groups of heads."""
        k, v = inputs.k, inputs.v
        sizes = map(int, (*k.shape, v.shape[3]))  # symbolic sizes of a compiler have no hash
        return _keys(*sizes, k.dtype, inputs.k_ids is not None, groups)

    @cached_property
    def width(self) -> int:
        """Elements per token: K and V of all heads of a group."""
        return self.heads * (self.dim + self.v_dim)

    @cached_property
    def message(self) -> BufferSpec:
        """Layout of a rank's whole K/V in one buffer, with segment ids if there are any."""
        both = ((self.batch, self.length, self.width), self.dtype)
        ids = [((self.batch, self.length), torch.int32)] if self.segments else []
        return BufferSpec.of(both, *ids)

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


@lru_cache(maxsize=256)
def _keys(
    batch: int, length: int, heads: int, dim: int, v_dim: int, dtype: torch.dtype, segments: bool,
    groups: int,
) -> KVPayload:  # fmt: skip
    """Make the shape of one of ``groups`` groups of heads; equal calls share it."""
    return KVPayload(batch, length, heads // groups, dim, v_dim, dtype, segments)


@dataclass(frozen=True)
class KeyGradBuffer:
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

    def of(self, flat: Tensor, length: int, span: slice) -> tuple[Tensor, Tensor]:
        """Return views of the sums of dK and of dV for a span of tokens."""
        index = (slice(None), slice(None), span) if self.head_major else (slice(None), span)
        dk, dv = self.views(flat, length)
        return dk[index], dv[index]

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
