"""Strategy ``gather``: a rank fetches all K/V that its queries see into one buffer.

Every query row meets all its keys in a single launch, so nothing is merged and results are rounded
as on one device. K/V are fetched in the order in which the launches need them. Where most rows see
keys of their own rank only, these rows are launched over the rank's own K/V, without copying them:
first in the forward, while fetches are in flight, and last in the backward.

Heads may be cut into groups, so that transfers hide behind kernels: while kernels run for one
group, K/V of the next arrive and dK/dV of the one before travel home. Only the first group's fetch
and the last group's return have no other group's kernels beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from ring_core import GatherProgram, gather_program, gather_refusals
from ring_core.choose.gathering import memory_refusals
from ring_core.programs.gather import Fetch
from ring_torch.buffers import ONE_GROUP, KeyGradBuffer
from ring_torch.call import Call, Resolution, Saved, Strategy, StrategySpec
from ring_torch.capture import is_capturing
from ring_torch.launches.cache import keep, tensors_key
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    Grads,
    Inputs,
    KeyGrads,
    QueryGrads,
    folded,
    head_group,
    unseen_state,
    zero_bias_grad,
)
from ring_torch.strategies.gather_launches import (
    attend_group,
    attend_parts,
    differentiate,
    differentiate_in_place,
    items_in_place,
    keys_by_group,
    launch_parts,
)
from ring_torch.strategies.head_groups import head_groups_of
from ring_torch.strategies.prepared import (
    PreparedBackward,
    PreparedLaunches,
    prepare_backward,
    prepare_forward,
)
from ring_torch.strategies.two_stage import GatheringStrategy, TwoStageGather
from ring_torch.transports.api import GatherSession, IndexMap, PendingGrads, add_staged, as_in_shard


@dataclass(frozen=True)
class Gather(GatheringStrategy):
    """Strategy ``gather`` for kernels that can mask any band, so that one launch sees all keys."""

    head_major: bool = False  # True if backwards are split: sums of dK/dV are in the kernel's order
    adds_sinks: bool = False  # True if launches add the sinks, which else are added at the end
    launches: PreparedLaunches = field(default_factory=PreparedLaunches, compare=False)

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """Return ``(out, lse)``, ``out`` in the inputs' dtype or wider, and what it saves.

        That is K/V of each group, or nothing if ``saves`` is false: if there is no backward, or if
        K/V are so large that the backward fetches them again.
        """
        groups = self.groups.forward
        takes_sinks = self.adds_sinks and inputs.sinks is not None
        session = call.open_session(
            call.forward_signature, self.gather, groups=groups,
            by_parts=self.prepares and not takes_sinks,
        )  # fmt: skip
        gather, keys = self.gather, session.spec.keys
        fully_written = gather.num_rows == inputs.q.shape[1]
        state = unseen_state(inputs.q, inputs.v.shape[3], fully_written=fully_written)
        sinks = None
        if takes_sinks and inputs.sinks is not None:
            # Launches see all keys of a row, so the sinks join its softmax there, once.
            sinks = folded(inputs.sinks, torch.float32)
        key = tensors_key(inputs.q, sinks) if self.prepares else None
        if (launches := self.launches.forward.get(key)) is not None:
            saved: Saved = []
            # A single group. The session may have work to do behind its launches, so the loop runs
            # until the session ends.
            for arriving in session.fetch(gather, inputs):
                if arriving.parts:  # of which no launches are kept
                    columns = call.gathered_columns(gather, keys, arriving.tensors)
                    attend_parts(call, call.rows(inputs), columns, gather, arriving, state)
                else:
                    kv = partial(keys.columns, arriving.tensors)
                    launches.run(inputs.q, kv, state, sinks, arriving.wait)
                arriving.wait(None)
                saved = [*arriving.tensors]
            if call.params.needs_lse:
                lse = state.lse if fully_written else state.lse.narrow(2, 0, gather.num_rows)
                call.kernel.mark_nonfinite(lse)
            return state, saved if self.saves else []
        if sinks is not None:
            call = call._replace(params=replace(call.params, sinks=sinks))
        rows = call.rows(inputs)
        results: list[AttentionState] = []
        gathered: list[Tensor] = []
        # The session keeps one group ahead: the fetches of group n + 1 are started before the
        # launches of group n. Each group arrives in tensors of its own.
        for n, arriving in enumerate(session.fetch(gather, inputs)):
            gathered += arriving.tensors
            columns = call.gathered_columns(gather, keys, arriving.tensors)
            in_place = items_in_place(call, gather, inputs, n, groups)
            group_rows, group_state = head_group(rows, n, groups), head_group(state, n, groups)
            # Each launch waits for the fetches that it needs; later ones go on beside it.
            results.append(
                attend_parts(call, group_rows, columns, gather, arriving, group_state)
                if arriving.parts
                else attend_group(
                    call, group_rows, columns, in_place, gather, arriving, group_state
                )
            )
            # All of the group has arrived, and this rank's own K/V have been read: the caller may
            # change them after this call.
            arriving.wait(None)
        # A call that is captured into a CUDA graph may have run other launches than usual.
        can_prepare = self.prepares and results[0] is state
        if can_prepare and key not in self.launches.forward and not is_capturing():
            items = list(zip(gather.items, gather.waits_for, strict=True))
            launches = prepare_forward(call.kernel, rows, columns, state, items, call.params)
            keep(self.launches.forward, key, launches)
        if len(results) == 1:
            state = results[0]
        # Each group has widened its own copy: put the heads together again.
        elif results[0].out.dtype != state.out.dtype:
            outs, lses = zip(*results, strict=True)
            state = AttentionState(torch.cat(outs, dim=2), torch.cat(lses, dim=1))
        return state, gathered if self.saves else []

    def backward(self, call: Call, inputs: Inputs, upstream: BackwardInputs, saved: Saved) -> Grads:
        """Return the gradients; dK and dV in the inputs' dtype.

        For each group of heads the launches of the forward run in reverse. A group's dK/dV travel
        home beside the next group's launches. Of the last group, with ``groups.before_last_item``,
        those that its last launch does not touch travel beside that launch. The others, or all,
        have at most launches over own K/V in place beside them: these come after the others of
        their group, and have sums of their own.
        """
        groups = self.groups.backward
        session = call.open_session(call.backward_signature, self.gather, groups=groups)
        gather, keys = self.gather, session.spec.keys
        sums = KeyGradBuffer(keys, self.head_major)
        # Hooks on saved tensors may return them anywhere in memory.
        tensors = inputs.q, upstream.dout, upstream.out, upstream.lse, *saved
        key = sums.head_major, tensors_key(*tensors)
        del tensors
        if (prepared := self.launches.backward.get(key)) is not None:
            return self._repeat(call, inputs, upstream, saved, session, sums, prepared)
        rows = call.rows(inputs)
        items = range(len(gather.items) if rows.q.shape[0] > 0 else 0)
        # Split backwards only add, so they need zeros; else the first launch of some columns
        # overwrites them. Peers will read these sums: where they lie in memory of the session, it
        # waits until nobody reads those of the pass before.
        grad_sums = session.accumulators(gather, sums, zero=sums.head_major or len(items) == 0)
        dbias = zero_bias_grad(rows, call.params, call.acc_dtype)
        row_grads = QueryGrads(_dq(call, gather, rows.q), dbias)
        in_flight: list[list[PendingGrads]] = [[] for _ in range(groups)]
        own_sums: list[Tensor | None] = []
        key_grads: KeyGrads | None = None

        def finish(n: int) -> KeyGrads:
            """Add what peers send of group ``n``, round it, and return dK/dV of all groups."""
            nonlocal key_grads
            # Allocated here, so that where most memory is taken, in the launches, they are not yet.
            if key_grads is None:
                new = partial(torch.empty, dtype=call.dtype, device=call.device)
                key_grads = KeyGrads(new(inputs.k.shape), new(inputs.v.shape))
            group_grads = head_group(key_grads, n, groups)
            _finish_own_grads(
                call, gather, sums, (grad_sums[n], own_sums[n]), in_flight[n], group_grads
            )
            own_sums[n] = None  # their memory serves the groups after this one
            return key_grads

        # One group of dK/dV is in flight while the next is computed: a transfer is waited for only
        # when that group's kernels are in line ahead of the wait. Peers read a group's sums until
        # their transfer ends, so nothing writes `grad_sums[n]` any more but own columns (`finish`).
        keys_of_groups = keys_by_group(call, gather, inputs, session, saved, self.groups)
        for n in range(groups):
            columns = next(keys_of_groups)
            group_tensors = (
                head_group(rows, n, groups), head_group(upstream, n, groups),
                head_group(row_grads, n, groups),
            )  # fmt: skip
            for part_items, before_last_item, overlapped in launch_parts(
                items, self.groups, last=n + 1 == groups
            ):
                work = [
                    (columns, gather.items[m], gather.overwritten[m]) for m in reversed(part_items)
                ]
                differentiate(call, work, *group_tensors, sums, grad_sums[n], gather.length)
                # These sums are final on this rank: let the owners of their keys take them, and
                # start taking the peers' sums for this rank's keys.
                in_flight[n].append(session.return_grads(
                    gather, sums, grad_sums[n], n, before_last_item=before_last_item,
                    overlapped=overlapped,
                ))  # fmt: skip
            # Only now add the gradients that came for the group before.
            if n > 0:
                finish(n - 1)
            in_place = items_in_place(call, gather, inputs, n, groups)
            if in_place:
                del work, columns  # their memory serves the launches that follow
            # Beside the transfer: rows that see own keys only, whose gradients do not travel.
            own_sums.append(differentiate_in_place(call, in_place, *group_tensors, sums))
        next(keys_of_groups, None)  # a session may have work behind its last group
        # No launch is left that could hide the last group's transfer: wait for it.
        dk, dv = finish(groups - 1)
        can_prepare = self.prepares and not self.groups.before_last_item and upstream.delta is None
        if can_prepare and items and key not in self.launches.backward and not is_capturing():
            prepared = prepare_backward(
                call.kernel, rows, columns, upstream, row_grads.dq, sums, gather, call.ranks.rank,
                int(call.plan.k_layout.num_tokens(call.ranks.rank)), call.params,
            )  # fmt: skip
            keep(self.launches.backward, key, prepared)
        return Grads(row_grads.dq, dk, dv, row_grads.dbias)

    def _repeat(
        self, call: Call, inputs: Inputs, upstream: BackwardInputs, saved: Saved,
        session: GatherSession, sums: KeyGradBuffer, prepared: PreparedBackward,
    ) -> Grads:  # fmt: skip
        """Run a backward by prepared launches: one group of heads, all work over the buffer."""
        gather, keys, (q, k, v) = self.gather, session.spec.keys, inputs[:3]
        (grad_sums,) = session.accumulators(gather, sums, zero=sums.head_major)
        gathered, (dout, out, lse, _) = self.gathered(session, inputs, saved), upstream
        dq, row_stats = prepared.launch(
            q, partial(keys.columns, gathered), dout, out, lse, grad_sums,
            partial(_dq, call, gather, q), gathered.clear,
        )  # fmt: skip
        # The sums are final on this rank: the owners of their keys take them, and this rank takes
        # the peers' sums for its own keys. Peers read other columns than those that these go to.
        pending = session.return_grads(gather, sums, grad_sums, 0, overlapped=False)
        pending(grad_sums, gather.length, _own_columns(gather, call.ranks.rank))
        # Contiguous, whatever the strides of k and v: launches that round go by tokens.
        new = torch.zeros_like if prepared.has_padding else torch.empty_like
        dk, dv = (new(x, memory_format=torch.contiguous_format) for x in (k, v))
        prepared.round(grad_sums, dk, dv)
        return Grads(dq, dk, dv, None, row_stats)


def _finish_own_grads(
    call: Call, gather: GatherProgram, sums: KeyGradBuffer, computed: tuple[Tensor, Tensor | None],
    in_flight: Sequence[PendingGrads], key_grads: KeyGrads,
) -> None:  # fmt: skip
    """Add the peers' dK/dV of own keys to this rank's, and round the sums into ``key_grads``.

    ``computed`` are the flat sums over the gathered buffer, and those over own K/V in place, if
    any. All is added up in the latter if they exist. Otherwise own sums stay in the buffer if it
    holds all own keys, and are copied into a buffer of their own if not.
    """
    # Two places may hold dK/dV of own keys: columns of the gathered buffer, and the sums of
    # launches in place.
    keys, length = sums.keys, gather.length
    own_fetches = [fetch for fetch in gather.fetches if fetch.rank == call.ranks.rank]
    grads, own_sums = computed
    own_columns = _own_columns(gather, call.ranks.rank)
    if (
        own_sums is None
        and sum(fetch.source.stop - fetch.source.start for fetch in own_fetches) < keys.length
    ):
        own_sums = torch.zeros(sums.numel(keys.length), dtype=call.acc_dtype, device=call.device)
    # Own columns of the gathered buffer are this rank's alone: peers read other columns of it.
    if own_sums is not None:
        for fetch in own_fetches:
            destinations = sums.strided_views(own_sums, keys.length, fetch.source)
            add_staged(destinations, [sums.strided_views(grads, length, fetch.target)])
        all_keys = slice(0, keys.length)
        grads, own_fetches, length = own_sums, [Fetch(-1, all_keys, all_keys)], keys.length
        own_columns = as_in_shard
    # Wait for the peers' sums and add them, in the order in which they were sent. `grads` may be
    # the memory that peers still read, but they read their own keys' columns of it.
    for pending in in_flight:
        pending(grads, length, own_columns)
    # The sums are complete: round each once.
    for fetch in own_fetches:
        fetched_sums = sums.span_views(grads, length, fetch.target)
        dst = key_grads.take(fetch.source)
        if sums.head_major and call.kernel.split_backward is not None:
            call.kernel.split_backward.round(fetched_sums, dst, call.params)
        else:
            for grad, x in zip(dst, fetched_sums, strict=True):
                grad.copy_(x)


@lru_cache(maxsize=256)
def _own_columns(gather: GatherProgram, rank: int) -> IndexMap:
    """Return the index map of a rank's own keys, the same object for each call of a program."""
    return partial(_fetched_columns, [fetch for fetch in gather.fetches if fetch.rank == rank])


def _fetched_columns(fetches: Sequence[Fetch], source: slice) -> slice:
    """Return the columns at which ``fetches`` put a span of local keys."""
    # Own keys lie in the buffer in the spans in which they were fetched: find the one with this
    # key.
    fetch = next(x for x in fetches if x.source.start <= source.start < x.source.stop)
    shift = fetch.target.start - fetch.source.start
    return slice(source.start + shift, source.stop + shift)


def _dq(call: Call, gather: GatherProgram, q: Tensor) -> Tensor:
    """Allocate dQ; it is zeroed only if some rows are in no launch, as the others are overwritten.

    Every row is in one launch, so dQ is in the inputs' dtype if the kernel rounds it itself.
    """
    dtype = call.acc_dtype if call.kernel.needs_delta else None
    dq = torch.empty_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    return dq if gather.num_rows == q.shape[1] else dq.zero_()


def _resolve(resolution: Resolution) -> Strategy:
    """Return the gathering strategy for a rank: by one launch a row, or in two stages.

    Kernels that can mask only some bands take two stages. Heads are not cut into groups with
    options that belong to single heads or keys: bias, slopes, dropout, predicates, segment ids.
    """
    program = resolution.program
    if resolution.kernel.capabilities.bands != "any":
        return TwoStageGather.of(resolution)
    groups = ONE_GROUP
    if resolution.is_plain:
        groups = head_groups_of(program, resolution.sizes, resolution.itemsize)
    splits = not resolution.is_short
    tile = None if not resolution.is_plain else _split_backward_tile(resolution, splits)
    gather = gather_program(program.plan, resolution.ranks.rank, splits=splits, tile=tile or 1)
    items = (*gather.items, *gather.in_place)
    banded = resolution.is_plain and all(item.cu_q is None and item.tiles is None for item in items)
    fully_written = gather.num_rows == resolution.sizes.q_len and resolution.sizes.batch > 0
    return Gather(
        gather, groups, saves=resolution.saves_keys(gather), head_major=tile is not None,
        # Each row is in one launch, so a kernel that can add the sinks to it does.
        adds_sinks=resolution.kernel.adds_sinks and banded and fully_written and groups.forward == 1,
        prepares=resolution.kernel.prepares and banded and groups.backward == 1 and not gather.in_place,
    )  # fmt: skip


def _split_backward_tile(resolution: Resolution, splits: bool) -> int | None:
    """Return the ``tile`` of gather programs with which the kernel's split backward can run.

    It is ``None`` if it cannot, or if there is no backward. All ranks get the same answer. Another
    kernel, to which a gradient of ``lse`` may lead, reads the same gathered K/V, so programs of
    calls that return ``lse`` are as for any kernel.
    """
    split_backward, request = resolution.kernel.split_backward, resolution.request
    if split_backward is None or not request.grad:
        return None
    tile = 1 if resolution.returns_lse else split_backward.tile
    applies = split_backward.applies(resolution.program.plan, request, splits=splits, tile=tile)
    return tile if applies else None


GATHER = StrategySpec(
    "gather", _resolve, lambda plan, _: gather_refusals(plan), opens_sessions=True,
    is_automatic=lambda transport: not transport.sends_messages,  # messages hide better in a ring
    automatic_refusals=lambda plan, request: memory_refusals(
        plan, request, itemsize=getattr(torch, request.dtype).itemsize
    ),
)  # fmt: skip
