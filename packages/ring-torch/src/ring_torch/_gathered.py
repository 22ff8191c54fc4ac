"""The loops over gathered keys: fetch all a rank needs, call a kernel for each run of queries.

Every row sees its keys in one launch, as on one device, and what the first launch needs is fetched
first; so a result has one device's rounding. Kernels that know no band take two stages: the own
block, and full rectangles of the others' keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ring_core import Gather, WorkItem
from ring_torch._backward import Grads, zero_row_grads
from ring_torch._call import Call, Inputs, keys_of
from ring_torch._gather import Arriving, Carrier
from ring_torch._keys import Keys
from ring_torch.kernels._api import (
    ColumnGrads,
    Columns,
    ItemGrads,
    Result,
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
    longest = max(call.plan.gather(rank).length for rank in range(call.ring.size))
    keeps = in_one and call.needs_grad and carrier.keys.size(longest) <= KEPT_BYTES
    return result, arriving.tensors if keeps else None


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
    grads = carrier.accumulator(gather)
    dq: Tensor | None = None
    dbias = None if rows.bias is None else torch.zeros_like(rows.bias, dtype=call.wide)
    arriving.finish()
    travelling = []
    items = gather.items if rows.q.shape[0] > 0 else ()
    for n, item in reversed(list(enumerate(items))):
        if n == 0:
            travelling.append(carrier.send_home(gather, grads, early=True))
        part = rows.take(item.q_slice), columns.take(item.k_slice), upstream.take(item.q_slice)
        result = call.kernel.gradients(*part, item, call.params)
        _put(keys, grads, result, item, first=n == len(items) - 1)
        if dbias is not None and result.dbias is not None:
            dbias[:, :, item.q_slice].add_(result.dbias)
        if dq is None and result.dq.shape == rows.q.shape:
            dq = result.dq
        else:
            dq = rows.q.new_zeros(rows.q.shape, dtype=result.dq.dtype) if dq is None else dq
            dq[:, item.q_slice].copy_(result.dq)
    if not items:
        travelling.append(carrier.send_home(gather, grads, early=True))
    travelling.append(carrier.send_home(gather, grads, early=False))
    home = _zeros(call, keys)
    for one in gather.fetches:
        if one.rank == call.ring.rank:
            home[:, one.source].copy_(grads[:, one.target])
    for returning in travelling:
        returning.add_to(home)
    return Grads(torch.zeros_like(rows.q) if dq is None else dq, *keys.split(home), dbias)


def _put(keys: Keys, grads: Tensor, result: ItemGrads, item: WorkItem, *, first: bool) -> None:
    """Add an item's gradients to those of its columns; the first finds no numbers there."""
    covers = item.k_stop - item.k_start == grads.shape[1]
    if first and not covers:
        grads.zero_()
    for total, part in zip(keys.split(grads[:, item.k_slice]), result[1:3], strict=True):
        if first and covers:
            total.copy_(part)
        else:
            total.add_(part)


def _zeros(call: Call, keys: Keys) -> Tensor:
    """Gradients of the own keys and values, of which nothing is known yet."""
    shape = (keys.batch, keys.length, keys.width)
    return torch.zeros(shape, dtype=call.wide, device=call.device)


def _back_in_two_stages(call: Call, inputs: Inputs, upstream: Upstream, carrier: Carrier) -> Grads:
    """The others' keys, and then the own ones while the others' gradients travel home."""
    plan, rank, keys = call.plan, call.ring.rank, carrier.keys
    gather, rows = plan.gather(rank, own=False), call.rows(inputs)
    row_grads = zero_row_grads(call, rows)
    arriving = carrier.fetch(gather, inputs)
    home, others = _zeros(call, keys), carrier.accumulator(gather).zero_()
    columns = _columns(call, gather, keys, arriving.tensors)
    arriving.finish()

    def differentiate(of: Columns, item: WorkItem, grads: Tensor) -> None:
        if rows.q.shape[0] > 0:
            part = rows.take(item.q_slice), of.take(item.k_slice), upstream.take(item.q_slice)
            totals = ColumnGrads(*keys.split(grads[:, item.k_slice]))
            call.kernel.backward(*part, item, call.params, row_grads.take(item.q_slice), totals)

    for item in gather.items:
        differentiate(columns, item, others)
    returning = carrier.send_home(gather, others)
    for item in plan.items(rank, 0):
        differentiate(call.columns(rank, keys_of(inputs)), item, home)
    returning.add_to(home)
    return Grads(row_grads.dq, *keys.split(home), row_grads.dbias)


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
