"""Gathered K/V that a forward saves for its backward, in every strategy that gathers."""

from __future__ import annotations

import torch

from ring_core import GatherProgram, longest_gather
from ring_torch.call import Resolution, Shapes
from ring_torch.payload import KVPayload

#: Gathered keys of up to this many bytes are kept from the forward for the backward, which
#: otherwise fetches them again.
MAX_SAVED_BYTES = 256 << 20


def saves_keys(resolution: Resolution, gather: GatherProgram) -> bool:
    """Return True if the forward saves the gathered K/V, which all ranks decide alike."""
    plan, sizes = resolution.program.plan, resolution.sizes
    width = sizes.kv_heads * (sizes.head_dim + sizes.v_head_dim)
    token = width * resolution.itemsize + (4 if resolution.segment_ids else 0)
    longest = longest_gather(plan, splits=gather.splits, tile=gather.tile).length
    return resolution.request.grad and sizes.batch * longest * token <= MAX_SAVED_BYTES


def saved_key_shapes(gather: GatherProgram, keys: KVPayload, *, groups: int) -> Shapes:
    """Return the shapes and dtypes of the K/V that a forward saves, group by group."""
    length = gather.length
    kv: Shapes = [((keys.batch, length, keys.width), keys.dtype)]
    ids: Shapes = [((keys.batch, length), torch.int32)] if keys.segments else []
    return (kv + ids) * groups
