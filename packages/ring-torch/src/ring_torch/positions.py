"""Positions of tokens in the whole sequence, on a device and on the host, cached by plan.

Without the cache each call would copy them from the host, and wait for the work queued on the GPU.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ring_core import GatherProgram, Plan
from ring_core.base.arguments import Ints
from ring_core.triton.tile_configs import positions_aligned8
from ring_torch.capture import capture_safe_cache
from ring_torch.records import PositionRun, runs_of


def on_device(array: Ints, device: torch.device) -> Tensor:
    """Copy an array to a device behind the work that is queued there, without waiting for it."""
    # CUDA reads pageable memory before it returns, so the array may be freed at once.
    return torch.as_tensor(array, device="cpu").to(device, non_blocking=True)


@capture_safe_cache(maxsize=16)  # few, as each takes megabytes for a long sequence
def query_positions(
    plan: Plan, rank: int, device: torch.device
) -> tuple[Tensor, Tensor, tuple[PositionRun, ...]]:
    """Return the index of each query of a rank, its position, and the runs of the positions.

    Indices count queries, positions count keys, which differs if there are more keys than queries:
    int64 ``[n]`` each.
    """
    positions = plan.q_positions(rank)
    index = torch.as_tensor(plan.positions(rank), device=device)
    return index, torch.as_tensor(positions, device=device), runs_of(positions)


@capture_safe_cache(maxsize=64)  # more, as rings ask for those of all ranks
def key_positions(
    keys: Plan | GatherProgram, rank: int, device: torch.device
) -> tuple[Tensor, bool, tuple[PositionRun, ...]]:
    """Return the positions of a rank's keys or, of a program, of those that it gathers.

    Beside them, int64 ``[m]``, are :attr:`KeyBlock.aligned8` and the runs of the positions.
    """
    positions = keys.positions if isinstance(keys, GatherProgram) else keys.k_positions(rank)
    return (
        torch.as_tensor(positions, device=device),
        positions_aligned8(positions),
        runs_of(positions),
    )


@capture_safe_cache(maxsize=16)  # few, as each takes megabytes for a long sequence
def visible_spans(
    plan: Plan, rank: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the spans of keys that a rank's queries see: ``(start, stop)``, int32 ``[n]`` each.

    Bands, chunks and documents show each query one run of consecutive keys, ``start <= j < stop``.
    Predicates are left out. ``None`` stands for the first key of the sequence, or for its end, for
    all queries.
    """
    mask, length, positions = plan.mask, plan.kv_seq_len, plan.q_positions(rank)
    # The band's limits first, then those of the chunk or document that each query is in.
    left, right = mask.band
    start = np.zeros_like(positions) if left is None else positions - left
    stop = np.full_like(positions, length) if right is None else positions + right + 1
    cuts = mask.boundaries(int(positions.min()), max(length, int(positions.max()) + 1))
    if cuts is not None:
        cell = np.searchsorted(cuts, positions, side="right")
        start = np.maximum(start, np.append(0, cuts)[cell])
        stop = np.minimum(stop, np.append(cuts, length)[cell])
    start, stop = start.clip(0, length), stop.clip(0, length)
    first, end = (
        torch.as_tensor(side.astype(np.int32), device=device) if is_needed else None
        for side, is_needed in ((start, start.any()), (stop, (stop < length).any()))
    )
    return first, end
