"""The records that the strategies, the loops and the kernels hand each other.

Inside a call tensors are heads first: ``q [B, H, T, D]``, and K and V side by side in one array
``kv [B, K, S, D + Dv]``, so that they travel as one message and a kernel fetches them together.
``T`` and ``S`` are the queries and keys of a rank. Accumulators are float32 (float64 for float64);
that dtype is called wide.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, TypedDict

import jax.numpy as jnp
from jax import Array as Array

from ring_core import (
    Capabilities,
    HeadPlan,
    KernelConfig,
    Mask,
    Plan,
    Request,
    RingProgram,
    StrategyConfig,
    StrategyName,
    head_plan,
)
from ring_core.masks.mask import Window as Window
from ring_core.programs.grid import RankGrid
from ring_core.programs.ring import TABLE_UNBOUNDED

Direction = Literal["forward", "backward"]


class AttentionOptions(TypedDict, total=False):
    """Keyword options of :func:`ring_jax.ring_attention`, to type functions that forward them."""

    seq_len: int | tuple[int, int] | None
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


class CallOptions(NamedTuple):
    """The values of a call's options as the user passed them, all but ``q``, ``k`` and ``v``."""

    seq_len: int | tuple[int, int] | None = None
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
    """The arrays of a call as users pass them: ``q``, ``k``, ``v`` are ``[B, T, heads, D]``."""

    q: Array
    k: Array
    v: Array
    q_ids: Array | None
    k_ids: Array | None
    sinks: Array | None
    bias: Array | None
    slopes: Array | None  # [B or 1, H]
    seed: Array | None  # uint32[2], low word first
    numbers: Array | None  # int32 [1 + H], of the first batch row and of each head, for dropout
    mask: Array | None = None  # bool, shaped like the bias; `prepared` folds it into the bias
    bias_shift: Array | None = None  # wide [B or 1, H or 1, T], computed inside a call


class QueryPayload(NamedTuple):
    """The message that lets another rank compute attention for this rank's queries."""

    q: Array  # [B, H, T, D]
    ids: Array | None  # int32 [B, T]
    bias: Array | None  # [B or 1, H or 1, T, S], the columns of the keys they are to meet
    bias_shift: Array | None  # wide [B or 1, H or 1, T]
    upstream: BackwardInputs | None = None  # in a backward, what the gradients of q start from


class KVPayload(NamedTuple):
    """The message that carries a rank's keys and values round the ring."""

    kv: Array  # [B, K, S, D + Dv]
    ids: Array | None  # int32 [B, S]


class QueryBlock(NamedTuple):
    """A rank's queries and the options that belong to them, as a kernel takes them.

    With a ``bias_shift`` kernels add ``bias - bias_shift`` to the scores, in the dtype of
    accumulators, and ``-inf`` still masks: ``lse`` is then that of shifted scores. The shift is the
    largest finite bias of a row, so that an accumulator holds ``lse`` however negative biases are.
    """

    q: Array  # [B, H, T, D]
    positions: Array  # int32 [T], where each query stands among the keys
    indices: Array  # int32 [T], its global index among the queries
    cells: Array | None  # int32 [T], number of the document or chunk it lies in
    ids: Array | None  # int32 [B, T]
    bias: Array | None  # [B or 1, H or 1, T, S]
    bias_shift: Array | None  # wide [B or 1, H or 1, T]; B where segment ids differ between rows
    slopes: Array | None  # [B or 1, H]
    seed: Array | None  # uint32 [2]
    numbers: Array | None  # int32 [1 + H]


class KeyBlock(NamedTuple):
    """A rank's keys and values, or those of all ranks, as a kernel takes them."""

    kv: Array  # [B, K, S, D + Dv]
    positions: Array  # int32 [S], global index of each key
    cells: Array | None  # int32 [S], number of the document or chunk it lies in
    ids: Array | None  # int32 [B, S]


class ItemTable(NamedTuple):
    """The work items of one launch: this rank's rows of the program's tables.

    In a loop of launches each array has a first dimension more, the stages of the loop.
    """

    items: Array  # int32 [R, len(Item._fields)]; items of no row are unused
    kinds: Array | None  # of the tiles of a predicate, [ceil(T / TILE), ceil(S / TILE)]
    q_rank: Array  # int32 [], the rank whose queries these are
    kv_rank: Array  # int32 [], the rank whose keys they meet; unused if keys are gathered
    number: Array | None  # int32 [], that of the only item among `LaunchSpec.items`


class BackwardInputs(NamedTuple):
    """The arrays that the backward of queries starts from; ``lse`` and ``delta`` are global."""

    dout: Array  # [B, H, T, Dv]
    lse: Array  # [B, H, T]
    delta: Array  # [B, H, T], rowsum(dout * out) - dlse
    out: Array | None = None  # [B, H, T, Dv], what the call returned; not sent to other ranks


class AttentionState(NamedTuple):
    """The accumulator of a forward, ``(out, lse)`` of the keys so far.

    It starts as zeros and ``-inf``, the identity of the merge.
    """

    out: Array  # [B, H, T, Dv]
    lse: Array  # [B, H, T]


class Grads(NamedTuple):
    """The accumulators of a backward, to which each kernel launch adds."""

    dq: Array  # [B, H, T, D]
    dkv: Array  # [B, K, S, D + Dv]
    dbias: Array | None  # shaped like the bias of the queries


class LocalShape(NamedTuple):
    """Sizes, dtypes and options of one device's part of a call, by which a kernel may refuse it."""

    lists: int  # block lists a kernel needs: batch rows whose visible keys differ, else 1
    q_len: int
    k_lengths: tuple[int, ...]  # keys of a launch: a rank's, or those of all ranks
    head_dim: int
    v_head_dim: int
    itemsize: int
    has_bias: bool
    has_dropout: bool
    device_kind: str  # as jax calls it
    dtype: str
    bias_dtype: str | None  # dtype of the bias before a mask is folded in
    has_mask: bool  # the call has a mask that is an array
    deterministic: bool  # the backward must repeat bit for bit


class Devices(NamedTuple):
    """Platform of the devices along the axis, and whether one process drives all of them."""

    platform: str  # as jax calls it: "cpu", "gpu" or "tpu"
    in_one_process: bool


class Item[N: (int, Array)](NamedTuple):
    """A work item: a rectangle of local queries and keys, and the band of it that is visible.

    Local query ``q_start + i`` sees key ``k_start + j`` where ``lo <= i - j <= hi``; an unbounded
    side is ``TABLE_UNBOUNDED``, as in the program's table. An item of no queries is no work.
    Numbers are Python's where they are known, else traced int32 scalars.
    """

    q_start: N
    q_stop: N
    k_start: N
    k_stop: N
    lo: N
    hi: N

    @property
    def is_empty(self) -> bool:
        """True if it has no queries, where numbers are known."""
        return bool(self.q_stop <= self.q_start)

    @property
    def is_full(self) -> bool:
        """True if all of its queries see all of its keys, where numbers are known."""
        return (self.lo, self.hi) == (-TABLE_UNBOUNDED, TABLE_UNBOUNDED)


def nbytes(*arrays: Array | None) -> int:
    """Count the bytes of arrays, those that are traced too; ``None`` has none."""
    return sum(x.size * x.dtype.itemsize for x in arrays if x is not None)


@dataclass(frozen=True)
class Trade:
    """A trade of tokens for heads among ranks, and what each computes then with its heads.

    Attributes:
        grid: The groups of ranks that trade.
        num_heads: Query heads and K/V heads of the call, on one device.
        program: The work of the inner call, over the tokens of a group.
        strategy: The strategy of the inner call: how K/V move between groups.
    """

    grid: RankGrid
    num_heads: tuple[int, int]
    program: RingProgram
    strategy: StrategyName = "ring"

    @property
    def heads(self) -> HeadPlan:
        """The heads that each rank of a group attends with."""
        return head_plan(*self.num_heads, self.grid.ulysses_size)


@dataclass(frozen=True)
class CallSpec:
    """Everything static about one checked call; hashable, so that programs are cached by it.

    Attributes:
        program: What each rank computes and sends, step by step.
        axis_name: The mesh axis that splits the sequence; ``None`` is one device.
        scale: Factor of the scores, ``softmax_scale``.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        dropout_p: Probability to drop a softmax weight.
        kernels: The kernels chosen for the call. The one whose platform is compiled for runs; the
            last one runs on all other platforms.
        config: Block sizes and other settings of the kernel.
        dtype: Name of the dtype of q, k and v.
        head_dim: Head dim of Q and K.
        strategy: How K/V move between ranks.
        bias_masks: The bias is ``-inf`` where a mask that is an array hides keys: kernels skip
            blocks that it hides entirely.
        bias_grad: The bias, if there is one, has a gradient.
        forward_only: The kernels of ``kernels`` that cannot do the backward; another one does it.
        check_every: The tripwire checks one call in this many; 0 checks none.
        deterministic: The backward must repeat bit for bit.
        has_sinks: Sinks rescale the result after the last kernel.
        trade: How ranks trade tokens for heads, if they do.
        stride: The distance along the axis of neighbouring ranks of this call.
    """

    program: RingProgram
    axis_name: Hashable | None
    scale: float
    softcap: float | None
    dropout_p: float
    kernels: tuple[Kernel, ...]
    config: KernelConfig
    dtype: str
    head_dim: int
    strategy: StrategyName = "ring"
    bias_masks: bool = False
    bias_grad: bool = True
    forward_only: tuple[Kernel, ...] = ()
    check_every: int = 0
    deterministic: bool = False
    has_sinks: bool = False
    trade: Trade | None = None
    stride: int = 1

    @property
    def inner(self) -> CallSpec:
        """The call whose launches a device runs: where heads are traded, that of its heads."""
        if self.trade is None:
            return self
        grid = self.trade.grid
        return replace(
            self, program=self.trade.program, strategy=self.trade.strategy, trade=None,
            axis_name=self.axis_name if grid.outer_size > 1 else None, stride=grid.ulysses_size,
        )  # fmt: skip

    @property
    def plan(self) -> Plan:
        """The plan of the program: which queries meet which keys."""
        return self.program.plan

    @property
    def wide(self) -> jnp.dtype:
        """Dtype of accumulators: float64 for float64 calls, else float32."""
        return jnp.dtype("float64" if self.dtype == "float64" else "float32")


@dataclass(frozen=True)
class LaunchSpec:
    """Everything static about one kernel launch of a call; hashable.

    Attributes:
        call: The call it belongs to.
        overwrite: The accumulator still holds the identity: ``out`` and ``lse`` in a forward,
            ``dkv`` in a backward. A kernel may write there without reading.
        is_final: No later launch merges into the result, so it may be rounded to the call's dtype.
        items: The distinct work items of all ranks, apart from segment ids, which may hide more;
            ``ItemTable.number`` says which one is the rank's. ``None`` if some rank has several
            items, several documents or a predicate.
    """

    call: CallSpec
    overwrite: bool = False
    is_final: bool = False
    items: tuple[Item[int], ...] | None = None

    @property
    def rectangles(self) -> tuple[Item[int], ...]:
        """The distinct work items if all are fully visible, else an empty tuple."""
        items = self.items or ()
        return items if all(item.is_full or item.is_empty for item in items) else ()


class Kernel(Protocol):
    """A way to compute work items on one device, unaware of axes, steps and peers; hashable."""

    def __hash__(self) -> int:
        """Return the hash of a kernel without settings; dataclasses have their own."""
        return hash(type(self))

    @property
    def capabilities(self) -> Capabilities:
        """Return what it can do; it is only given calls that fit."""

    def refusals(
        self, _direction: Direction, _local: LocalShape, _config: KernelConfig, _program: RingProgram, /
    ) -> tuple[str, ...]:  # fmt: skip
        """Return why it cannot do a pass of a call that fits its capabilities; empty if it can."""
        return ()

    def notes(
        self, _request: Request, _config: KernelConfig, _program: RingProgram, /
    ) -> tuple[str, ...]:
        """Return lines for ``explain`` and the doctor on what it decides when a call is lowered."""
        return ()

    def leads(self, _capability: int, _request: Request, _mask: Mask, /) -> bool:
        """Return True if ``auto`` tries it before others on GPUs of a capability, 90 for 9.0."""
        return False

    def constant_bytes(self, _program: RingProgram, /) -> int:
        """Return the bytes of constants that each launch adds to a program, beside its items."""
        return 0

    def attend_into(
        self,
        spec: LaunchSpec,
        rows: QueryBlock,
        columns: KeyBlock,
        work: ItemTable,
        into: AttentionState,
    ) -> AttentionState:
        """Return ``into`` merged with the attention of the work items."""

    def grads_into(
        self, spec: LaunchSpec, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, work: ItemTable,
        into: Grads,
    ) -> Grads:  # fmt: skip
        """Return ``into`` plus the gradients of the work items."""
