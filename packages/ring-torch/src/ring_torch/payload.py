"""Keys and values as they travel when gathered: side by side, so that neighbours are one copy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ring_torch.buffers import BufferSpec
from ring_torch.records import Inputs


class HeadGroups(NamedTuple):
    """Into how many groups heads are cut; the backward cuts what the forward has cut."""

    forward: int
    backward: int
    #: Whether, of the last group, what gradients are done before its last launch go home beside it.
    early: bool


ONE_GROUP = HeadGroups(1, 1, early=False)


@dataclass(frozen=True)
class KVPayload:
    """The shape of a rank's keys and values: ``both [B, T_kv_local, K * D + K * Dv]``.

    ``K`` are the heads of a group, which is all unless heads are cut into several.
    """

    batch: int
    length: int
    heads: int
    dim: int
    v_dim: int
    dtype: torch.dtype
    segments: bool  # whether ids int32 ``[B, T_kv_local]`` go with them

    @classmethod
    def of(cls, inputs: Inputs, groups: int = 1) -> KVPayload:
        """The shape of a call's, for one of so many groups of heads."""
        k, v = inputs.k, inputs.v
        sizes = map(int, (*k.shape, v.shape[3]))  # a compiler's numbers have no hash
        return _keys(*sizes, k.dtype, inputs.k_ids is not None, groups)

    @cached_property
    def width(self) -> int:
        """Numbers a token."""
        return self.heads * (self.dim + self.v_dim)

    @cached_property
    def message(self) -> BufferSpec:
        """What a rank gives: keys and values, and ids if there are any."""
        both = ((self.batch, self.length, self.width), self.dtype)
        ids = [((self.batch, self.length), torch.int32)] if self.segments else []
        return BufferSpec.of(both, *ids)

    def size(self, length: int) -> int:
        """Bytes of the message for so many tokens."""
        token = self.width * self.dtype.itemsize + (4 if self.segments else 0)
        return self.batch * length * token

    def split(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """``k [B, n, K, D]`` and ``v [B, n, K, Dv]``, views."""
        if self.dim == self.v_dim:
            k, v = both.view(*both.shape[:2], 2, self.heads, self.dim).unbind(dim=2)
            return k, v
        k, v = both.split([self.heads * self.dim, self.heads * self.v_dim], dim=-1)
        return k.unflatten(-1, (self.heads, self.dim)), v.unflatten(-1, (self.heads, self.v_dim))


@lru_cache(maxsize=256)
def _keys(
    batch: int, length: int, heads: int, dim: int, v_dim: int, dtype: torch.dtype, segments: bool,
    groups: int,
) -> KVPayload:  # fmt: skip
    return KVPayload(batch, length, heads // groups, dim, v_dim, dtype, segments)


@dataclass(frozen=True)
class KeyGradBuffer:
    """Where the sums of gradients of keys lie in a flat buffer, wide.

    By token, ``[B, n, K * D + K * Dv]``, or by head, ``[B, K, n, D]`` and ``[B, K, n, Dv]`` one
    after the other: the order in which some kernels add them up.
    """

    keys: KVPayload
    head_major: bool

    def numel(self, length: int) -> int:
        """Numbers for so many tokens."""
        return self.keys.batch * length * self.keys.width

    def views(self, flat: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The sums of dK and dV, as they lie."""
        keys = self.keys
        if not self.head_major:
            return keys.split(flat.view(keys.batch, length, keys.width))
        cut = keys.batch * keys.heads * length * keys.dim
        shape = (keys.batch, keys.heads, length, -1)
        return flat[:cut].view(shape), flat[cut:].view(shape)

    def of(self, flat: Tensor, length: int, span: slice) -> tuple[Tensor, Tensor]:
        """The sums of dK and dV of some tokens."""
        at = (slice(None), slice(None), span) if self.head_major else (slice(None), span)
        dk, dv = self.views(flat, length)
        return dk[at], dv[at]

    def parts(self, flat: Tensor, length: int, span: slice) -> list[Tensor]:
        """Those of some tokens, in as few pieces as can be: ``[rows, n, numbers a token]``."""
        keys = self.keys
        if not self.head_major:
            return [flat.view(keys.batch, length, keys.width)[:, span]]
        if keys.dim == keys.v_dim:
            return [flat.view(-1, length, keys.dim)[:, span]]
        return [x.flatten(0, 1)[:, span] for x in self.views(flat, length)]


def are_rows(x: Tensor) -> bool:
    """Whether all heads of a token lie together."""
    return x.stride(3) == 1 and x.stride(2) == x.shape[3]
