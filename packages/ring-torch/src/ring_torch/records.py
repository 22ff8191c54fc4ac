"""What travels between the parts of a call: tensors of rows and columns, results, gradients.

Shapes: an item has ``n`` query rows and ``m`` key columns; ``q [B, n, H, D]``, ``k [B, m, K, D]``,
``v [B, m, K, Dv]``, ``out [B, n, H, Dv]``, ``lse`` and ``delta [B, H, n]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ring_core import BlockGeometry, Mask


@dataclass(frozen=True)
class KernelParams:
    """What all items of a call share."""

    mask: Mask
    scale: float
    softcap: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    block_q: int | None = None
    block_k: int | None = None
    fused_backward: bool = False
    boundaries: Tensor | None = None  # document and chunk borders, for predicates
    blocks: BlockGeometry | None = None  # a predicate's tiles
    deterministic: bool = False
    bias_grad: bool = False  # the bias wants its gradient
    bias_masks: bool = False  # the bias says a mask, whose hidden blocks are to be skipped
    shifts_bias: bool = False  # each row of the bias is shifted (QueryBlock.bias_shift)
    sinks: Tensor | None = None  # float32 [H], for a launch that is to add them
    needs_lse: bool = True  # otherwise a kernel that is given a place may leave its lse as it is


class Run(NamedTuple):
    """Tokens ``start <= n < stop`` whose positions count on one by one, from ``position``."""

    start: int
    stop: int
    position: int


def runs_of(positions: npt.NDArray[np.int64]) -> tuple[Run, ...]:
    """The runs of tokens at some positions, as few as there are."""
    if positions.size == 0:
        return ()
    edges = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), positions.size]
    return tuple(Run(a, b, int(positions[a])) for a, b in pairwise(edges))


def _runs_in(runs: tuple[Run, ...], part: slice) -> tuple[Run, ...]:
    cut = ((max(x.start, part.start), min(x.stop, part.stop), x) for x in runs)
    return tuple(
        Run(a - part.start, b - part.start, x.position + a - x.start) for a, b, x in cut if a < b
    )


class QueryBlock(NamedTuple):
    """Queries and all that belongs to them."""

    q: Tensor
    indices: Tensor | None  # [n] global index of each query, where an option needs it
    position: Tensor | None  # [n] where it stands among the keys, where an option needs it
    segments: Tensor | None  # [B, n] int32
    bias: Tensor | None  # [B or 1, H or 1, n, T_kv]
    slopes: Tensor | None  # [B or 1, H]
    runs: tuple[Run, ...] = ()  # of their positions, where an option needs these
    bias_shift: Tensor | None = None  # [B or 1, H or 1, n] taken off the bias, wide

    def take(self, part: slice) -> QueryBlock:
        """The same for a slice of the queries."""
        if part.start == 0 and part.stop == self.q.shape[1]:
            return self
        return QueryBlock(
            self.q[:, part],
            None if self.indices is None else self.indices[part],
            None if self.position is None else self.position[part],
            None if self.segments is None else self.segments[:, part],
            None if self.bias is None else self.bias[:, :, part],
            self.slopes,
            _runs_in(self.runs, part) if self.runs else (),
            None if self.bias_shift is None else self.bias_shift[:, :, part],
        )


class KeyBlock(NamedTuple):
    """Keys and values and all that belongs to them."""

    k: Tensor
    v: Tensor
    position: Tensor | None  # [m] global index of each key, where an option needs it
    segments: Tensor | None  # [B, m] int32
    aligned8: bool = False  # positions are known to be 8 n to 8 n + 7, at 8 m
    runs: tuple[Run, ...] = ()  # of their positions, where an option needs these

    def take(self, part: slice) -> KeyBlock:
        """The same for a slice of the keys."""
        if part.start == 0 and part.stop == self.k.shape[1]:
            return self
        return KeyBlock(
            self.k[:, part],
            self.v[:, part],
            None if self.position is None else self.position[part],
            None if self.segments is None else self.segments[:, part],
            self.aligned8 and part.start % 8 == 0,
            _runs_in(self.runs, part) if self.runs else (),
        )


class AttentionState(NamedTuple):
    """Where a forward kernel merges its part; wide floats."""

    out: Tensor
    lse: Tensor

    def take(self, part: slice) -> AttentionState:
        """The same for a slice of the rows."""
        return AttentionState(self.out[:, part], self.lse[:, :, part])


class BackwardInputs(NamedTuple):
    """What the backward of some rows starts from; ``lse`` and ``delta`` are global.

    ``delta`` is left out for kernels that compute it themselves (:attr:`Kernel.needs_delta`).
    """

    dout: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor | None  # rowsum(dout * out) - dlse

    def take(self, part: slice) -> BackwardInputs:
        """The same for a slice of the rows."""
        delta = None if self.delta is None else self.delta[:, :, part]
        return BackwardInputs(self.dout[:, part], self.out[:, part], self.lse[:, :, part], delta)


class QueryGrads(NamedTuple):
    """Accumulators of the rows' gradients; wide floats."""

    dq: Tensor
    dbias: Tensor | None

    def take(self, part: slice) -> QueryGrads:
        """The same for a slice of the rows."""
        return QueryGrads(self.dq[:, part], None if self.dbias is None else self.dbias[:, :, part])


def zero_bias_grad(rows: QueryBlock, params: KernelParams, dtype: torch.dtype) -> Tensor | None:
    """Where the gradient of the bias is added up; ``None`` if none is wanted."""
    if rows.bias is None or not params.bias_grad:
        return None
    return torch.zeros(rows.bias.shape, dtype=dtype, device=rows.bias.device)


class KeyGrads(NamedTuple):
    """Accumulators of the columns' gradients; wide floats."""

    dk: Tensor
    dv: Tensor

    def take(self, part: slice) -> KeyGrads:
        """The same for a slice of the columns."""
        return KeyGrads(self.dk[:, part], self.dv[:, part])


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of accumulators for inputs of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_state(q: Tensor, v_dim: int) -> AttentionState:
    """Nothing seen yet, for queries ``[B, n, H, D]``: the identity of the merge."""
    batch, length, heads, _ = q.shape
    dtype = acc_dtype(q.dtype)
    return AttentionState(
        q.new_zeros(batch, length, heads, v_dim, dtype=dtype),
        q.new_full((batch, heads, length), -torch.inf, dtype=dtype),
    )


def unseen_state(
    q: Tensor, v_dim: int, dtype: torch.dtype | None = None, *, covered: bool = False
) -> AttentionState:
    """Room for the rows of ``q [B, n, H, D]``, ``out`` in its dtype or the one given.

    They see nothing, unless they are ``covered``: all will be written.
    """
    batch, length, heads, _ = q.shape
    out = q.new_empty(batch, length, heads, v_dim, dtype=dtype)
    lse = out.new_empty(batch, heads, length, dtype=torch.promote_types(out.dtype, torch.float32))
    if not covered:
        out.zero_()
        lse.fill_(-torch.inf)
    return AttentionState(out, lse)


class Inputs(NamedTuple):
    """The tensors of a call, as given (local shards); the last is what is taken off the bias."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_ids: Tensor | None
    k_ids: Tensor | None
    sinks: Tensor | None
    bias: Tensor | None
    slopes: Tensor | None
    bias_shift: Tensor | None = None  # [B or 1, H or 1, T_local], wide

    def key_tensors(self) -> list[Tensor]:
        """What travels of keys: ``k``, ``v`` and, where there are any, segment ids."""
        return [self.k, self.v] if self.k_ids is None else [self.k, self.v, self.k_ids]


#: How many fields of :class:`Inputs` are given.
GIVEN = len(Inputs._fields) - 1


def has_unit_stride(x: Tensor) -> bool:
    """Return True if the last dimension is contiguous: kernels take that for granted."""
    return x.stride(-1) == 1 or x.shape[-1] == 1


def with_unit_strides(inputs: Inputs) -> Inputs:
    """Copy the tensors whose last dimension is not contiguous: kernels would read other numbers."""
    return Inputs._make(
        x if x is None or x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
        for x in inputs
    )


class Grads(NamedTuple):
    """Gradients of an item, or of all that a rank holds, in the inputs' dtype or wider."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None


#: Which dimension heads are, of what is cut into groups of them.
_HEADS = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), 2) | {"lse": 1, "delta": 1}


def head_group[T: (
    Inputs, QueryBlock, KeyBlock, AttentionState, BackwardInputs, QueryGrads, KeyGrads
)](of: T, n: int, groups: int) -> T:  # fmt: skip
    """Views of the ``n``-th of so many equal groups of heads; without bias and slopes only."""
    if groups == 1:
        return of
    found: dict[str, Any] = {name: x for name, x in of._asdict().items() if x is not None}
    assert not found.keys() & {"bias", "slopes", "dbias"}
    for name in found.keys() & _HEADS.keys():
        size = found[name].shape[_HEADS[name]] // groups
        found[name] = found[name].narrow(_HEADS[name], n * size, size)
    return of._replace(**found)


def folded(sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """Sinks ``[H]`` or ``[H, n]`` as one a head."""
    sinks = sinks.to(dtype)
    return sinks if sinks.ndim == 1 else sinks.logsumexp(dim=1)
