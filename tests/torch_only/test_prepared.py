"""A kernel that prepares no launches is asked for them once."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from ring_core import WorkItem
from ring_torch import prepare, records, ring_attention
from ring_torch.kernels.api import Selection
from ring_torch.kernels.eager import EagerKernel
from ring_torch.records import AttentionState, KernelParams, KeyBlock, QueryBlock
from ring_torch.strategies import prepared_ring

CALLS = 4


class Unprepared(EagerKernel):
    """A kernel that declares ``prepares`` but returns no prepared launch."""

    prepares = True

    def __init__(self) -> None:
        self.asked = 0

    def attend(
        self, rows: QueryBlock, columns: KeyBlock, item: WorkItem, params: KernelParams,
        out: AttentionState | None = None,
    ) -> AttentionState:  # fmt: skip
        """Write results into ``out`` if it is given, as kernels with prepared launches do."""
        result = super().attend(rows, columns, item, params)
        if out is None:
            return result
        for target, x in zip(out, result, strict=True):
            target.copy_(x)
        return out

    def prepare_forward(self, *_: Any) -> None:
        """Return no prepared launch."""
        self.asked += 1


def asked(rank: int, size: int, strategy: str) -> tuple[list[int], int]:
    """Return how often launches were asked for by each call's end, and the states made for it."""
    kernel, made = Unprepared(), list[object]()
    group: Any = None
    if size == 1:
        group = torch.distributed.new_group([rank], use_local_synchronization=True)

    def unseen_state(*args: Any, **options: Any) -> Any:
        made.append(args)
        return trial(*args, **options)

    trial = records.unseen_state
    counts = []
    prepare._prepare.cache_clear()
    with (
        patch.object(prepare, "choose", lambda *_: Selection(kernel, ())),
        patch.object(prepared_ring, "unseen_state", unseen_state),
    ):
        for _ in range(CALLS):
            q, k, v = (torch.randn(1, 32, heads, 8) for heads in (4, 2, 2))
            ring_attention(q, k, v, group=group, causal=True, layout="zigzag", strategy=strategy)
            counts.append(kernel.asked)
    prepare._prepare.cache_clear()
    return counts, len(made)


@pytest.mark.parametrize(("size", "strategy"), [(1, "auto"), (2, "ring"), (2, "gather")])
def test_a_kernel_is_asked_once(size: int, strategy: str, backend: Any) -> None:
    for counts, made in backend.pool(2).run(asked, size, strategy):
        assert counts == [1] * CALLS
        assert made == (strategy == "ring")
