"""Keys are gathered: a rank fetches all its queries see, and calls a kernel for each run of them.

Every row sees its keys in one launch, as on one device, and what the first launch needs is fetched
first; so a result has one device's rounding. Rows that see own keys only, where they are most, need
none of that: they come first, and in the backward last.

Heads may go in groups, so that transfers hide behind kernels. While a kernel runs for one group,
the keys of the next arrive and the gradients of the last travel home. What nothing hides is the
transfer of a single group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ring_core import (
    Fetch,
    GatherProgram,
    Plan,
    Request,
    RingProgram,
    WorkItem,
    gather_memory,
    gather_program,
    gather_refusals,
    longest_gather,
)
from ring_core.checks import Sizes
from ring_torch.call import Call, Resolution, Saved, Shapes, Strategy, StrategySpec
from ring_torch.payload import ONE_GROUP, HeadGroups, KeyGradBuffer, KVPayload
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    Grads,
    Inputs,
    KeyBlock,
    KeyGrads,
    QueryBlock,
    QueryGrads,
    head_group,
    unseen_state,
    zero_bias_grad,
)
from ring_torch.strategies.two_stage import TwoStageGather
from ring_torch.transports.api import (
    GatherSession,
    PendingGrads,
    PendingKV,
    Refusals,
    Traffic,
    add_staged,
    gathered_traffic,
)

#: ``auto`` does not gather where that takes more than this many times a ring's memory.
MOST_MEMORY = 3.0

#: FLOPs of a forward that a group is worth: a millisecond and a half on an H200. With less, the
#: host is not ahead of the GPU.
GROUP_FLOPS = 1e12
MOST_GROUPS = 4

#: Gathered keys of up to this many bytes are kept from the forward for the backward, which
#: otherwise fetches them again.
MAX_SAVED_BYTES = 256 << 20

#: Bytes fetched a FLOP of a forward from which on keys do not hide behind one another's launches:
#: those of a ring of four with a key head for every query head, up to 128k tokens. Fewer are not
#: worth more launches.
MIN_BYTES_PER_FLOP = 1e-4

#: FLOPs of a forward from which on gradients are sent in two parts.
EARLY_RETURN_FLOPS = 3e11


def head_groups_of(program: RingProgram, sizes: Sizes, itemsize: int) -> HeadGroups:
    """Groups for a call that gathers keys, the same on all ranks."""
    dims = sizes.head_dim + sizes.v_head_dim
    plan = program.plan
    pairs = int(program.work().sum()) * sizes.batch // plan.cp_size
    flops = 2 * pairs * sizes.q_heads * dims
    size = longest_gather(plan).length * sizes.batch * sizes.kv_heads * dims * itemsize
    moved = size if size <= MAX_SAVED_BYTES else 2 * size
    groups = 1
    if moved > MIN_BYTES_PER_FLOP * flops:
        most = min(MOST_GROUPS, int(flops / GROUP_FLOPS))
        groups = max(n for n in range(1, max(most, 1) + 1) if sizes.kv_heads % n == 0)
    return HeadGroups(groups, groups, early=flops > EARLY_RETURN_FLOPS)


@dataclass(frozen=True)
class Gather(Strategy):
    """For kernels that know bands. Gathered keys are saved where they are few."""

    groups: HeadGroups
    gather: GatherProgram
    name: str = "gather"
    depends_on_kernel = True

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """The state in the inputs' dtype or wider, and the gathered keys, group by group."""
        groups = self.groups.forward
        session = call.open_session(inputs, call.forward_signature, groups=groups, own=True)
        gather, keys = self.gather, session.spec.keys
        covered = gather.num_rows == inputs.q.shape[1]
        whole = unseen_state(inputs.q, inputs.v.shape[3], covered=covered)
        rows = call.rows(inputs)
        results: list[AttentionState] = []
        gathered: list[Tensor] = []
        for n, arriving in enumerate(session.fetch(gather, inputs)):
            gathered += arriving.tensors
            columns = call.gathered_columns(gather, keys, arriving.tensors)
            in_place = _in_place(call, gather, inputs, n, groups)
            part, place = head_group(rows, n, groups), head_group(whole, n, groups)
            results.append(_attend(call, part, columns, in_place, gather, arriving, place))
            arriving.wait(None)
        if len(results) == 1:
            whole = results[0]
        elif results[0].out.dtype != whole.out.dtype:
            outs, lses = zip(*results, strict=True)
            whole = AttentionState(torch.cat(outs, dim=2), torch.cat(lses, dim=1))
        return whole, tuple(gathered) if self._saves(call, keys) else ()

    def backward(self, call: Call, inputs: Inputs, upstream: BackwardInputs, saved: Saved) -> Grads:
        """The launches of the forward in reverse, the longest first, for each group of heads.

        The gradients of a group's keys travel home beside the next group's launches, and of the
        last group those that the last launch leaves alone beside that one. Launches over own keys
        in place come after, and add up gradients of their own.
        """
        groups = self.groups.backward
        session = call.open_session(inputs, call.backward_signature, groups=groups, own=True)
        gather, keys = self.gather, session.spec.keys
        rows, sums = call.rows(inputs), _sums(call, inputs, keys)
        items = range(len(gather.items) if rows.q.shape[0] > 0 else 0)
        # A kernel's parts add, where launches by themselves write what comes first.
        room = session.accumulators(gather, sums, zero=sums.head_major or len(items) == 0)
        dbias = zero_bias_grad(rows, call.params, call.acc_dtype)
        row_grads = QueryGrads(_dq(call, gather, rows), dbias)
        dk, dv = (
            torch.empty(x.shape, dtype=call.dtype, device=call.device) for x in (inputs.k, inputs.v)
        )
        in_flight: list[list[PendingGrads]] = [[] for _ in range(groups)]
        home: list[Tensor | None] = []

        def finish(n: int) -> None:
            places = head_group(KeyGrads(dk, dv), n, groups)
            _finish_own_grads(call, gather, sums, (room[n], home[n]), in_flight[n], places)

        for n, columns in enumerate(
            _keys_by_group(call, gather, inputs, session, saved, self.groups)
        ):
            part = (
                head_group(rows, n, groups), head_group(upstream, n, groups),
                head_group(row_grads, n, groups),
            )  # fmt: skip
            for some, early, overlapped in _launches(items, self.groups, last=n + 1 == groups):
                work = [(columns, gather.items[m], gather.fresh[m]) for m in reversed(some)]
                _differentiate(call, work, *part, sums, room[n], gather.length)
                in_flight[n].append(
                    session.return_grads(
                        gather, sums, room[n], n, early=early, overlapped=overlapped
                    )
                )
            in_place = _in_place(call, gather, inputs, n, groups)
            home.append(_differentiate_in_place(call, in_place, *part, sums))
            if n > 0:
                finish(n - 1)
        finish(groups - 1)
        return Grads(row_grads.dq, dk, dv, row_grads.dbias)

    def saved_shapes(self, call: Call, inputs: Inputs, *, plan_known: bool) -> Shapes:
        """The gathered keys; none where another plan may need more of them."""
        keys = KVPayload.of(inputs, self.groups.forward)
        if not plan_known or not self._saves(call, keys):
            return []
        length = self.gather.length
        both: Shapes = [((keys.batch, length, keys.width), keys.dtype)]
        ids: Shapes = [((keys.batch, length), torch.int32)] if keys.segments else []
        return (both + ids) * self.groups.forward

    def traffic(self, call: Call, inputs: Inputs, *, forward: bool, saved: bool) -> Traffic:
        """Keys that are fetched, unless the forward left them, and gradients that go home."""
        fetches = forward or not saved
        return gathered_traffic(
            self.gather, call.plan, call.ranks.rank, KVPayload.of(inputs), call.acc_dtype,
            forward=forward, fetches=fetches,
        )  # fmt: skip

    def _saves(self, call: Call, keys: KVPayload) -> bool:
        """Whether the forward leaves the keys it gathered to the backward."""
        longest = longest_gather(call.plan).length
        return call.needs_grad and self.groups.forward * keys.size(longest) <= MAX_SAVED_BYTES


def _attend(
    call: Call, rows: QueryBlock, columns: KeyBlock, in_place: Sequence[tuple[KeyBlock, WorkItem]],
    gather: GatherProgram, arriving: PendingKV, whole: AttentionState,
) -> AttentionState:  # fmt: skip
    """Every row sees all its keys in one launch: nothing to merge.

    The result is in ``whole``, unless a kernel's is wider, to be rounded at the end.
    """
    work = [(*each, 0) for each in in_place]
    work += [(columns, *each) for each in zip(gather.items, gather.waits_for, strict=True)]
    for keys, item, waits_for in work:
        if waits_for > 0:
            arriving.wait(waits_for)
        if rows.q.shape[0] == 0:
            break
        part = rows.take(item.q_slice), keys.take(item.k_slice)
        place = whole.take(item.q_slice)
        result = call.kernel.attend(*part, item, call.params, place)
        if result.out.dtype != whole.out.dtype:
            whole = AttentionState(whole.out.to(result.out.dtype), whole.lse.to(result.lse.dtype))
            place = whole.take(item.q_slice)
        if result.out.data_ptr() != place.out.data_ptr():
            place.out.copy_(result.out)
            place.lse.copy_(result.lse)
    return whole


def _launches(
    items: range, groups: HeadGroups, *, last: bool
) -> list[tuple[range, bool | None, bool]]:
    """Items of a group, which gradients go home after them, and whether beside others' launches."""
    if last and groups.early:
        return [(items[1:], True, True), (items[:1], False, False)]
    return [(items, None, not last)]


def _differentiate_in_place(
    call: Call, in_place: Sequence[tuple[KeyBlock, WorkItem]], rows: QueryBlock, upstream: BackwardInputs,
    row_grads: QueryGrads, sums: KeyGradBuffer,
) -> Tensor | None:  # fmt: skip
    """The sums of all own keys, of launches over them in place; ``None`` if there are none."""
    if not in_place:
        return None
    length = sums.keys.length
    home = torch.zeros(sums.numel(length), dtype=call.acc_dtype, device=call.device)
    if rows.q.shape[0] > 0:
        work = [(*each, ()) for each in reversed(in_place)]
        _differentiate(call, work, rows, upstream, row_grads, sums, home, length)
    return home


def _differentiate(
    call: Call, work: Sequence[tuple[KeyBlock, WorkItem, Sequence[slice]]], rows: QueryBlock,
    upstream: BackwardInputs, row_grads: QueryGrads, sums: KeyGradBuffer, grads: Tensor, length: int,
) -> None:  # fmt: skip
    """The backward of items: into ``row_grads``, and added to the sums of so many tokens.

    Each over its columns, with those of which there are no sums yet.
    """
    for columns, item, fresh in work:
        part = rows.take(item.q_slice), columns.take(item.k_slice), upstream.take(item.q_slice)
        into = row_grads.take(item.q_slice), sums.of(grads, length, item.k_slice)
        if sums.head_major and call.kernel.parts is not None:
            call.kernel.parts.accumulate(*part, item, call.params, into[0].dq, into[1])
        else:
            result = call.kernel.grads(*part, item, call.params, into[0].dq)
            if result.dq.data_ptr() != into[0].dq.data_ptr():
                into[0].dq.copy_(result.dq)
            if into[0].dbias is not None and result.dbias is not None:
                into[0].dbias.add_(result.dbias)
            _put_columns(result, into[1], item, fresh)


def _keys_by_group(
    call: Call, gather: GatherProgram, inputs: Inputs, session: GatherSession, saved: Saved,
    groups: HeadGroups,
) -> Iterator[KeyBlock]:  # fmt: skip
    """The keys of each group of heads, saved or fetched again."""
    keys = session.spec.keys
    if not saved:
        for arriving in session.fetch(gather, inputs):
            arriving.wait(None)
            yield call.gathered_columns(gather, keys, arriving.tensors)
        return
    before, each = groups.forward, len(saved) // groups.forward
    cuts = groups.backward // before  # the forward's groups are cut once more
    keys = replace(keys, heads=cuts * keys.heads)
    for n in range(before):
        columns = call.gathered_columns(gather, keys, saved[n * each : (n + 1) * each])
        yield from (head_group(columns, n, cuts) for n in range(cuts))


def _finish_own_grads(
    call: Call, gather: GatherProgram, sums: KeyGradBuffer, found: tuple[Tensor, Tensor | None],
    in_flight: Sequence[PendingGrads], places: KeyGrads,
) -> None:  # fmt: skip
    """Add what comes home to the own sums, and round them into dK and dV.

    ``found`` are the sums over the buffer, and those over the own keys in place. With the latter
    all come together; else where they lie in the buffer, if all of the own keys are there.
    """
    keys, length = sums.keys, gather.length
    own = [one for one in gather.fetches if one.rank == call.ranks.rank]
    grads, home = found
    if home is None and sum(one.source.stop - one.source.start for one in own) < keys.length:
        home = torch.zeros(sums.numel(keys.length), dtype=call.acc_dtype, device=call.device)
    if home is not None:
        for one in own:
            places_at_home = sums.parts(home, keys.length, one.source)
            add_staged(places_at_home, [sums.parts(grads, length, one.target)])
        every = slice(0, keys.length)
        grads, own, length = home, [Fetch(-1, every, every)], keys.length

    def where(source: slice) -> slice:
        one = next(x for x in own if x.source.start <= source.start < x.source.stop)
        by = one.target.start - one.source.start
        return slice(source.start + by, source.stop + by)

    for pending in in_flight:
        pending(grads, length, where)
    for one in own:
        mine = sums.of(grads, length, one.target)
        into = places.take(one.source)
        if sums.head_major and call.kernel.parts is not None:
            call.kernel.parts.round(mine, into, call.params)
        else:
            for place, x in zip(into, mine, strict=True):
                place.copy_(x)


def _sums(call: Call, inputs: Inputs, keys: KVPayload) -> KeyGradBuffer:
    """By head where the kernel has a backward by parts that can run this call."""
    parts, (q, k, v) = call.kernel.parts, inputs[:3]
    banded = call.params.blocks is None and inputs.q_ids is None and inputs.slopes is None
    head_major = parts is not None and banded and parts.applies(call.plan, q, k, v, call.params)
    return KeyGradBuffer(keys, head_major)


def _dq(call: Call, gather: GatherProgram, rows: QueryBlock) -> Tensor:
    """Room for dQ; rows that see nothing have none. Every row is in one launch: no sums."""
    dtype = call.acc_dtype if call.kernel.needs_delta else call.dtype
    dq = torch.empty(rows.q.shape, dtype=dtype, device=call.device)
    return dq if gather.num_rows == rows.q.shape[1] else dq.zero_()


def _put_columns(
    result: Grads, sums: tuple[Tensor, Tensor], item: WorkItem, fresh: Sequence[slice]
) -> None:
    """Put the gradients of an item's columns in their places, and add them where there are some."""
    edges = [item.k_start, *(at for one in fresh for at in (one.start, one.stop)), item.k_stop]
    for n, (start, stop) in enumerate(pairwise(edges)):
        part = slice(start - item.k_start, stop - item.k_start)
        for total, x in zip(sums, (result.dk, result.dv), strict=True):
            if start < stop and n % 2 == 0:
                total[:, part].add_(x[:, part])
            elif start < stop:
                total[:, part].copy_(x[:, part])


def _in_place(
    call: Call, gather: GatherProgram, inputs: Inputs, n: int, groups: int
) -> list[tuple[KeyBlock, WorkItem]]:
    """The launches over a group's own keys, where they lie, with these."""
    if not gather.in_place:
        return []
    own = call.columns(call.ranks.rank, head_group(inputs, n, groups).key_tensors())
    return [(own, item) for item in gather.in_place]


def _resolve(given: Resolution) -> Strategy:
    """Resolve gathering for a rank: one launch over all keys, if the kernel knows bands."""
    program = given.program
    if given.kernel.capabilities.bands != "any":
        return TwoStageGather.of(program.plan, given.rank)
    groups = ONE_GROUP
    if not (given.needs_index or given.segment_ids):
        groups = head_groups_of(program, given.sizes, given.itemsize)
    return Gather(groups, gather_program(program.plan, given.rank))


def _memory_refusals(plan: Plan, request: Request) -> Refusals:
    memory = gather_memory(
        plan, q_width=request.q_heads * request.head_dim,
        kv_width=request.kv_heads * (request.head_dim + request.v_head_dim),
        itemsize=getattr(torch, request.dtype).itemsize,
    )  # fmt: skip
    if memory <= MOST_MEMORY:
        return ()
    return (f"it takes more than {MOST_MEMORY:g} times the memory of a ring",)


GATHER = StrategySpec(
    "gather", _resolve, lambda plan, _: gather_refusals(plan), opens_sessions=True,
    is_automatic=lambda transport: not transport.sends_messages,  # messages hide better in a ring
    automatic_refusals=_memory_refusals,
)  # fmt: skip
