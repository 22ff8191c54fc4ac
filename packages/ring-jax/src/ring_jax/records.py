"""What the loops and the kernels hand each other.

Inside a call tensors are heads first: ``q [B, H, T, D]``, and K and V side by side in one array
``kv [B, K, S, D + Dv]``, so that they travel as one message and a kernel fetches them together.
``T`` and ``S`` are the queries and keys of a rank. Accumulators are float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypedDict

import jax.numpy as jnp
from jax import Array as Array

from ring_core import (
    TABLE_UNBOUNDED,
    Capabilities,
    KernelConfig,
    Mask,
    Plan,
    RingProgram,
    StrategyConfig,
    StrategyName,
)

Window = tuple[int | None, int | None]
Pass = Literal["forward", "backward"]


class AttentionOptions(TypedDict, total=False):
    """The options of :func:`ring_jax.ring_attention`, for functions that hand them on."""

    causal: bool
    window: Window | None
    chunk_size: int | None
    cu_seqlens: Sequence[int] | None
    segment_ids: Array | tuple[Array, Array] | None
    mask: Mask | Array | None
    softmax_scale: float | None
    softcap: float | None
    sinks: Array | None
    bias: Array | None
    alibi_slopes: Array | None
    dropout_p: float
    dropout_seed: int | Array | None
    deterministic: bool
    kernel: str | KernelConfig
    strategy: str | StrategyConfig
    transport: str


class Options(NamedTuple):
    """All of a call but its q, k and v, as given."""

    causal: bool = False
    window: Window | None = None
    chunk_size: int | None = None
    cu_seqlens: Sequence[int] | None = None
    segment_ids: Array | tuple[Array, Array] | None = None
    mask: Mask | Array | None = None
    softmax_scale: float | None = None
    softcap: float | None = None
    sinks: Array | None = None
    bias: Array | None = None
    alibi_slopes: Array | None = None
    dropout_p: float = 0.0
    dropout_seed: int | Array | None = None
    deterministic: bool = False
    return_lse: bool = False
    kernel: str | KernelConfig = "auto"
    strategy: str | StrategyConfig = "auto"
    transport: str = "auto"


class Inputs(NamedTuple):
    """The arrays of a call, as given: ``q``, ``k``, ``v`` are ``[B, T, heads, D]``."""

    q: Array
    k: Array
    v: Array
    q_ids: Array | None
    k_ids: Array | None
    sinks: Array | None
    bias: Array | None
    slopes: Array | None  # [B or 1, H]
    seed: Array | None  # uint32[2], low word first
    offsets: Array | None  # int32[2], what to add to the local batch and head for dropout
    mask: Array | None = None  # bool, like the bias; inside a call the bias says it
    bias_shift: Array | None = None  # wide [B or 1, H or 1, T], computed inside a call


class Queries(NamedTuple):
    """What another rank must be sent to compute for these queries."""

    q: Array  # [B, H, T, D]
    ids: Array | None  # int32 [B, T]
    bias: Array | None  # [B or 1, H or 1, T, S], the columns of the keys they are to meet
    bias_shift: Array | None  # wide [B or 1, H or 1, T]
    upstream: BackwardInputs | None = None  # of a backward


class KVPayload(NamedTuple):
    """What travels round the ring."""

    kv: Array  # [B, K, S, D + Dv]
    ids: Array | None  # int32 [B, S]


class QueryBlock(NamedTuple):
    """A rank's queries and all that belongs to them.

    With a ``bias_shift`` kernels add ``bias - bias_shift`` to the scores, in the dtype of
    accumulators, and ``-inf`` hides as ever: ``lse`` is then that of shifted scores. It is the
    largest finite bias of a row, so that an accumulator holds ``lse`` however negative biases are.
    """

    q: Array  # [B, H, T, D]
    positions: Array  # int32 [T], where each query stands among the keys
    indices: Array  # int32 [T], its index among the queries
    cells: Array | None  # int32 [T], the document or chunk it lies in
    ids: Array | None  # int32 [B, T]
    bias: Array | None  # [B or 1, H or 1, T, S]
    bias_shift: Array | None  # wide [B or 1, H or 1, T]; B where segment ids differ between rows
    slopes: Array | None  # [B or 1, H]
    seed: Array | None  # uint32 [2]
    offsets: Array | None  # int32 [2]


class KeyBlock(NamedTuple):
    """A rank's keys and values and all that belongs to them."""

    kv: Array  # [B, K, S, D + Dv]
    positions: Array  # int32 [S], global index of each key
    cells: Array | None  # int32 [S]
    ids: Array | None  # int32 [B, S]


class ItemTable(NamedTuple):
    """The items of one rank in one step, for one side's queries: rows of the program's table.

    ``kinds`` are the kinds of the tiles of a predicate mask, ``[ceil(T / TILE), ceil(S / TILE)]``.
    """

    items: Array  # int32 [R, len(TABLE_COLUMNS)]
    kinds: Array | None


class BackwardInputs(NamedTuple):
    """What the backward of some rows starts from; ``lse`` and ``delta`` are global."""

    dout: Array  # [B, H, T, Dv]
    lse: Array  # [B, H, T]
    delta: Array  # [B, H, T], rowsum(dout * out) - dlse
    out: Array | None = None  # [B, H, T, Dv], what the call returned; helpers are not sent it


class AttentionState(NamedTuple):
    """Where a forward kernel merges its part: the identity is zeros and ``-inf``."""

    out: Array  # [B, H, T, Dv]
    lse: Array  # [B, H, T]


class Grads(NamedTuple):
    """Where a backward kernel adds its part."""

    dq: Array  # [B, H, T, D]
    dkv: Array  # [B, K, S, D + Dv]
    dbias: Array | None  # like the rows' bias


class LocalShape(NamedTuple):
    """What a device is given of a call, as far as a kernel may refuse it for its size."""

    lists: int  # of blocks to visit: as many as rows of the batch that see differently
    q_len: int
    k_lengths: tuple[int, ...]  # keys of a launch: a rank's, or those of all ranks
    head_dim: int
    v_head_dim: int
    itemsize: int
    has_bias: bool
    has_dropout: bool
    device_kind: str  # as jax calls it
    dtype: str
    bias_dtype: str | None  # without what a mask adds to it
    has_mask: bool  # one that is an array


class Rectangle(NamedTuple):
    """Local queries of a rank that see the same local keys of a rank, all of them."""

    q_rank: int
    kv_rank: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


class Item(NamedTuple):
    """All that a rank computes in a step: a rectangle, and the band of it that is seen.

    Local query ``q_start + i`` sees key ``k_start + j`` where ``lo <= i - j <= hi``; unbounded
    sides are those of the program's table.
    """

    rectangle: Rectangle
    lo: int
    hi: int


def nbytes(*arrays: Array | None) -> int:
    """Count the bytes of arrays, those that are traced too; ``None`` has none."""
    return sum(x.size * x.dtype.itemsize for x in arrays if x is not None)


def rectangles_of(items: tuple[Item, ...] | None) -> tuple[Rectangle, ...]:
    """The rectangles of items that show all of theirs; none if one does not."""
    unbounded = (-TABLE_UNBOUNDED, TABLE_UNBOUNDED)
    if items is None or any((item.lo, item.hi) != unbounded for item in items):
        return ()
    return tuple(item.rectangle for item in items)


@dataclass(frozen=True)
class Static:
    """What is known of a call when it is traced; hashable.

    Attributes:
        fresh: A kernel is the first to add to its ``into``, which holds the identity: to the
            result, or to ``dkv`` of the gradients. It may write there instead.
        last: Nothing is merged into a kernel's result any more. It may be rounded.
        items: All that ranks compute now, but for segment ids, which may hide some of it; ``None``
            if some rank has more than one rectangle, or several documents or a predicate.
        bias_masks: The bias is ``-inf`` where a mask that is an array hides: blocks that it hides
            are to be skipped.
        bias_grad: The bias, if there is one, has a gradient.
        forward_only: Those of the kernels whose backward another one does.
        check: One in so many calls is checked by the tripwire; 0 is none.
    """

    program: RingProgram
    axis_name: Hashable | None
    scale: float
    softcap: float | None
    dropout_p: float
    kernels: tuple[Kernel, ...]  # the first whose device is the one compiled for
    config: KernelConfig
    dtype: str
    head_dim: int
    strategy: StrategyName = "ring"
    fresh: bool = False
    last: bool = False
    items: tuple[Item, ...] | None = None
    bias_masks: bool = False
    bias_grad: bool = True
    forward_only: tuple[Kernel, ...] = ()
    check: int = 0

    @property
    def plan(self) -> Plan:
        """What meets what."""
        return self.program.plan

    @property
    def rectangles(self) -> tuple[Rectangle, ...]:
        """All that ranks compute now, if that is at most one each, without a band."""
        return rectangles_of(self.items)

    @property
    def wide(self) -> jnp.dtype:
        """Of accumulators."""
        return jnp.dtype("float64" if self.dtype == "float64" else "float32")


class Kernel(Protocol):
    """A way to compute work items: no axis, no step, no communication in sight. Hashable."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; it is only ever given calls that fit."""

    def refusals(
        self, direction: Pass, local: LocalShape, config: KernelConfig, program: RingProgram, /  # noqa: ARG002
    ) -> tuple[str, ...]:  # fmt: skip
        """Why it cannot do a pass of what it can do otherwise: sizes that do not fit."""
        return ()

    def attend_into(
        self,
        static: Static,
        rows: QueryBlock,
        columns: KeyBlock,
        work: ItemTable,
        into: AttentionState,
    ) -> AttentionState:
        """Attend and merge into ``into``."""

    def grads_into(
        self, static: Static, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, work: ItemTable,
        into: Grads,
    ) -> Grads:  # fmt: skip
        """Add the items' gradients to ``into``."""
