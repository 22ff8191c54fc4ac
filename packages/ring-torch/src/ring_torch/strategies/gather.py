"""The loops over gathered keys: fetch all a rank needs, call a kernel for each run of queries.

Every row sees its keys in one launch, as on one device, and what the first launch needs is fetched
first; so a result has one device's rounding. Rows that see own keys only, where they are most, need
none of that: they come first, and in the backward last. Kernels that know no band take two stages:
the own block, and full rectangles of the others' keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ring_core import Fetch, Gather, WorkItem, gather_program, longest_gather
from ring_core.triton.tile_sizes import come_in_eights
from ring_torch.call import Call, zero_row_grads
from ring_torch.head_groups import MAX_SAVED_BYTES, HeadGroups
from ring_torch.payload import KeyGradBuffer, KVPayload, keys_of
from ring_torch.positions import gathered_positions, gathered_runs
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    Grads,
    Inputs,
    ItemGrads,
    KeyBlock,
    KeyGrads,
    QueryBlock,
    QueryGrads,
    Run,
    empty_state,
    head_group,
)
from ring_torch.transports.api import Carrier, PendingGrads, PendingKV
from ring_torch.transports.p2p import add_landed


def gathered_forward(
    call: Call, inputs: Inputs, carrier: Carrier
) -> tuple[AttentionState, list[Tensor]]:
    """``out [B, T_local, H, Dv]``, in the inputs' dtype or wider, and ``lse [B, H, T_local]``.

    And the gathered keys, if they are few enough to be kept for the backward, a group's after
    another's.
    """
    in_one = call.kernel.capabilities.bands == "any"
    gather = gather_program(call.plan, call.ring.rank, own=in_one)
    if not in_one:
        (arriving,) = carrier.fetch(gather, inputs)
        columns = _columns(call, gather, carrier.keys, arriving.tensors)
        return _in_two_stages(call, inputs, gather, columns, arriving), []
    rows, whole = call.rows(inputs), _unseen(call, gather, inputs)
    results, gathered = [], []
    for n, arriving in enumerate(carrier.fetch(gather, inputs)):
        gathered += arriving.tensors
        columns = _columns(call, gather, carrier.keys, arriving.tensors)
        in_place = _in_place(call, gather, inputs, n, carrier.groups)
        part = rows.share(n, carrier.groups), columns, in_place
        results.append(
            _in_one_launch(call, *part, gather, arriving, whole.share(n, carrier.groups))
        )
        arriving.wait(None)
    if len(results) == 1:
        whole = results[0]
    elif results[0].out.dtype != whole.out.dtype:
        outs, lses = zip(*results, strict=True)
        whole = AttentionState(torch.cat(outs, dim=2), torch.cat(lses, dim=1))
    return whole, gathered if saves_gathered(call, carrier.keys) else []


def saves_gathered(call: Call, keys: KVPayload) -> bool:
    """Whether the forward leaves the keys it gathered to the backward."""
    longest = longest_gather(call.plan).length
    in_one = call.kernel.capabilities.bands == "any"
    return (
        in_one and call.needs_grad and call.groups.forward * keys.size(longest) <= MAX_SAVED_BYTES
    )


def _in_one_launch(
    call: Call, rows: QueryBlock, columns: KeyBlock, in_place: Sequence[tuple[KeyBlock, WorkItem]],
    gather: Gather, arriving: PendingKV, whole: AttentionState,
) -> AttentionState:  # fmt: skip
    """Every row sees all its keys in one launch: nothing to merge.

    The result is in ``whole``, unless a kernel's is wider, to be rounded at the end.
    """
    work = [(*each, 0) for each in in_place]
    work += [(columns, *each) for each in zip(gather.items, gather.needs, strict=True)]
    for keys, item, needs in work:
        if needs > 0:
            arriving.wait(needs)
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


def _in_two_stages(
    call: Call, inputs: Inputs, gather: Gather, columns: KeyBlock, arriving: PendingKV
) -> AttentionState:
    """The own keys while the others' arrive, then these: for kernels that know no band."""
    rows, rank = call.rows(inputs), call.ring.rank
    into = empty_state(rows.q, inputs.v.shape[3])
    own = call.columns(rank, keys_of(inputs))
    work = [(own, item, 0) for item in call.plan.items(rank, 0)]
    work += [(columns, *each) for each in zip(gather.items, gather.needs, strict=True)]
    for keys, item, needs in work:
        arriving.wait(needs)
        if rows.q.shape[0] > 0:
            part = rows.take(item.q_slice), keys.take(item.k_slice)
            call.kernel.forward(*part, item, call.params, into.take(item.q_slice))
    arriving.wait(None)
    return into


def gathered_backward(
    call: Call, inputs: Inputs, upstream: BackwardInputs, carrier: Carrier, kept: list[Tensor]
) -> Grads:
    """Gradients of this rank's shards; ``kept`` are the keys that the forward gathered, if any."""
    if call.kernel.capabilities.bands == "any":
        return _back_in_one_launch(call, inputs, upstream, carrier, kept)
    return _back_in_two_stages(call, inputs, upstream, carrier)


def _back_in_one_launch(
    call: Call, inputs: Inputs, upstream: BackwardInputs, carrier: Carrier, kept: list[Tensor]
) -> Grads:
    """The launches of the forward in reverse, the longest first, for each group of heads.

    The gradients of a group's keys travel home beside the next group's launches, and of the last
    group those that the last launch leaves alone beside that one. Launches over own keys in place
    come after, and add up gradients of their own.
    """
    rank, groups = call.ring.rank, carrier.groups
    gather, rows, sums = (
        gather_program(call.plan, rank),
        call.rows(inputs),
        _sums(call, inputs, carrier),
    )
    items = range(len(gather.items) if rows.q.shape[0] > 0 else 0)
    # A kernel's parts add, where launches by themselves write what comes first.
    room = carrier.accumulators(gather, sums, zero=sums.by_head or len(items) == 0)
    row_grads = QueryGrads(_dq(call, gather, rows), _dbias(call, rows))
    shape = (carrier.keys.batch, carrier.keys.length, inputs.k.shape[2])
    dk, dv = (
        torch.empty(*shape, x.shape[3], dtype=call.dtype, device=call.device)
        for x in (inputs.k, inputs.v)
    )
    travelling: list[list[PendingGrads]] = [[] for _ in range(groups)]
    home: list[Tensor | None] = []

    def finish(n: int) -> None:
        places = head_group(dk, n, groups, dim=2), head_group(dv, n, groups, dim=2)
        _come_home(call, gather, sums, (room[n], home[n]), travelling[n], places)

    for n, columns in enumerate(_keys_by_group(call, gather, inputs, carrier, kept)):
        part = rows.share(n, groups), upstream.share(n, groups), row_grads.share(n, groups)
        for some, early, beside in _launches(items, call.groups, last=n + 1 == groups):
            work = [(columns, gather.items[m], gather.fresh[m]) for m in reversed(some)]
            _differentiate(call, work, *part, sums, room[n], gather.length)
            sent = carrier.return_grads(gather, sums, room[n], n, early=early, beside=beside)
            travelling[n].append(sent)
        in_place = _in_place(call, gather, inputs, n, groups)
        home.append(_back_in_place(call, in_place, *part, sums))
        if n > 0:
            finish(n - 1)
    finish(groups - 1)
    return Grads(row_grads.dq, dk, dv, row_grads.dbias)


def _launches(
    items: range, groups: HeadGroups, *, last: bool
) -> list[tuple[range, bool | None, bool]]:
    """Items of a group, which gradients go home after them, and whether beside others' launches."""
    if last and groups.early:
        return [(items[1:], True, True), (items[:1], False, False)]
    return [(items, None, not last)]


def _back_in_place(
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
        if sums.by_head and call.kernel.parts is not None:
            call.kernel.parts.add_sums(*part, item, call.params, into[0].dq, into[1])
        else:
            result = call.kernel.gradients(*part, item, call.params, into[0].dq)
            _put_rows(result, into[0])
            _put_columns(result, into[1], item, fresh)


def _keys_by_group(
    call: Call, gather: Gather, inputs: Inputs, carrier: Carrier, kept: Sequence[Tensor]
) -> Iterator[KeyBlock]:
    """The keys of each group of heads, kept or fetched again."""
    if not kept:
        for arriving in carrier.fetch(gather, inputs):
            arriving.wait(None)
            yield _columns(call, gather, carrier.keys, arriving.tensors)
        return
    before, each = call.groups.forward, len(kept) // call.groups.forward
    cuts = carrier.groups // before  # the forward's groups are cut once more
    keys = replace(carrier.keys, heads=cuts * carrier.keys.heads)
    for n in range(before):
        columns = _columns(call, gather, keys, kept[n * each : (n + 1) * each])
        yield from (columns.share(n, cuts) for n in range(cuts))


def _come_home(
    call: Call, gather: Gather, sums: KeyGradBuffer, found: tuple[Tensor, Tensor | None],
    travelling: Sequence[PendingGrads], places: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Add what comes home to the own sums, and round them into dK and dV.

    ``found`` are the sums over the buffer, and those over the own keys in place. With the latter
    all come together; else where they lie in the buffer, if all of the own keys are there.
    """
    keys, length = sums.keys, gather.length
    own = [one for one in gather.fetches if one.rank == call.ring.rank]
    grads, home = found
    if home is None and sum(one.source.stop - one.source.start for one in own) < keys.length:
        home = torch.zeros(sums.numel(keys.length), dtype=call.acc_dtype, device=call.device)
    if home is not None:
        for one in own:
            places_at_home = sums.parts(home, keys.length, one.source)
            add_landed(places_at_home, [sums.parts(grads, length, one.target)])
        grads, own, length = home, [_all(keys)], keys.length

    def where(source: slice) -> slice:
        one = next(x for x in own if x.source.start <= source.start < x.source.stop)
        by = one.target.start - one.source.start
        return slice(source.start + by, source.stop + by)

    for returning in travelling:
        returning.add_to(grads, length, where)
    for one in own:
        mine = sums.of(grads, length, one.target)
        into = places[0][:, one.source], places[1][:, one.source]
        if sums.by_head and call.kernel.parts is not None:
            call.kernel.parts.round(mine, into, call.params)
        else:
            for place, x in zip(into, mine, strict=True):
                place.copy_(x)


def _all(keys: KVPayload) -> Fetch:
    """All of a rank's own keys, where they are."""
    return Fetch(-1, slice(0, keys.length), slice(0, keys.length))


def _sums(call: Call, inputs: Inputs, carrier: Carrier) -> KeyGradBuffer:
    """By head where the kernel has a backward by parts that can run this call."""
    parts, (q, k, v) = call.kernel.parts, inputs[:3]
    banded = call.params.blocks is None and inputs.q_ids is None and inputs.slopes is None
    by_head = parts is not None and banded and parts.can_sum(call.plan, q, k, v, call.params)
    return KeyGradBuffer(carrier.keys, by_head)


def _dq(call: Call, gather: Gather, rows: QueryBlock) -> Tensor:
    """Room for dQ; rows that see nothing have none. Every row is in one launch: no sums."""
    dtype = call.acc_dtype if call.kernel.needs_delta else call.dtype
    dq = torch.empty(rows.q.shape, dtype=dtype, device=call.device)
    return dq if gather.num_rows == rows.q.shape[1] else dq.zero_()


def _dbias(call: Call, rows: QueryBlock) -> Tensor | None:
    if rows.bias is None or not call.params.bias_grad:
        return None
    return torch.zeros_like(rows.bias, dtype=call.acc_dtype)


def _put_rows(result: ItemGrads, into: QueryGrads) -> None:
    """Put the gradients of an item's rows in their places, unless they are there."""
    if result.dq.data_ptr() != into.dq.data_ptr():
        into.dq.copy_(result.dq)
    if into.dbias is not None and result.dbias is not None:
        into.dbias.add_(result.dbias)


def _put_columns(
    result: ItemGrads, sums: tuple[Tensor, Tensor], item: WorkItem, fresh: Sequence[slice]
) -> None:
    """Put the gradients of an item's columns in their places, and add them where there are some."""
    edges = [item.k_start, *(edge for one in fresh for edge in (one.start, one.stop)), item.k_stop]
    for n, (start, stop) in enumerate(pairwise(edges)):
        part = slice(start - item.k_start, stop - item.k_start)
        for total, x in zip(sums, (result.dk, result.dv), strict=True):
            if start < stop and n % 2 == 0:
                total[:, part].add_(x[:, part])
            elif start < stop:
                total[:, part].copy_(x[:, part])


def _back_in_two_stages(
    call: Call, inputs: Inputs, upstream: BackwardInputs, carrier: Carrier
) -> Grads:
    """The others' keys, and then the own ones while the others' gradients travel home."""
    plan, rank, keys = call.plan, call.ring.rank, carrier.keys
    gather, rows, sums = (
        gather_program(plan, rank, own=False),
        call.rows(inputs),
        KeyGradBuffer(keys, by_head=False),
    )
    row_grads = zero_row_grads(call, rows)
    (others,) = carrier.accumulators(gather, sums, zero=True)
    (arriving,) = carrier.fetch(gather, inputs)
    home = torch.zeros(sums.numel(keys.length), dtype=call.acc_dtype, device=call.device)
    columns = _columns(call, gather, keys, arriving.tensors)
    arriving.wait(None)

    def differentiate(of: KeyBlock, item: WorkItem, dk: Tensor, dv: Tensor) -> None:
        if rows.q.shape[0] > 0:
            part = rows.take(item.q_slice), of.take(item.k_slice), upstream.take(item.q_slice)
            into = row_grads.take(item.q_slice), KeyGrads(dk, dv)
            call.kernel.backward(*part, item, call.params, *into)

    for item in gather.items:
        differentiate(columns, item, *sums.of(others, gather.length, item.k_slice))
    returning = carrier.return_grads(gather, sums, others, 0, beside=True)
    for item in plan.items(rank, 0):
        own = call.columns(rank, keys_of(inputs))
        differentiate(own, item, *sums.of(home, keys.length, item.k_slice))
    returning.add_to(home, keys.length, lambda source: source)
    return Grads(row_grads.dq, *sums.views(home, keys.length), row_grads.dbias)


def _in_place(
    call: Call, gather: Gather, inputs: Inputs, n: int, groups: int
) -> list[tuple[KeyBlock, WorkItem]]:
    """The launches over a group's own keys, where they lie, with these."""
    if not gather.in_place:
        return []
    own = call.columns(call.ring.rank, keys_of(inputs.share(n, groups)))
    return [(own, item) for item in gather.in_place]


def _columns(call: Call, gather: Gather, keys: KVPayload, tensors: Sequence[Tensor]) -> KeyBlock:
    """The keys of the buffer and all that belongs to them."""
    position, eights = None, False
    runs: tuple[Run, ...] = ()
    if call.needs_index:
        which = call.plan, call.ring.rank, gather.own
        position, runs = gathered_positions(*which, call.device), gathered_runs(*which)
        eights = come_in_eights(gather.positions)
    segments = tensors[1] if keys.segments else None
    return KeyBlock(*keys.split(tensors[0]), position, segments, eights, runs)


def _unseen(call: Call, gather: Gather, inputs: Inputs) -> AttentionState:
    """Room for all rows, of which those that no item covers see nothing."""
    batch, length, heads, _ = inputs.q.shape
    out = inputs.q.new_empty(batch, length, heads, inputs.v.shape[3])
    lse = torch.empty(batch, heads, length, dtype=call.acc_dtype, device=out.device)
    if gather.num_rows < length:
        out.zero_()
        lse.fill_(-torch.inf)
    return AttentionState(out, lse)
