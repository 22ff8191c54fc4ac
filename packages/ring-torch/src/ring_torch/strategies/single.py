"""One rank alone: one launch a pass and nothing to add up, so a call costs what its kernel does."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ring_core import WorkItem
from ring_torch.call import Call
from ring_torch.payload import keys_of
from ring_torch.records import AttentionState, BackwardInputs, Grads, Inputs


def only_item(call: Call, inputs: Inputs) -> WorkItem | None:
    """The one launch of a call, if it is of one rank, and all that there is to do."""
    in_one = call.ring.size == 1 and call.kernel.capabilities.bands == "any"
    if not in_one or inputs.q.shape[0] == 0:
        return None
    items = [item for step in range(call.plan.num_steps) for item in call.plan.items(0, step)]
    if len(items) != 1 or (inputs.sinks is not None and not _adds_sinks(call, inputs, items[0])):
        return None
    return items[0]


def _adds_sinks(call: Call, inputs: Inputs, item: WorkItem) -> bool:
    """Whether the launch adds the sinks: every row sees something then, as nothing is masked.

    Otherwise they are added to a result in the accumulators' dtype, which launches alone do not
    write.
    """
    banded = inputs.q_ids is None and item.cu_q is None and item.tiles is None
    whole = item.q_stop - item.q_start == inputs.q.shape[1]
    return call.kernel.adds_sinks and banded and whole


def single_forward(call: Call, inputs: Inputs, item: WorkItem) -> AttentionState:
    """``out [B, T, H, Dv]``, in the inputs' dtype or wider, ``lse [B, H, T]``; sinks included."""
    rows, columns = call.rows(inputs), call.columns(0, keys_of(inputs))
    batch, length, heads, _ = rows.q.shape
    out = rows.q.new_empty(batch, length, heads, inputs.v.shape[3])
    lse = torch.empty(batch, heads, length, dtype=call.acc_dtype, device=call.device)
    is_whole = item.q_stop - item.q_start == length
    if not is_whole:  # the other rows see nothing
        out.zero_()
        lse.fill_(-torch.inf)
    whole = AttentionState(out, lse)
    place, part = whole.take(item.q_slice), rows.take(item.q_slice)
    params = call.params
    if inputs.sinks is not None:
        params = replace(params, sinks=folded(inputs.sinks, torch.float32))
    result = call.kernel.attend(part, columns.take(item.k_slice), item, params, place)
    if is_whole:
        return result
    whole = AttentionState(out.to(result.out.dtype), lse.to(result.lse.dtype))
    for mine, found in zip(whole.take(item.q_slice), result, strict=True):
        if mine.data_ptr() != found.data_ptr():
            mine.copy_(found)
    return whole


def folded(sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """Sinks ``[H]`` or ``[H, n]`` as one a head."""
    sinks = sinks.to(dtype)
    return sinks if sinks.ndim == 1 else sinks.logsumexp(dim=1)


def single_backward(call: Call, inputs: Inputs, upstream: BackwardInputs, item: WorkItem) -> Grads:
    """Gradients of all inputs, in the inputs' dtype or wider."""
    rows, columns = call.rows(inputs), call.columns(0, keys_of(inputs))
    part = rows.take(item.q_slice), columns.take(item.k_slice), upstream.take(item.q_slice)
    found = call.kernel.gradients(*part, item, call.params)
    dbias = found.dbias
    if dbias is not None and rows.bias is not None:
        dbias = _whole(dbias, rows.bias, item.q_slice, dim=2)
    return Grads(
        _whole(found.dq, inputs.q, item.q_slice, dim=1),
        _whole(found.dk, inputs.k, item.k_slice, dim=1),
        _whole(found.dv, inputs.v, item.k_slice, dim=1),
        dbias,
    )


def _whole(part: Tensor, like: Tensor, span: slice, *, dim: int) -> Tensor:
    """A gradient of some rows or columns, with zeros for the others."""
    if part.shape[dim] == like.shape[dim]:
        return part
    whole = torch.zeros_like(like, dtype=part.dtype, memory_format=torch.contiguous_format)
    whole.narrow(dim, span.start, span.stop - span.start).copy_(part)
    return whole
