"""The loops over gathered keys: fetch all a rank needs, call a kernel for each run of queries.

Every row sees its keys in one launch, as on one device, and what the first launch needs is fetched
first; so a result has one device's rounding. Kernels that know no band take two stages: the own
block, and full rectangles of the others' keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ring_core import Gather, WorkItem
from ring_torch._backward import Grads, zero_row_grads
from ring_torch._call import Call, Inputs, keys_of
from ring_torch._gather import Arriving, Carrier
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
    arriving = carrier.fetch(gather, keys_of(inputs))
    columns = _columns(call, gather, arriving.tensors)
    forward = _in_one_launch if in_one else _in_two_stages
    result = forward(call, inputs, gather, columns, arriving)
    arriving.finish()
    keeps = in_one and _largest(call, arriving.tensors) <= KEPT_BYTES
    return result, arriving.tensors if keeps else None


def _largest(call: Call, tensors: Sequence[Tensor]) -> int:
    """Bytes of the gathered keys on the rank that needs most: equal on all."""
    length = max(call.plan.gather(rank).length for rank in range(call.ring.size))
    shapes = ((x.shape[0], length, *x.shape[2:]) for x in tensors)
    sizes = zip(shapes, tensors, strict=True)
    return sum(math.prod(shape) * x.element_size() for shape, x in sizes)


def _in_one_launch(
    call: Call, inputs: Inputs, gather: Gather, columns: Columns, arriving: Arriving
) -> Result:
    """Every row sees all its keys in one launch: nothing to merge."""
    rows = call.rows(inputs)
    batch, length = rows.q.shape[:2]
    whole: Result | None = None
    for item, needs in zip(gather.items, gather.needs, strict=True):
        arriving.wait(needs)
        if batch == 0:
            break
        part = rows.take(item.q_slice), columns.take(item.k_slice)
        result = call.kernel.attend(*part, item, call.params)
        if item.q_stop - item.q_start == length:
            return result
        whole = whole or _unseen(gather, inputs, result)
        place = whole.take(item.q_slice)
        place.out.copy_(result.out)
        place.lse.copy_(result.lse)
    return whole or empty_result(rows.q, inputs.v.shape[3])


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
    gather, rows = call.plan.gather(call.ring.rank), call.rows(inputs)
    arriving = Arriving.done(kept) if kept else carrier.fetch(gather, keys_of(inputs))
    columns = _columns(call, gather, arriving.tensors)
    grads = ColumnGrads(*carrier.accumulators(gather))
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
        _put(grads, result, item, first=n == len(items) - 1)
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
    home = _own(call, gather, grads, inputs)
    for returning in travelling:
        returning.add_to(home)
    return Grads(torch.zeros_like(rows.q) if dq is None else dq, *home, dbias)


def _put(grads: ColumnGrads, result: ItemGrads, item: WorkItem, *, first: bool) -> None:
    """Add an item's gradients to those of its columns; the first finds no numbers there."""
    for total, part in zip(grads, (result.dk, result.dv), strict=True):
        place = total[:, item.k_slice]
        if first and place.shape == total.shape:
            total.copy_(part)
            continue
        if first:
            total.zero_()
        place.add_(part)


def _own(call: Call, gather: Gather, grads: ColumnGrads, inputs: Inputs) -> ColumnGrads:
    """This rank's own keys' gradients, so far as they are its own work."""
    home = ColumnGrads(*(torch.zeros_like(x, dtype=call.wide) for x in (inputs.k, inputs.v)))
    for one in gather.fetches:
        if one.rank == call.ring.rank:
            for total, part in zip(home, grads, strict=True):
                total[:, one.source].copy_(part[:, one.target])
    return home


def _back_in_two_stages(call: Call, inputs: Inputs, upstream: Upstream, carrier: Carrier) -> Grads:
    """The others' keys, and then the own ones while the others' gradients travel home."""
    plan, rank = call.plan, call.ring.rank
    gather, rows, keys = plan.gather(rank, own=False), call.rows(inputs), keys_of(inputs)
    row_grads = zero_row_grads(call, rows)
    arriving = carrier.fetch(gather, keys)
    home = ColumnGrads(*(torch.zeros_like(x, dtype=call.wide) for x in keys[:2]))
    others = ColumnGrads(*(x.zero_() for x in carrier.accumulators(gather)))
    columns, own = _columns(call, gather, arriving.tensors), call.columns(rank, keys)
    work = [(columns, item, others) for item in gather.items]
    work += [(own, item, home) for item in plan.items(rank, 0)]
    arriving.finish()
    returning = None
    for of, item, grads in work:
        if grads is home and returning is None:
            returning = carrier.send_home(gather, others)
        if rows.q.shape[0] > 0:
            part = rows.take(item.q_slice), of.take(item.k_slice), upstream.take(item.q_slice)
            totals = row_grads.take(item.q_slice), grads.take(item.k_slice)
            call.kernel.backward(*part, item, call.params, *totals)
    (returning or carrier.send_home(gather, others)).add_to(home)
    return Grads(row_grads.dq, home.dk, home.dv, row_grads.dbias)


def _columns(call: Call, gather: Gather, tensors: Sequence[Tensor]) -> Columns:
    """The keys of the buffer and all that belongs to them."""
    position = None
    if call.needs_index:
        position = torch.as_tensor(gather.positions, device=call.device)
    segments = tensors[2] if len(tensors) > 2 else None
    return Columns(tensors[0], tensors[1], position, segments)


def _unseen(gather: Gather, inputs: Inputs, like: Result) -> Result:
    """Room for all rows, of which those that no item covers see nothing."""
    batch, length, heads, _ = inputs.q.shape
    out = like.out.new_empty(batch, length, heads, inputs.v.shape[3])
    lse = like.lse.new_empty(batch, heads, length)
    if gather.num_rows < length:
        out.zero_()
        lse.fill_(-torch.inf)
    return Result(out, lse)
