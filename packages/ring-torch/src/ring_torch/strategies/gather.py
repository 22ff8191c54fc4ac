"""Strategy ``gather``: a rank fetches all K/V that its queries see into one buffer.

A kernel that can mask any band meets all keys of a query row in a single launch, so nothing is
merged and results are rounded as on one device. K/V are fetched in the order in which the launches
need them. Where most rows see keys of their own rank only, these rows are launched over the rank's
own K/V, without copying them.

A kernel that can mask only some bands takes two stages: the rank's own K/V are not in the buffer.
It attends to them while those of other ranks arrive, then to these in full rectangles, and the
results of a row are merged.

Launches over own K/V come first in the forward, while fetches are in flight, and last in the
backward, while dK/dV travel home.

Heads may be cut into groups, so that transfers hide behind kernels: while kernels run for one
group, K/V of the next arrive and dK/dV of the one before travel home. Only the first group's fetch
and the last group's return have no other group's kernels beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ring_core import (
    RingProgram,
    WorkItem,
    gather_program,
    gather_refusals,
    longest_gather,
)
from ring_core.choose.gathering import MAX_SAVED_BYTES, memory_refusals
from ring_core.programs.gather import Fetch, moved_keys
from ring_core.programs.grid import RankGrid
from ring_core.viz.text import figure
from ring_torch.accumulate import (
    Accumulator,
    Columns,
    Joins,
    Rows,
    Segments,
    Work,
    joins_of,
    segments_of,
)
from ring_torch.buffers import ONE_GROUP, HeadGroups, KeyGradBuffer, KVPayload, Shapes
from ring_torch.call import (
    Call,
    GatherSession,
    IndexMap,
    PendingGrads,
    Saved,
    SessionSpec,
    Strategy,
    StrategySpec,
    Traffic,
)
from ring_torch.kernels.api import OwnSpans, SplitBackward
from ring_torch.records import (
    AttentionState,
    Backward,
    BackwardInputs,
    Grads,
    Inputs,
    KeyBlock,
    KeyGrads,
    QueryBlock,
    head_group,
)
from ring_torch.transports.api import add_staged, as_in_shard

#: Least FLOPs of a forward for each group of heads: about 1.5 ms on an H200. With shorter groups
#: the host cannot launch ahead of the GPU.
GROUP_FLOPS = 1e12
MOST_GROUPS = 4

#: Bytes fetched per FLOP of a forward above which heads are cut into groups. It is the ratio of
#: four ranks with as many K/V heads as query heads at 128k tokens. Below, fetches hide behind the
#: launches of a single group, and more launches do not pay.
MIN_BYTES_PER_FLOP = 1e-4

#: Most bytes of own dK/dV in float32 that a group of heads may take in a backward where some rows
#: see own keys only. Above, heads are cut into more groups; sums of dQ shrink with them.
MOST_SUM_BYTES = 1 << 28

#: FLOPs of a forward above which dK/dV travel home in two parts, the first beside a launch.
EARLY_RETURN_FLOPS = 3e11

#: Rounds flat sums of own keys into dK and dV.
Rounding = Callable[[Tensor, Tensor, Tensor], object]

Wait = Callable[[int], object]


class Part(NamedTuple):
    """Backward launches over gathered keys, after which gradients are sent home.

    Attributes:
        launch: The launches.
        before_last_item: Which gradients are sent after them, see
            :meth:`ring_torch.call.GatherSession.return_grads`.
        overlapped: True if more launches follow that can hide the transfer.
    """

    launch: Backward
    before_last_item: bool | None
    overlapped: bool


@dataclass(frozen=True, kw_only=True)
class Gather(Strategy):
    """Strategy ``gather``: the launches of both passes over gathered and over own keys.

    The forward saves the gathered K/V if they are few on every rank; otherwise the backward fetches
    them again.

    Attributes:
        forward_spec: What the forward exchanges.
        backward_spec: What the backward exchanges, in groups of heads cut once more. Where
            backwards are split, sums of dK/dV are in the kernel's order.
        saves: True if the forward saves the gathered K/V.
        adds_sinks: True if launches add the sinks, which else are added at the end.
        own_work: The forward's launches over own K/V where they lie.
        work: Those over gathered keys.
        by_size: Those one by one, the longest first, for heads that arrive in parts.
        joins: How their results come together.
        parts: The backward's launches over gathered keys, for all groups of heads but the last.
        last_parts: Those for the last group.
        own_launch: The backward's launches over own keys.
        rows: How launches leave dQ of their rows.
        whole_rows: True if each row is in a launch.
        zero: True if sums over gathered keys begin with zeros.
        segments: What launches overwrite, as no launch before has written it.
        overwrites_own: True if that is all sums over own keys.
        own_fetches: Fetches of own keys into the buffer.
        own_columns: Maps own keys to their columns of the buffer.
        rounding: Rounds sums of own keys in the buffer; ``None`` if not all of these are there.
        own_rounding: Rounds sums of own keys that lie as in the shard.
        new_grads: Allocates dK and dV of own keys, with zeros if there is padding behind these.
    """

    name: str = "gather"
    depends_on_kernel = True
    forward_spec: SessionSpec
    backward_spec: SessionSpec
    saves: bool
    adds_sinks: bool
    own_work: Work
    work: Work
    by_size: tuple[Work, ...]
    joins: Joins
    parts: tuple[Part, ...]
    last_parts: tuple[Part, ...]
    own_launch: Backward
    rows: Literal["write", "add", "wait"]
    whole_rows: bool
    zero: bool
    segments: Segments
    overwrites_own: bool
    own_fetches: tuple[Fetch, ...]
    own_columns: IndexMap
    rounding: Rounding | None
    own_rounding: Rounding
    new_grads: Callable[..., Tensor]

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """Return ``(out, lse)``, ``out`` in the inputs' dtype or wider, and what it saves.

        That is K/V of each group, or nothing if ``saves`` is false: if there is no backward, or if
        K/V are so large that the backward fetches them again.
        """
        spec, groups = self.forward_spec, self.forward_spec.groups
        session = call.open_session(spec, call.forward_signature)
        rows = call.rows(inputs, adds_sinks=self.adds_sinks)
        results = Accumulator(self.joins, inputs.q, inputs.v.shape[3])
        gathered: Saved = []

        def attend(
            work: Work, columns: KeyBlock, n: int, count: int, wait: Wait | None = None
        ) -> None:
            """Run launches for the ``n``-th of ``count`` groups, or parts, of heads."""
            heads, state = rows, None
            if count > 1:
                heads, state = head_group(rows, n, count), head_group(results.state, n, count)
            results.attend(work, heads, columns, state=state, wait=wait)

        def attend_to_own_keys(n: int = 0) -> None:
            """Queue launches over own K/V, which run while fetches are in flight."""
            if self.own_work.launches:
                own = (inputs if groups == 1 else head_group(inputs, n, groups)).key_tensors()
                attend(self.own_work, call.columns(call.ranks.rank, own), n, groups)

        # Fetches from all peers are in flight from here on. The session keeps one group ahead: the
        # fetches of group n + 1 are started before the launches of group n, each into tensors of
        # its own. What the session does after it comes behind these launches.
        for n, arriving in enumerate(session.fetch(inputs, attend_to_own_keys)):
            if n > 0:
                attend_to_own_keys(n)
            columns = call.columns(
                call.ranks.rank,
                spec.keys.columns(arriving.tensors, spec.gather.length),
                spec.gather,
            )
            count = len(arriving.parts)
            if count == 0:
                attend(self.work, columns, n, groups, arriving.wait)
            # All keys of a part are there. Its longest launch goes first, and the others, and those
            # of the next part, fill the multiprocessors that it leaves.
            for m, contexts in enumerate(arriving.parts):
                of_part = head_group(columns, m, count)
                for work, context in zip(self.by_size, contexts, strict=True):
                    with context():
                        attend(work, of_part, m, count)
            # All of the group has arrived, and this rank's own K/V have been read: the caller may
            # change them after this call.
            if arriving.wait is not None:
                arriving.wait(None)
            gathered += arriving.tensors
        return results.finish(), gathered if self.saves else []

    def backward(self, call: Call, inputs: Inputs, upstream: BackwardInputs, saved: Saved) -> Grads:
        """Return the gradients; dK and dV in the inputs' dtype.

        For each group of heads the launches of the forward run in reverse. A group's dK/dV travel
        home beside the next group's launches. Of the last group, with two ``last_parts``, those
        that its last launch does not touch travel beside that launch. The others, or all,
        have at most launches over own K/V in place beside them: these come after the others of
        their group, and have sums of their own.
        """
        gather, _, groups, layout, _ = self.backward_spec
        session = call.open_session(self.backward_spec, call.backward_signature)
        rows, is_empty = call.rows(inputs), call.keys.batch == 0
        # Peers will read these sums: where they lie in memory of the session, it waits until nobody
        # reads those of the pass before.
        grad_sums = session.accumulators(zero=self.zero or is_empty)
        row_sums = call.row_sums(rows, self.rows, fully_written=self.whole_rows)
        in_flight: list[list[PendingGrads]] = [[] for _ in range(groups)]
        own_sums: list[Tensor | None] = []
        key_grads: list[Tensor] = []
        # Those of a launch are of all rows and heads if it is the only one.
        has_stats, row_stats = (
            groups == len(self.last_parts) == 1 and not self.own_work.launches,
            None,
        )

        # One group of dK/dV is in flight while the next is computed: a transfer is waited for only
        # when that group's kernels are in line ahead of the wait. Peers read a group's sums until
        # their transfer ends, so nothing writes `grad_sums[n]` any more but own columns (`finish`).
        keys_of_groups = self._keys_by_group(call, inputs, session, saved)
        for n in range(groups):
            held = [next(keys_of_groups)]
            operands, group_rows = (rows, upstream), row_sums
            if groups > 1:
                operands = head_group(rows, n, groups), head_group(upstream, n, groups)
                group_rows = row_sums.of_group(n, groups)
            sums = Columns(layout, grad_sums[n], gather.length, self.segments)
            parts = self.parts if n + 1 < groups else self.last_parts
            for part in parts:
                # The last launches empty what they get, so that others take the memory of K/V.
                columns = held if part is parts[-1] else [*held]
                if not is_empty:
                    row_stats = part.launch.run(operands[0], columns, operands[1], group_rows, sums)
                # These sums are final on this rank: let the owners of their keys take them, and
                # start taking the peers' sums for this rank's keys.
                in_flight[n].append(
                    session.return_grads(
                        grad_sums[n],
                        n,
                        before_last_item=part.before_last_item,
                        overlapped=part.overlapped,
                    )
                )
            del held, columns
            row_stats = row_stats if has_stats else None
            # Only now add the gradients that came for the group before.
            if n > 0:
                self._finish(call, inputs, grad_sums, own_sums, in_flight, key_grads, n - 1)
            # Beside the transfer: launches over own keys, whose gradients do not travel.
            own_sums.append(None)
            if self.own_work.launches:
                group = inputs if groups == 1 else head_group(inputs, n, groups)
                own_sums[n] = self._own_sums(call, group, *operands, group_rows)
        next(keys_of_groups, None)  # a session may have work behind its last group
        # No launch is left that could hide the last group's transfer: wait for it.
        self._finish(call, inputs, grad_sums, own_sums, in_flight, key_grads, groups - 1)
        dk, dv = key_grads
        return Grads(row_sums.whole(), dk, dv, row_sums.dbias, row_stats)

    def _own_sums(
        self, call: Call, group: Inputs, rows: QueryBlock, upstream: BackwardInputs, row_sums: Rows
    ) -> Tensor:
        """Run a group's launches over own keys; return flat sums of dK/dV."""
        layout, is_empty = self.backward_spec.sums, rows.q.shape[0] == 0
        length = layout.keys.length
        new = torch.empty if self.overwrites_own and not is_empty else torch.zeros
        own = new(layout.numel(length), dtype=call.acc_dtype, device=call.device)
        if not is_empty:
            columns = call.columns(call.ranks.rank, group.key_tensors())
            sums = Columns(layout, own, length, self.segments)
            self.own_launch.run(rows, [columns], upstream, row_sums, sums)
        return own

    def _finish(
        self,
        call: Call,
        inputs: Inputs,
        grad_sums: Sequence[Tensor],
        own_sums: list[Tensor | None],
        in_flight: Sequence[Sequence[PendingGrads]],
        key_grads: list[Tensor],
        n: int,
    ) -> None:
        """Add the peers' dK/dV of group ``n`` of own keys to this rank's, and round the sums.

        ``grad_sums`` and ``own_sums`` are the flat sums of each group over gathered keys, and over
        own keys in place. ``key_grads`` are dK and dV of all groups; the first call makes them, so
        that where most memory is taken, in the launches, they are not there yet.
        """
        if not key_grads:
            key_grads += [self.new_grads(x) for x in (inputs.k, inputs.v)]
        gather, keys, groups, layout, _ = self.backward_spec
        sums, own, length = grad_sums[n], own_sums[n], gather.length
        rounding, index_map = self.rounding, self.own_columns
        # Two places may hold dK/dV of own keys: columns of the gathered buffer, which are this
        # rank's alone, as peers read others; and the sums of launches in place. They are added up
        # in the latter if there are any, or if the buffer has not all own keys.
        if own is None and rounding is None:
            own = torch.zeros(layout.numel(keys.length), dtype=call.acc_dtype, device=call.device)
        if own is not None:
            for fetch in self.own_fetches:
                part = layout.strided_views(sums, length, fetch.target)
                add_staged(layout.strided_views(own, keys.length, fetch.source), [part])
            sums, length, rounding, index_map = own, keys.length, self.own_rounding, as_in_shard
        # Wait for the peers' sums and add them, in the order in which they were sent.
        for pending in in_flight[n]:
            pending(sums, length, index_map)
        # The sums are complete: round each once.
        assert rounding is not None
        if groups > 1:
            key_grads = [*head_group(KeyGrads(*key_grads), n, groups)]
        rounding(sums, *key_grads)
        own_sums[n] = None  # their memory serves the groups after this one

    def _keys_by_group(
        self, call: Call, inputs: Inputs, session: GatherSession, saved: Saved
    ) -> Iterator[KeyBlock]:
        """Yield the gathered K/V of each of the backward's groups of heads, saved or fetched again.

        Those that are fetched are waited for before they are yielded. What was saved is taken out
        of ``saved``. A group that was yielded is held by the caller alone.
        """
        (gather, keys, groups, *_), rank = self.backward_spec, call.ranks.rank
        if not saved:
            # Nothing to compute meanwhile: launches over own keys are kept to hide the way home.
            for arriving in session.fetch(inputs):
                if arriving.wait is not None:
                    arriving.wait(None)
                parts = [call.columns(rank, keys.columns(arriving.tensors, gather.length), gather)]
                arriving.tensors.clear()  # sessions hold this list to their end
                yield parts.pop()
            return
        # Saved tensors have the heads of a group of the forward; views cut them for the backward's.
        keys, forward_groups = self.forward_spec.keys, self.forward_spec.groups
        per_group, cuts = len(saved) // forward_groups, groups // forward_groups
        for _ in range(forward_groups):
            columns = call.columns(rank, keys.columns(saved[:per_group], gather.length), gather)
            del saved[:per_group]
            parts = [columns]
            if cuts > 1:
                parts = [head_group(columns, n, cuts) for n in reversed(range(cuts))]
            del columns
            while parts:
                yield parts.pop()

    def saved_shapes(self, _call: Call, _inputs: Inputs, *, plan_known: bool) -> Shapes:
        """Return the shapes of the gathered K/V, group by group; none if the plan is not known.

        Another plan may gather more keys, and then a compiled backward fetches them again.
        """
        if not plan_known or not self.saves:
            return []
        gather, keys, groups, *_ = self.forward_spec
        return keys.gathered_shapes(gather.length, groups)

    def traffic(self, call: Call, _inputs: Inputs, *, forward: bool, saved: bool) -> Traffic:
        """Count the bytes of fetched K/V, unless the forward saved them, and of returned dK/dV."""
        keys, rank = call.keys, call.ranks.rank
        moved = moved_keys(call.plan, like=self.forward_spec.gather)
        out, into = int(moved[rank].sum()), int(moved[:, rank].sum())
        sent, received = map(keys.size, (out, into)) if forward or not saved else (0, 0)
        token = 0 if forward else keys.batch * keys.width * call.acc_dtype.itemsize
        return Traffic(sent + into * token, received + out * token)

    def figures(self, call: Call, inputs: Inputs) -> list[str]:
        """Return how even the work is, what this rank fetches, and how many launches follow."""
        gather, _, groups, *_ = self.forward_spec
        fetches = [x for x in gather.fetches if x.rank != call.ranks.rank]
        keys = sum(x.target.stop - x.target.start for x in fetches)
        peers = f"{len({x.rank for x in fetches})} of {call.ranks.size - 1} other ranks"
        fetched = (
            f"{len(fetches)} by this rank: {keys:,} keys from {peers}"
            if fetches
            else "none, as no query of this rank sees keys of another"
        )
        launches = f"{len(gather.items)} over gathered keys, {len(self.own_work.launches)} over own in place"
        of_groups = f", for each of {groups} groups of heads" if groups > 1 else ""
        return [
            *super().figures(call, inputs),
            figure("fetches", f"{fetched}{of_groups}"),
            figure("launches", f"{launches}, in the forward{of_groups}"),
        ]


def _fetched_columns(fetches: Sequence[Fetch], source: slice) -> slice:
    """Return the columns at which ``fetches`` put a span of local keys."""
    # Own keys lie in the buffer in the spans in which they were fetched: find the one with this
    # key.
    fetch = next(x for x in fetches if x.source.start <= source.start < x.source.stop)
    shift = fetch.target.start - fetch.source.start
    return slice(source.start + shift, source.stop + shift)


def _round_spans(
    layout: KeyGradBuffer, spans: Sequence[OwnSpans], sums: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Round the sums of own keys by token, spans of one length at once, in torch's operations."""
    # The peers' sums have been added by now, and nobody else has these columns.
    for some in spans:
        for x, grad in zip(layout.views(sums, some.length), (dk, dv), strict=True):
            if some.keys == some.length == grad.shape[1]:  # all keys, in order
                grad.copy_(x)
                continue
            _spans_of(grad, some.source, some.source_step, some).copy_(
                _spans_of(x, some.target, some.target_step, some)
            )


def _spans_of(x: Tensor, start: int, step: int, spans: OwnSpans) -> Tensor:
    """Return a view ``[B, spans, keys, K, D]`` of spans of ``x [B, n, K, D]``."""
    batch, token, head, number = x.stride()
    return x.as_strided(
        (x.shape[0], spans.number, spans.keys, *x.shape[2:]),
        (batch, step * token, token, head, number),
        x.storage_offset() + start * token,
    )


def _own_spans(fetches: Sequence[Fetch], length: int) -> list[OwnSpans]:
    """Return where own keys lie in a buffer of ``length`` columns, into which they were fetched.

    It is one set of spans if these are of one size and equally far apart, else a set for each.
    """
    spans = sorted((x.source.start, x.source.stop, x.target.start) for x in fetches)
    sizes = {stop - start for start, stop, _ in spans}
    steps = {(b[0] - a[0], b[2] - a[2]) for a, b in pairwise(spans)}
    if len(sizes) == 1 and len(steps) < 2:
        source_step, target_step = next(iter(steps), (0, 0))
        start, stop, target = spans[0]
        return [OwnSpans(len(spans), stop - start, start, source_step, target, target_step, length)]
    return [OwnSpans(1, stop - a, a, 0, target, 0, length) for a, stop, target in spans]


def head_groups_of(program: RingProgram, keys: KVPayload, q_heads: int) -> HeadGroups:
    """Return into how many groups of heads a call is cut, the same on all ranks.

    It weighs the bytes of the longest gathered buffer of a rank, twice if these are so many that
    the backward fetches them again, against the mean FLOPs of a rank. If some rows are launched
    over own K/V in place, the backward gets more groups, until a group's sums of dK/dV fit into
    ``MOST_SUM_BYTES``. ``keys`` is the shape of a rank's K/V.
    """
    plan, itemsize = program.plan, keys.dtype.itemsize
    pairs = int(program.work().sum()) * keys.batch // plan.cp_size
    flops = 2 * pairs * q_heads * (keys.dim + keys.v_dim)
    longest, numbers = longest_gather(plan), keys.batch * keys.width  # of a token
    size = longest.length * numbers * itemsize
    fetched_bytes = size if size <= MAX_SAVED_BYTES else 2 * size
    # Every rank has the same plan and sizes, so all cut alike: their messages are of the same
    # groups.
    most_groups = max(1, min(MOST_GROUPS, int(flops / GROUP_FLOPS)))
    allowed = [n for n in range(1, most_groups + 1) if keys.heads % n == 0]
    forward = backward = allowed[-1] if fetched_bytes > MIN_BYTES_PER_FLOP * flops else 1
    if longest.in_place and forward == 1:
        sum_bytes = max(itemsize, 4) * plan.k_layout.local_len * numbers
        backward = next((n for n in allowed if sum_bytes <= n * MOST_SUM_BYTES), allowed[-1])
    return HeadGroups(forward, backward, before_last_item=flops > EARLY_RETURN_FLOPS)


def _rounding_of(
    call: Call, split: SplitBackward | None, keys: KVPayload, fetches: Sequence[Fetch], length: int
) -> Rounding:
    """Return what rounds sums of own keys, fetched into a buffer of ``length`` columns.

    ``keys`` is the shape of a group's own K/V.
    """
    spans = _own_spans(fetches, length)
    if split is None:
        return partial(_round_spans, KeyGradBuffer(keys, head_major=False), spans)
    launches = [split.rounding(some, keys, call.params) for some in spans]
    if len(launches) == 1:
        return launches[0]
    return lambda sums, dk, dv: [launch(sums, dk, dv) for launch in launches]


def _split_backward_tile(call: Call, splits: bool) -> int | None:
    """Return the ``tile`` of gather programs with which the kernel's split backward can run.

    It is ``None`` if it cannot, or if there is no backward. All ranks get the same answer. Another
    kernel, to which a gradient of ``lse`` may lead, reads the same gathered K/V, so programs of
    calls that return ``lse`` are as for any kernel.
    """
    split_backward = call.kernel.split_backward
    if split_backward is None or not call.needs_grad or not call.is_plain:
        return None
    tile = 1 if call.returns_lse else split_backward.tile
    applies = split_backward.applies(call.plan, call.request, splits=splits, tile=tile)
    return tile if applies else None


def _resolve(call: Call, _inner: Call | None, _grid: RankGrid | None) -> Gather:
    """Make what a rank fetches and launches: once for all keys of a row, or in two stages.

    A call in two stages that returns ``lse`` saves nothing: another kernel, with another program,
    may run its backward.
    """
    kernel, plan, rank, params = call.kernel, call.plan, call.ranks.rank, call.params
    if kernel.capabilities.bands == "any":
        is_short = call.ranks.size > 1 and call.transport.is_short(plan, call.keys, 1)
        # Options that belong to single heads or keys rule groups out: bias, slopes, dropout,
        # predicates, segment ids.
        groups, tile = ONE_GROUP, _split_backward_tile(call, not is_short)
        if call.is_plain:
            groups = head_groups_of(call.program, call.keys, call.request.q_heads)
        gather = gather_program(plan, rank, splits=not is_short, tile=tile or 1)
        own_items, in_stages = gather.in_place, False
    else:
        groups, tile, in_stages = ONE_GROUP, None, True
        gather, own_items = gather_program(plan, rank, own=False), plan.items(rank, rank)
        params = replace(params, needs_lse=True)  # partial results are merged by it
    num_rows, num_keys, items = (
        plan.q_layout.local_len,
        call.keys.length,
        (*own_items, *gather.items),
    )
    banded = call.is_plain and all(item.cu_q is None and item.tiles is None for item in items)
    whole_rows = gather.num_rows == num_rows and call.keys.batch > 0
    # Each row is in one launch, so a kernel that can add the sinks to it does.
    adds_sinks = (
        kernel.adds_sinks and banded and whole_rows and groups.forward == 1 and not in_stages
    )
    launches = [kernel.forward(item, params) for item in items]
    own_work = Work.of(launches[: len(own_items)], num_rows, num_keys)
    work = Work.of(launches[len(own_items) :], num_rows, gather.length, gather.waits_for)
    joins = joins_of(
        launches, call.dtype, num_rows, is_final=not in_stages, wide=call.has_sinks, at_once=3
    )
    by_parts = (
        banded
        and not own_items
        and groups.backward == 1
        and not in_stages
        and not (adds_sinks and call.has_sinks)
        and all("merge" not in launch.modes for launch in launches)
    )
    if joins.is_final and (groups.forward > 1 or by_parts):
        joins = joins._replace(holds_first=False)  # groups of heads are written into one memory
    by_size = sorted(  # by pairs of queries and keys, masked ones among them
        work.launches,
        reverse=True,
        key=lambda x: (x.item.q_stop - x.item.q_start) * (x.item.k_stop - x.item.k_start),
    )

    longest = longest_gather(plan, splits=gather.splits, tile=gather.tile)
    own_whole = [x.q_slice for x in own_items] == [slice(0, num_rows)]
    covers_keys = [x.k_slice for x in own_items] == [slice(0, num_keys)]
    split = kernel.split_backward if tile is not None else None

    def backward(some: Sequence[WorkItem], *, adds: bool = False) -> Backward:
        if split is not None:
            return split.backward(some, params)
        return kernel.backward(some, params, adds=adds)

    in_order = not in_stages  # launches run in reverse
    own_launch = backward(own_items[:: 1 if in_order else -1], adds=in_stages)
    # Partial dQ wait and are added up at the end, where the last one has all rows.
    rows: Literal["write", "add", "wait"] = "write"
    if in_stages:
        can_wait = own_whole and covers_keys and not own_launch.adds
        rows, in_order = ("wait", True) if can_wait else ("add", False)
    items_back = gather.items[:: 1 if in_order else -1]
    segments = {
        **segments_of(gather.items, gather.overwritten if in_order else [()] * len(gather.items)),
        **segments_of(own_items, [(slice(0, num_keys),)] if covers_keys else [()] * len(own_items)),
    }
    whole = Part(backward(items_back, adds=in_stages), None, True)
    last_parts: tuple[Part, ...] = (whole._replace(overlapped=in_stages),)
    if groups.before_last_item:
        last_parts = (
            Part(backward(gather.items[1:]), True, True),
            Part(backward(gather.items[:1]), False, False),
        )
    rounding = partial(_rounding_of, call, split, call.keys.of_group(groups.backward))
    own_fetches = tuple(x for x in gather.fetches if x.rank == rank)
    tokens = int(plan.k_layout.num_tokens(rank))
    is_complete = sum(x.source.stop - x.source.start for x in own_fetches) == tokens
    shard = [Fetch(rank, slice(0, num_keys), slice(0, num_keys))]
    specs = [
        SessionSpec(gather, some, n, KeyGradBuffer(some, split is not None), by_parts)
        for n in groups[:2]
        for some in [call.keys.of_group(n)]
    ]
    return Gather(
        forward_spec=specs[0],
        backward_spec=specs[1],
        adds_sinks=adds_sinks,
        # By the rank that fetches most: all ranks save, or none does.
        saves=call.needs_grad
        and call.keys.size(longest.length) <= MAX_SAVED_BYTES
        and not (in_stages and call.returns_lse),
        own_work=own_work,
        work=work,
        joins=joins,
        by_size=tuple(Work.of([x], num_rows, gather.length) for x in by_size),
        parts=(whole,),
        last_parts=last_parts,
        own_launch=own_launch,
        rows=rows,
        whole_rows=whole_rows,
        zero=split is not None or not in_order or not gather.items,
        segments=segments,
        overwrites_own=covers_keys and in_order and split is None,
        own_fetches=own_fetches,
        own_columns=partial(_fetched_columns, own_fetches),
        rounding=rounding(own_fetches, gather.length) if is_complete else None,
        own_rounding=rounding(shard, num_keys),
        new_grads=partial(
            torch.empty_like if tokens == num_keys else torch.zeros_like,
            memory_format=torch.contiguous_format,
        ),
    )


GATHER = StrategySpec(
    "gather",
    _resolve,
    lambda plan, _: gather_refusals(plan),
    moves_by_any=True,
    is_automatic=lambda transport: not transport.sends_messages,  # messages hide better in a ring
    automatic_refusals=lambda plan, request: memory_refusals(
        plan, request, itemsize=getattr(torch, request.dtype).itemsize
    ),
)
