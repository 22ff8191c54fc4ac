"""The loops over gathered keys: fetch all a rank needs, call a kernel for each run of queries.

Every row sees its keys in one launch, as on one device, and what the first launch needs is fetched
first; so a result has one device's rounding. Kernels that know no band take two stages: the own
block, and full rectangles of the others' keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ring_core import Fetch, Gather, WorkItem
from ring_torch._backward import Grads, zero_row_grads
from ring_torch._call import Call, Inputs, keys_of
from ring_torch._gather import Arriving, Carrier, Returning
from ring_torch._keys import Keys, Sums
from ring_torch.kernels._api import (
    ColumnGrads,
    Columns,
    ItemGrads,
    Parts,
    Result,
    RowGrads,
    Rows,
    Upstream,
    empty_result,
)

#: Gathered keys of up to this many bytes are kept from the forward for the backward, which
#: otherwise waits for them again.
KEPT_BYTES = 256 << 20


def gathered_forward(
    call: Call, inputs: Inputs, carrier: Carrier
) -> tuple[Result, list[Tensor] | None]:
    """``out [B, T_local, H, Dv]``, in the inputs' dtype or wider, and ``lse [B, H, T_local]``.

    And the gathered keys, if they are few enough to be kept for the backward.
    """
    in_one = call.kernel.capabilities.bands == "any"
    gather = call.plan.gather(call.ring.rank, own=in_one)
    arriving = carrier.fetch(gather, inputs)
    columns = _columns(call, gather, carrier.keys, arriving.tensors)
    forward = _in_one_launch if in_one else _in_two_stages
    result = forward(call, inputs, gather, columns, arriving)
    arriving.finish()
    return result, arriving.tensors if keeps_gathered(call, carrier.keys) else None


def keeps_gathered(call: Call, keys: Keys) -> bool:
    """Whether the forward leaves the keys it gathered to the backward."""
    longest = max(call.plan.gather(rank).length for rank in range(call.ring.size))
    in_one = call.kernel.capabilities.bands == "any"
    return in_one and call.needs_grad and keys.size(longest) <= KEPT_BYTES


def _in_one_launch(
    call: Call, inputs: Inputs, gather: Gather, columns: Columns, arriving: Arriving
) -> Result:
    """Every row sees all its keys in one launch: nothing to merge."""
    rows = call.rows(inputs)
    whole = _unseen(call, gather, inputs)
    for item, needs in zip(gather.items, gather.needs, strict=True):
        arriving.wait(needs)
        if rows.q.shape[0] == 0:
            break
        part = rows.take(item.q_slice), columns.take(item.k_slice)
        place = whole.take(item.q_slice)
        result = call.kernel.attend(*part, item, call.params, place)
        if (
            result.out.dtype != whole.out.dtype
        ):  # a wider kernel: its results are rounded at the end
            whole = Result(whole.out.to(result.out.dtype), whole.lse.to(result.lse.dtype))
            place = whole.take(item.q_slice)
        if result.out.data_ptr() != place.out.data_ptr():
            place.out.copy_(result.out)
            place.lse.copy_(result.lse)
    return whole


def _in_two_stages(
    call: Call, inputs: Inputs, gather: Gather, columns: Columns, arriving: Arriving
) -> Result:
    """The own keys while the others' arrive, then these: for kernels that know no band."""
    rows, rank = call.rows(inputs), call.ring.rank
    into = empty_result(rows.q, inputs.v.shape[3])
    own = call.columns(rank, keys_of(inputs))
    work = [(own, item, 0) for item in call.plan.items(rank, 0)]
    work += [(columns, *each) for each in zip(gather.items, gather.needs, strict=True)]
    for keys, item, needs in work:
        arriving.wait(needs)
        if rows.q.shape[0] > 0:
            part = rows.take(item.q_slice), keys.take(item.k_slice)
            call.kernel.forward(*part, item, call.params, into.take(item.q_slice))
    return into


def gathered_backward(
    call: Call, inputs: Inputs, upstream: Upstream, carrier: Carrier, kept: list[Tensor] | None
) -> Grads:
    """Gradients of this rank's shards; ``kept`` are the keys that the forward gathered, if any."""
    if call.kernel.capabilities.bands == "any":
        return _back_in_one_launch(call, inputs, upstream, carrier, kept)
    return _back_in_two_stages(call, inputs, upstream, carrier)


def _back_in_one_launch(
    call: Call, inputs: Inputs, upstream: Upstream, carrier: Carrier, kept: list[Tensor] | None
) -> Grads:
    """The launches of the forward in reverse, the longest first.

    Its keys' gradients that the last launch leaves alone travel home beside it.
    """
    gather, rows, keys = call.plan.gather(call.ring.rank), call.rows(inputs), carrier.keys
    arriving = Arriving.done(kept) if kept else carrier.fetch(gather, inputs)
    columns = _columns(call, gather, keys, arriving.tensors)
    parts = _parts(call, inputs)
    sums = Sums(keys, by_head=parts is not None)
    grads = carrier.accumulator(gather, sums)
    whole = len(gather.items) > 0 and gather.items[-1].k_slice == slice(0, gather.length)
    if parts is not None or not whole:
        grads.zero_()
    rows_grads = RowGrads(_dq(call, gather, rows), _dbias(call, rows))
    arriving.finish()
    travelling = []
    items = gather.items if rows.q.shape[0] > 0 else ()
    for n, item in reversed(list(enumerate(items))):
        if n == 0:
            travelling.append(carrier.send_home(gather, sums, grads, early=True))
        part = rows.take(item.q_slice), columns.take(item.k_slice), upstream.take(item.q_slice)
        into = rows_grads.take(item.q_slice), sums.of(grads, gather.length, item.k_slice)
        if parts is not None:
            parts.add_sums(*part, item, call.params, into[0].dq, into[1])
        else:
            result = call.kernel.gradients(*part, item, call.params)
            _put(result, *into, fresh=whole and n == len(items) - 1)
    if not items:
        travelling.append(carrier.send_home(gather, sums, grads, early=True))
    travelling.append(carrier.send_home(gather, sums, grads, early=False))
    dk, dv = _home(call, gather, sums, grads, travelling, parts)
    return Grads(rows_grads.dq, dk, dv, rows_grads.dbias)


def _home(
    call: Call, gather: Gather, sums: Sums, grads: Tensor, travelling: Sequence[Returning],
    parts: Parts | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Add what comes home to the own sums where they lie, and round them: ``(dk, dv)``."""
    keys, length = sums.keys, gather.length
    own = [one for one in gather.fetches if one.rank == call.ring.rank]
    if sum(one.source.stop - one.source.start for one in own) < keys.length:
        # Some of the own keys only others see: make room for all.
        grads, own, length = _room(call, sums, grads, own, length), [_all(keys)], keys.length

    def where(source: slice) -> slice:
        one = next(x for x in own if x.source.start <= source.start < x.source.stop)
        by = one.target.start - one.source.start
        return slice(source.start + by, source.stop + by)

    for returning in travelling:
        returning.add_to(grads, length, where)
    shape = (keys.batch, keys.length, keys.heads)
    dk, dv = (
        torch.empty(*shape, dim, dtype=call.dtype, device=call.device)
        for dim in (keys.dim, keys.v_dim)
    )
    for one in own:
        mine = sums.of(grads, length, one.target)
        places = dk[:, one.source], dv[:, one.source]
        if parts is not None:
            parts.round(mine, places, call.params)
        else:
            for place, x in zip(places, mine, strict=True):
                place.copy_(x)
    return dk, dv


def _room(call: Call, sums: Sums, grads: Tensor, own: Sequence[Fetch], length: int) -> Tensor:
    """The sums of all of this rank's keys, so far as they are its own work."""
    home = torch.zeros(sums.numel(sums.keys.length), dtype=call.wide, device=call.device)
    for one in own:
        places = sums.parts(home, sums.keys.length, one.source)
        for place, part in zip(places, sums.parts(grads, length, one.target), strict=True):
            place.copy_(part)
    return home


def _all(keys: Keys) -> Fetch:
    """All of a rank's own keys, where they are."""
    return Fetch(-1, slice(0, keys.length), slice(0, keys.length))


def _parts(call: Call, inputs: Inputs) -> Parts | None:
    """The kernel's backward by parts, if it has one that can run this call."""
    parts = call.kernel.parts
    if parts is None or not parts.can_sum(call.plan, inputs.q, inputs.k, inputs.v, call.params):
        return None
    return parts


def _dq(call: Call, gather: Gather, rows: Rows) -> Tensor:
    """Room for dQ; rows that see nothing have none. Every row is in one launch: no sums."""
    dtype = call.wide if call.kernel.needs_delta else call.dtype
    dq = torch.empty(rows.q.shape, dtype=dtype, device=call.device)
    return dq if gather.num_rows == rows.q.shape[1] else dq.zero_()


def _dbias(call: Call, rows: Rows) -> Tensor | None:
    if rows.bias is None:
        return None
    return torch.zeros_like(rows.bias, dtype=call.wide)


def _put(
    result: ItemGrads, row_grads: RowGrads, sums: tuple[Tensor, Tensor], *, fresh: bool
) -> None:
    """Put an item's gradients in their places; ``fresh`` sums hold no numbers yet."""
    row_grads.dq.copy_(result.dq)
    if row_grads.dbias is not None and result.dbias is not None:
        row_grads.dbias.add_(result.dbias)
    for total, part in zip(sums, (result.dk, result.dv), strict=True):
        if fresh:
            total.copy_(part)
        else:
            total.add_(part)


def _back_in_two_stages(call: Call, inputs: Inputs, upstream: Upstream, carrier: Carrier) -> Grads:
    """The others' keys, and then the own ones while the others' gradients travel home."""
    plan, rank, keys = call.plan, call.ring.rank, carrier.keys
    gather, rows, sums = plan.gather(rank, own=False), call.rows(inputs), Sums(keys, by_head=False)
    row_grads = zero_row_grads(call, rows)
    arriving = carrier.fetch(gather, inputs)
    home = torch.zeros(sums.numel(keys.length), dtype=call.wide, device=call.device)
    others = carrier.accumulator(gather, sums).zero_()
    columns = _columns(call, gather, keys, arriving.tensors)
    arriving.finish()

    def differentiate(of: Columns, item: WorkItem, dk: Tensor, dv: Tensor) -> None:
        if rows.q.shape[0] > 0:
            part = rows.take(item.q_slice), of.take(item.k_slice), upstream.take(item.q_slice)
            into = row_grads.take(item.q_slice), ColumnGrads(dk, dv)
            call.kernel.backward(*part, item, call.params, *into)

    for item in gather.items:
        differentiate(columns, item, *sums.of(others, gather.length, item.k_slice))
    returning = carrier.send_home(gather, sums, others)
    for item in plan.items(rank, 0):
        own = call.columns(rank, keys_of(inputs))
        differentiate(own, item, *sums.of(home, keys.length, item.k_slice))
    returning.add_to(home, keys.length, lambda source: source)
    return Grads(row_grads.dq, *sums.views(home, keys.length), row_grads.dbias)


def _columns(call: Call, gather: Gather, keys: Keys, tensors: Sequence[Tensor]) -> Columns:
    """The keys of the buffer and all that belongs to them."""
    position = None
    if call.needs_index:
        position = torch.as_tensor(gather.positions, device=call.device)
    return Columns(*keys.split(tensors[0]), position, tensors[1] if keys.segments else None)


def _unseen(call: Call, gather: Gather, inputs: Inputs) -> Result:
    """Room for all rows, of which those that no item covers see nothing."""
    batch, length, heads, _ = inputs.q.shape
    out = inputs.q.new_empty(batch, length, heads, inputs.v.shape[3])
    lse = torch.empty(batch, heads, length, dtype=call.wide, device=out.device)
    if gather.num_rows < length:
        out.zero_()
        lse.fill_(-torch.inf)
    return Result(out, lse)
