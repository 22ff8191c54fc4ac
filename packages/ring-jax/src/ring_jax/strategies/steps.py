"""The loop of one program on all devices: move K/V, call a kernel for each step, merge.

The stages are the program's. What overlaps is said by data dependencies (``overlap``): the K/V
that arrive for the next step are tied to the result of this step's kernel (twice, see
``order_after``), so that the compiler starts the transfer before that kernel, and waits for it when
it is done. dK/dV travel one step late: while a step's kernel runs, the sum of those before does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import lax

from ring_core import RingProgram, Stage
from ring_core.base.arguments import not_none
from ring_jax.collectives import Ranks, match_varying, reload_after, varying_axes
from ring_jax.rank_view import RankView, StepTable, all_positions, step_table
from ring_jax.records import (
    Array,
    AttentionState,
    BackwardInputs,
    Grads,
    Inputs,
    ItemTable,
    KeyBlock,
    KVPayload,
    Pass,
    Queries,
    QueryBlock,
    Static,
)


class Strategy(NamedTuple):
    """How tokens move so that each work item finds its operands.

    Attributes:
        forward: Attention of this device's queries, wide, heads first, sinks not yet included; and
            what the backward starts from.
        backward: Gradients of this device's shards, wide, heads first.
        refusals: Why it cannot do a plan.
        key_lengths: How many keys a kernel is given at once, each number that occurs.
        sent: How many bytes leave all ranks together in a pass, by the stages that it runs.
    """

    forward: Callable[[Static, Inputs], tuple[AttentionState, KVPayload | None]]
    backward: Callable[[Static, Inputs, BackwardInputs, KVPayload | None], Grads]
    refusals: Callable[[RingProgram], list[str]]
    key_lengths: Callable[[RingProgram], tuple[int, ...]]
    sent: Callable[[Static, Inputs, Pass], int]


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """:func:`ring_core.merge`: the value of an output whose ``lse`` is ``-inf`` is never read."""
    lse = jnp.logaddexp(a.lse, b.lse)
    safe = jnp.where(lse == -jnp.inf, 0.0, lse)
    parts = [
        jnp.where(x.lse[..., None] == -jnp.inf, 0.0, x.out * jnp.exp(x.lse - safe)[..., None])
        for x in (a, b)
    ]
    return AttentionState(parts[0] + parts[1], lse)


def to_bhtd(x: Array) -> Array:
    """``[B, T, H, D]`` as ``[B, H, T, D]``."""
    return x.swapaxes(1, 2)


def own_message(x: Inputs, after: Array | None = None) -> KVPayload:
    """What this device's keys travel as.

    It is packed anew ``after`` some results; else what was packed before them is kept until then.
    """
    k, v = (x.k, x.v) if after is None else reload_after((x.k, x.v), after)
    return KVPayload(jnp.concatenate([to_bhtd(k), to_bhtd(v)], axis=-1), x.k_ids)


class QueryGrads(NamedTuple):
    """Gradients of some rank's queries and of the bias of all, or some, of the keys."""

    dq: Array
    dbias: Array | None


@dataclass(frozen=True)
class StepRunner:
    """What forward and backward need: the ring, this device's side of the plan, accumulators."""

    static: Static
    inputs: Inputs
    ring: Ranks
    side: RankView

    @classmethod
    def of(cls, static: Static, x: Inputs) -> StepRunner:
        """The loop of a call."""
        ring = Ranks(static.axis_name, static.plan.cp_size)
        return cls(static, x, ring, RankView(static, x, ring.rank()))

    def zeros(self, shape: tuple[int, ...], fill: float = 0.0) -> Array:
        """A wide accumulator, which varies over the axes that the inputs do."""
        return match_varying(jnp.full(shape, fill, self.static.wide), varying_axes(self.inputs))

    def nothing_seen(self, q: Array, v_dim: int) -> AttentionState:
        """The identity of the merge."""
        return AttentionState(self.zeros((*q.shape[:3], v_dim)), self.zeros(q.shape[:3], -jnp.inf))

    def no_bias_grad(self, bias: Array | None) -> Array | None:
        """Where the gradient of a bias is added, if it has one."""
        return self.zeros(bias.shape) if bias is not None and self.static.bias_grad else None

    def hop[T](self, x: T, hop: int | None) -> T:
        """Move what travels round the ring."""
        return x if hop is None else self.ring.move(x, hop)

    def attend(
        self,
        part: StepTable,
        q: Array,
        held: KVPayload,
        into: AttentionState,
        *,
        fresh: bool,
        last: bool,
    ) -> AttentionState:
        """Run a part's items for this device's own queries."""
        work = self.side.own_work(part)
        if work is None:
            return into
        rows, columns = self._own(part, q, held)
        static = replace(self.static, fresh=fresh, last=last, items=part.items)
        return _kernel("attend_into", static, rows, columns, work, into=into)

    def differentiate(
        self, part: StepTable, q: Array, held: KVPayload, upstream: BackwardInputs, grads: QueryGrads, dkv: Array,
        *, fresh: bool,
    ) -> tuple[QueryGrads, Array]:  # fmt: skip
        """Add the gradients of a part's items for this device's own queries."""
        work = self.side.own_work(part)
        if work is None:
            return grads, dkv
        rows, columns = self._own(part, q, held)
        into = Grads(grads.dq, dkv, self.no_bias_grad(rows.bias))
        static = replace(self.static, fresh=fresh, items=part.items)
        dq, dkv, of_bias = _kernel("grads_into", static, rows, columns, upstream, work, into=into)
        return QueryGrads(dq, self._add_bias_grad(grads.dbias, columns.positions, of_bias)), dkv

    def ship(
        self, stage: Stage | None, q: Array, upstream: BackwardInputs | None = None
    ) -> Queries | None:
        """Send this device's queries to its helper in a stage; returns those it helps itself."""
        if stage is None or not stage.helps:
            return None
        part = step_table(self.static.program, stage.step)
        upstream = None if upstream is None else upstream._replace(out=None)
        bias = self._bias(self._helpers_keys(part))
        queries = Queries(q, self.inputs.q_ids, bias, self.inputs.bias_shift, upstream)
        return self.ring.move(queries, part.shift, part.helpers)

    def help(self, part: StepTable, helping: Queries, own: KVPayload) -> AttentionState:
        """Attend for another rank's queries, over this device's own keys."""
        rows, columns, work = self._theirs(part, helping, own)
        empty = self.nothing_seen(rows.q, own.kv.shape[3] - self.static.head_dim)
        static = replace(self.static, fresh=True)
        return _kernel("attend_into", static, rows, columns, work, into=empty)

    def help_backward(
        self, part: StepTable, helping: Queries, own: KVPayload, at_home: Array
    ) -> tuple[QueryGrads, Array]:
        """The gradients of another rank's queries, and of the own keys."""
        rows, columns, work = self._theirs(part, helping, own)
        into = Grads(self.zeros(rows.q.shape), at_home, self.no_bias_grad(rows.bias))
        grads = _kernel("grads_into", self.static, rows, columns, helping.upstream, work, into=into)
        return QueryGrads(grads.dq, grads.dbias), grads.dkv

    def home[R: (AttentionState, QueryGrads)](self, part: StepTable, results: R) -> R:
        """Send results to whom they belong; a rank that nobody helped gets the identity."""
        size, shift = self.static.plan.cp_size, part.shift
        owners = [(r - shift) % size for r in part.helpers]
        moved = self.ring.move(results, -shift, owners)
        if isinstance(moved, QueryGrads):
            return moved
        is_helped = jnp.zeros(size, bool).at[jnp.array(owners)].set(True)
        return moved._replace(lse=jnp.where(is_helped[self.side.rank], moved.lse, -jnp.inf))

    def add(self, grads: QueryGrads, part: StepTable, found: QueryGrads) -> QueryGrads:
        """Add what a helper sent home."""
        return QueryGrads(
            grads.dq + found.dq,
            self._add_bias_grad(grads.dbias, self._helpers_keys(part), found.dbias),
        )

    def _helpers_keys(self, part: StepTable) -> Array:
        """Positions of the keys that this device's queries meet at its helper's."""
        return self.side.key_positions(-part.shift)

    def _own(self, part: StepTable, q: Array, held: KVPayload) -> tuple[QueryBlock, KeyBlock]:
        side = self.side
        if part.gathered:
            positions = all_positions(self.static.plan.k_layout).reshape(-1)
        else:
            positions = side.key_positions(part.shift)
        queries = Queries(q, self.inputs.q_ids, self._bias(positions), self.inputs.bias_shift)
        return side.rows(part, 0, queries), side.columns(part, positions, held)

    def _theirs(
        self, part: StepTable, helping: Queries, own: KVPayload
    ) -> tuple[QueryBlock, KeyBlock, ItemTable]:
        side = self.side
        columns = side.columns(part, side.key_positions(0), own)
        return side.rows(part, part.shift, helping), columns, not_none(side.helped_work(part))

    def _bias(self, keys: Array) -> Array | None:
        bias = self.inputs.bias
        return bias if bias is None or self._has_all_keys else jnp.take(bias, keys, axis=3)

    def _add_bias_grad(self, dbias: Array | None, keys: Array, part: Array | None) -> Array | None:
        if dbias is None or part is None:
            return dbias
        return dbias + part if self._has_all_keys else dbias.at[..., keys].add(part)

    @property
    def _has_all_keys(self) -> bool:
        """Whether this device's keys are all there are, in the order of the bias's columns."""
        plan = self.static.plan
        return plan.cp_size == 1 and bool((np.diff(plan.k_positions(0)) == 1).all())


def _kernel[State: (AttentionState, Grads)](
    name: str, static: Static, rows: QueryBlock, *args: Any, into: State
) -> State:
    """Call the kernel of the platform that is compiled for, if there are queries."""
    if rows.q.size == 0:
        return into
    left_out = () if name == "attend_into" else static.forward_only
    kernels = [kernel for kernel in static.kernels if kernel not in left_out]
    calls = {
        device: partial(getattr(kernel, name), static)
        for kernel in kernels
        for device in kernel.capabilities.devices or ("default",)
    }
    if len(kernels) == 1:
        (call, *_) = calls.values()
        return cast("State", call(rows, *args, into))
    return cast("State", lax.platform_dependent(rows, *args, into, **calls))
