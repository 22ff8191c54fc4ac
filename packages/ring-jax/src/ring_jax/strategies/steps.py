"""The parts of a strategy's loop: move K/V, call a kernel for each step, merge.

One program runs on all devices, and its stages are those of :class:`ring_core.RingProgram`. Data
dependencies say what overlaps (``overlap``): the K/V that arrive for the next step are tied to the
result of this step's kernel (twice, see ``order_after``), so that the compiler starts the transfer
before that kernel, and waits for it when it is done. dK/dV travel one step late: while a step's
kernel runs, the sum of the steps before it is in flight.

With the strategy ``balanced``, a rank that would idle in a step helps another one: it takes that
rank's queries, computes their attention over its own K/V, and sends the results back. Such a rank
is called a helper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ring_core import Request, RingProgram, StrategyConfig, StrategyName
from ring_core.programs.ring import Stage
from ring_jax.collectives import Ranks, match_varying, reload_after, varying_axes
from ring_jax.kernels.absent import AbsentKernel, lowered_for, or_broken
from ring_jax.positions import all_positions
from ring_jax.rank_view import Launches, RankView, StepTable, is_padding, ranks_of, step_table
from ring_jax.records import (
    Array,
    AttentionState,
    BackwardInputs,
    CallSpec,
    Devices,
    Direction,
    Grads,
    Inputs,
    ItemTable,
    Kernel,
    KeyBlock,
    KVPayload,
    LaunchSpec,
    QueryBlock,
    QueryPayload,
    Trade,
)


class Strategy(NamedTuple):
    """A way to move tokens so that each work item finds its operands.

    Programs are those of the call; of a strategy that trades heads ``key_lengths`` and ``launches``
    are given that of its inner call.

    Attributes:
        name: The name that ``strategy=`` takes.
        forward: Computes attention of this device's queries, heads first, wide and before sinks
            unless it adds these; and returns what the backward starts from beside the inputs.
        backward: Computes gradients of this device's shards, wide or rounded, heads first.
        refusals: Returns the reasons why it cannot run a program; empty if it can.
        key_lengths: Returns each number of keys that a kernel is given at once.
        launches: Returns the launches of both passes, whose tables a program holds.
        sent: Returns the bytes that leave all ranks together in one pass, counted over the stages
            that it runs.
        figures: Returns lines for ``explain`` with numbers: how even the work is, what moves how
            often.
        automatic_refusals: Returns the reasons why ``auto`` does not take it, though it could run.
        trade: Returns how ranks trade tokens for heads; ``None`` if they do not.
        adds_sinks: The forward adds sinks.
    """

    name: StrategyName
    forward: Callable[[CallSpec, Inputs], tuple[AttentionState, Any]]
    backward: Callable[[CallSpec, Inputs, BackwardInputs, Any], Grads]
    refusals: Callable[[RingProgram, Request], Sequence[str]]
    key_lengths: Callable[[RingProgram], tuple[int, ...]]
    launches: Callable[[RingProgram], list[Launches]]
    sent: Callable[[CallSpec, Inputs, Direction], int]
    figures: Callable[[CallSpec], list[str]]
    automatic_refusals: Callable[[RingProgram, Request, Devices], Sequence[str]] = lambda *_: ()
    trade: Callable[[StrategyConfig, RingProgram, Request, Devices], Trade | None] = lambda *_: None
    adds_sinks: bool = False


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """Merge attention over two disjoint sets of keys, like :func:`ring_core.merge`.

    Values of ``out`` are not read where its ``lse`` is ``-inf``; they may be anything.
    """
    lse = jnp.logaddexp(a.lse, b.lse)
    # Where both are -inf, -inf - -inf would be NaN. And `out` under -inf may be NaN, which a weight
    # of 0 does not remove, so it is selected away, not multiplied.
    safe = jnp.where(lse == -jnp.inf, 0.0, lse)
    parts = [
        jnp.where(x.lse[..., None] == -jnp.inf, 0.0, x.out * jnp.exp(x.lse - safe)[..., None])
        for x in (a, b)
    ]
    return AttentionState(parts[0] + parts[1], lse)


def add_sinks(call: CallSpec, result: AttentionState, sinks: Array) -> AttentionState:
    """Add sinks ``[H]`` or ``[H, n]`` to the softmax, like :func:`ring_core.finalize`."""
    out, lse = result
    folded = jax.nn.logsumexp(sinks.astype(lse.dtype).reshape(sinks.shape[0], -1), axis=1)
    with_sinks = jnp.logaddexp(lse, folded[None, :, None])
    # A sink yields no value: it only takes its share of the weights of all keys.
    weight = jnp.exp(lse - jnp.where(with_sinks == -jnp.inf, 0.0, with_sinks))
    if call.plan.q_layout.pad_to is not None:  # padding sees nothing, not even a sink
        with_sinks = jnp.where(is_padding(call), -jnp.inf, with_sinks)
    return AttentionState(out * weight[..., None], with_sinks)


def to_bhtd(x: Array) -> Array:
    """Transpose ``[B, T, H, D]`` to ``[B, H, T, D]``."""
    return x.swapaxes(1, 2)


def own_message(x: Inputs, after: Array | None = None) -> KVPayload:
    """Pack this device's K and V into the message that travels.

    With ``after``, the message is packed again once those results are there, so that an earlier
    copy need not be kept in memory until then.
    """
    k, v = (x.k, x.v) if after is None else reload_after((x.k, x.v), after)
    return KVPayload(jnp.concatenate([to_bhtd(k), to_bhtd(v)], axis=-1), x.k_ids)


class QueryGrads(NamedTuple):
    """Gradients of one rank's queries, and of their bias."""

    dq: Array
    dbias: Array | None


class Returned[R: (AttentionState, QueryGrads)](NamedTuple):
    """Results of a helper, at home with the rank whose queries they are of.

    Attributes:
        results: Attention of the queries over the helper's keys, or their gradients.
        key_positions: Global indices of these keys, int32 ``[S]``; ``None`` without a bias.
    """

    results: R
    key_positions: Array | None


@dataclass(frozen=True)
class StepRunner:
    """The operations of one pass on this device: send, launch kernels, add up gradients.

    Attributes:
        call: The call.
        inputs: This device's arrays.
        ranks: The devices that share the sequence.
        view: This rank's work items and positions.
    """

    call: CallSpec
    inputs: Inputs
    ranks: Ranks
    view: RankView

    @classmethod
    def of(cls, call: CallSpec, x: Inputs) -> StepRunner:
        """Make the runner for this device's arrays."""
        ranks = ranks_of(call)
        # Bounds of loops over blocks come from the rank. Under vmap their branches become selects,
        # whose operands have to vary over the same axes.
        rank = match_varying(ranks.rank(), varying_axes(x))
        return cls(call, x, ranks, RankView(call, x, rank))

    def zeros(self, shape: tuple[int, ...], fill: float = 0.0) -> Array:
        """Make a wide accumulator filled with ``fill``, varying over the inputs' mesh axes."""
        return match_varying(jnp.full(shape, fill, self.call.wide), varying_axes(self.inputs))

    def empty_state(self, q: Array, v_dim: int) -> AttentionState:
        """Return attention over no keys for queries ``q``, the identity of :func:`merge`."""
        return AttentionState(self.zeros((*q.shape[:3], v_dim)), self.zeros(q.shape[:3], -jnp.inf))

    def empty_bias_grad(self, bias: Array | None) -> Array | None:
        """Return zeros shaped like the bias, or ``None`` if there is no gradient to compute."""
        return self.zeros(bias.shape) if bias is not None and self.call.bias_grad else None

    def hop[T](self, x: T, hop: int | None) -> T:
        """Send arrays ``hop`` ranks ahead and return those that arrive; ``None`` moves nothing."""
        # All ranks send and receive at once. What is sent may be read meanwhile: arrivals are new
        # arrays, so two sets of K/V are in memory until the step that reads the old one ends.
        return x if hop is None else self.ranks.move(x, hop)

    def work_of(self, launches: Launches) -> list[ItemTable | None]:
        """Return this rank's items in each launch; ``None`` if no rank has any in all of them."""
        numbers = range(len(launches.shifts))
        if launches.table is None:
            return [None for _ in numbers]
        work = self.view.work_of(launches)
        return [
            jax.tree.map(lambda x, n=n: lax.index_in_dim(x, n, keepdims=False), work)
            for n in numbers
        ]

    def attend(
        self,
        launches: Launches,
        work: ItemTable | None,
        q: Array,
        held: KVPayload,
        into: AttentionState,
        *,
        overwrite: bool,
        is_final: bool,
    ) -> AttentionState:
        """Merge attention of this device's queries over the K/V it holds now into ``into``.

        ``overwrite`` and ``is_final`` are those of :class:`LaunchSpec`. Without ``work``, ``into``
        is returned as it is.
        """
        if work is None:
            return into
        rows, columns = self._own_operands(launches, work, q, held)
        spec = LaunchSpec(self.call, overwrite=overwrite, is_final=is_final, items=launches.items)
        return _launch("attend_into", spec, rows, columns, work, into=into)

    def differentiate(
        self, launches: Launches, work: ItemTable | None, q: Array, held: KVPayload,
        upstream: BackwardInputs, grads: QueryGrads, dkv: Array, *, overwrite: bool,
    ) -> tuple[QueryGrads, Array]:  # fmt: skip
        """Add gradients of this device's queries to ``grads``, and of the K/V held to ``dkv``.

        ``overwrite`` is that of :class:`LaunchSpec`.
        """
        if work is None:
            return grads, dkv
        rows, columns = self._own_operands(launches, work, q, held)
        # dbias starts from zeros, for it has the columns of these keys alone; they are added to
        # those of all keys below.
        into = Grads(grads.dq, dkv, self.empty_bias_grad(rows.bias))
        spec = LaunchSpec(self.call, overwrite=overwrite, items=launches.items)
        dq, dkv, dbias = _launch("grads_into", spec, rows, columns, upstream, work, into=into)
        return QueryGrads(dq, self._add_bias_grad(grads.dbias, columns.positions, dbias)), dkv

    def send_to_helper(
        self, stage: Stage | None, q: Array, upstream: BackwardInputs | None = None
    ) -> QueryPayload | None:
        """Send this device's queries to its helper in a stage.

        Returns:
            The queries that this device is to help with, zeros on ranks that help nobody; ``None``
            if no rank helps in the stage.
        """
        if stage is None or not stage.offloads:
            return None
        part = step_table(self.call.program, stage.step)
        # Helpers need dO, lse and delta of these rows, but not their output.
        upstream = None if upstream is None else upstream._replace(out=None)
        bias = self._bias_of_keys(self._helper_key_positions(part))
        queries = QueryPayload(q, self.inputs.q_ids, bias, self.inputs.bias_shift, upstream)
        # In flight to the helpers alone, beside the kernels of the stage before; other ranks
        # receive nothing and get zeros.
        return self.ranks.move(queries, part.shift, part.helpers)

    def attend_for_peer(
        self, launches: Launches, work: ItemTable, peer_queries: QueryPayload, own: KVPayload
    ) -> AttentionState:
        """Compute attention of another rank's queries over this device's own keys."""
        rows, columns = self._peer_operands(launches, work, peer_queries, own)
        # Starts from nothing: the owner merges this with what it has, which is not here.
        empty = self.empty_state(rows.q, own.kv.shape[3] - self.call.head_dim)
        spec = LaunchSpec(self.call, overwrite=True)
        return _launch("attend_into", spec, rows, columns, work, into=empty)

    def differentiate_for_peer(
        self, launches: Launches, work: ItemTable, peer_queries: QueryPayload, own: KVPayload,
        own_dkv: Array,
    ) -> tuple[QueryGrads, Array]:  # fmt: skip
        """Compute gradients of another rank's queries, and add those of this device's own K/V.

        Returns:
            The gradients of the peer's queries and bias, and ``own_dkv`` plus those of the K/V.
        """
        rows, columns = self._peer_operands(launches, work, peer_queries, own)
        # dQ starts from zeros, as it travels home and is added there. dK/dV are of this rank's own
        # keys, so they are added to what is here.
        into = Grads(self.zeros(rows.q.shape), own_dkv, self.empty_bias_grad(rows.bias))
        spec, upstream = LaunchSpec(self.call), peer_queries.upstream
        grads = _launch("grads_into", spec, rows, columns, upstream, work, into=into)
        return QueryGrads(grads.dq, grads.dbias), grads.dkv

    def return_to_owner[R: (AttentionState, QueryGrads)](
        self, stage: Stage, results: R | None
    ) -> Returned[R] | None:
        """Send a helper's results of a stage back to the rank whose queries they belong to.

        Returns:
            What this device's own helper computed; the identity on a rank that nobody helped, and
            ``None`` if there are no results.
        """
        if results is None:
            return None
        part = step_table(self.call.program, stage.step)
        size, shift = self.call.plan.cp_size, part.shift
        owners = [(r - shift) % size for r in part.helpers]
        # Results go back the way that the queries came, beside the next stage's kernels.
        received = self.ranks.move(results, -shift, owners)
        if isinstance(received, QueryGrads):
            has_bias = received.dbias is not None
            return Returned(received, self._helper_key_positions(part) if has_bias else None)
        # Ranks that nobody helped have received zeros, which are no state: lse = -inf makes one
        # that a merge ignores.
        is_helped = jnp.asarray(np.isin(np.arange(size), owners))
        lse = jnp.where(
            lax.dynamic_index_in_dim(is_helped, self.view.rank, keepdims=False),
            received.lse,
            -jnp.inf,
        )
        return Returned(received._replace(lse=lse), None)

    def add_returned(self, grads: QueryGrads, returned: Returned[QueryGrads]) -> QueryGrads:
        """Add the gradients that this device's helper sent back."""
        # On a rank that nobody helped zeros have arrived, which change neither sum.
        dq, dbias = returned.results
        dbias = self._add_bias_grad(grads.dbias, returned.key_positions, dbias)
        return QueryGrads(grads.dq + dq, dbias)

    def _helper_key_positions(self, part: StepTable) -> Array:
        """Return positions of the keys that this device's queries meet on its helper."""
        return self.view.key_positions(self.view.rank_before(-part.shift))

    def _own_operands(
        self, launches: Launches, work: ItemTable, q: Array, held: KVPayload
    ) -> tuple[QueryBlock, KeyBlock]:
        """Return this device's queries, and the held or gathered keys that they meet."""
        view = self.view
        if launches.gathered:
            positions = all_positions(self.call.plan.k_layout).reshape(-1)
        else:
            positions = view.key_positions(work.kv_rank)
        bias = self._bias_of_keys(positions)
        queries = QueryPayload(q, self.inputs.q_ids, bias, self.inputs.bias_shift)
        return view.rows(launches, view.rank, queries), view.columns(launches, positions, held)

    def _peer_operands(
        self, launches: Launches, work: ItemTable, peer_queries: QueryPayload, own: KVPayload
    ) -> tuple[QueryBlock, KeyBlock]:
        """Return another rank's queries and this device's own keys."""
        view = self.view
        columns = view.columns(launches, view.key_positions(view.rank), own)
        return view.rows(launches, work.q_rank, peer_queries), columns

    def _bias_of_keys(self, positions: Array) -> Array | None:
        """Return the columns of the bias for keys at some positions."""
        bias = self.inputs.bias
        return bias if bias is None or self._has_all_keys else jnp.take(bias, positions, axis=3)

    def _add_bias_grad(
        self, dbias: Array | None, positions: Array | None, part: Array | None
    ) -> Array | None:
        """Add the gradient of some columns of the bias, those of keys at ``positions``."""
        if dbias is None or part is None:
            return dbias
        # Columns of the bias lie in natural order, keys of a rank in layout order.
        return dbias + part if self._has_all_keys else dbias.at[..., positions].add(part)

    @property
    def _has_all_keys(self) -> bool:
        """Return True if this device has all keys, in the order of the bias's columns."""
        plan = self.call.plan
        return plan.cp_size == 1 and bool((np.diff(plan.k_positions(0)) == 1).all())


def _launch[State: (AttentionState, Grads)](
    method: str, spec: LaunchSpec, rows: QueryBlock, *args: Any, into: State
) -> State:
    """Call a method of the kernel for the platform that is compiled for; no queries, no launch."""
    if rows.q.size == 0:
        return into
    # Kernels without a backward are left out of it: another one of the call's takes their platform.
    excluded = () if method == "attend_into" else spec.call.forward_only
    kernels = [kernel for kernel in spec.call.kernels if kernel not in excluded]
    # One kernel needs no branch: where it is named it refuses other platforms by itself.
    if len(kernels) == 1:
        return cast("State", getattr(kernels[0], method)(spec, rows, *args, into))

    def branch(kernel: Kernel, *operands: Any) -> Any:
        """Call a kernel; one that fails raises where the program is lowered for its platform."""
        result = or_broken(kernel, lambda: getattr(kernel, method)(spec, *operands))
        return result.attend_into(*operands) if isinstance(result, AbsentKernel) else result

    launches = {
        device: partial(branch, kernel) if device == "default"
        else partial(lowered_for, device, partial(branch, kernel))
        for kernel in kernels
        for device in kernel.capabilities.devices or ("default",)
    }  # fmt: skip
    return cast("State", lax.platform_dependent(rows, *args, into, **launches))
