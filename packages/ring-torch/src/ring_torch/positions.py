"""Positions of tokens in the whole sequence, on a device and on the host, cached by plan.

Without the cache each call would copy them from the host, and wait for the work queued on the GPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ring_core import GatherProgram, Plan
from ring_core.base.arguments import Ints
from ring_torch.capture import capture_safe_cache
from ring_torch.records import PositionRun, runs_of


def on_device(array: Ints, device: torch.device) -> Tensor:
    """Copy an array to a device behind the work that is queued there, without waiting for it."""
    # CUDA reads pageable memory before it returns, so the array may be freed at once.
    return torch.as_tensor(array, device="cpu").to(device, non_blocking=True)


@capture_safe_cache(maxsize=16)  # few, as each takes megabytes for a long sequence
def positions_of(plan: Plan, rank: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's indices of queries, positions of queries and positions of keys, int64 each.

    Indices count queries in their sequence. Positions of queries count in the sequence of keys.
    """
    index, q_pos, k_pos = (
        torch.as_tensor(positions(rank), device=device)
        for positions in (plan.positions, plan.q_positions, plan.k_positions)
    )
    return index, q_pos, k_pos


@capture_safe_cache(maxsize=16)  # few, as each takes megabytes for a long sequence
def gathered_positions(gather: GatherProgram, device: torch.device) -> Tensor:
    """Return the positions of the keys that a rank gathers, int64."""
    return torch.as_tensor(gather.positions, device=device)


class Spans(NamedTuple):
    """Spans of keys that each query sees: keys ``start <= j < stop``.

    Bands, chunks and documents show each query one run of consecutive keys. Predicates are left
    out. ``None`` stands for the first key of the sequence, or for its end, for all queries.

    Attributes:
        start: First key of each query, int32 ``[n]``, or ``None``.
        stop: End of each query's keys, int32 ``[n]``, or ``None``.
    """

    start: Tensor | None  # int32 [n]
    stop: Tensor | None  # int32 [n]


@capture_safe_cache(maxsize=16)  # few, as each takes megabytes for a long sequence
def visible_spans(plan: Plan, rank: int, device: torch.device) -> Spans:
    """Return the spans of keys that a rank's queries see."""
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
    return Spans(*(
        torch.as_tensor(side.astype(np.int32), device=device) if is_needed else None
        for side, is_needed in ((start, start.any()), (stop, (stop < length).any()))
    ))  # fmt: skip


@lru_cache(maxsize=256)
def query_runs(plan: Plan, rank: int) -> tuple[PositionRun, ...]:
    """Return the runs of consecutive positions among a rank's queries."""
    return runs_of(plan.q_positions(rank))


@lru_cache(maxsize=256)
def key_runs(plan: Plan, rank: int) -> tuple[PositionRun, ...]:
    """Return the runs of consecutive positions among a rank's keys."""
    return runs_of(plan.k_positions(rank))


@lru_cache(maxsize=64)
def gathered_runs(gather: GatherProgram) -> tuple[PositionRun, ...]:
    """Return the runs of consecutive positions among the keys that a rank gathers."""
    return runs_of(gather.positions)
