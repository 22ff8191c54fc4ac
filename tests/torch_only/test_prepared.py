"""Launches of kernels that cannot prepare any are asked for once, and not during a capture."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ring_core import WorkItem
from ring_torch import prepare, records, ring_attention
from ring_torch.kernels.api import Selection
from ring_torch.kernels.eager import EagerKernel
from ring_torch.launches.cache import keep
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    Grads,
    KernelParams,
    KeyBlock,
    QueryBlock,
)
from ring_torch.strategies import gather, prepared_ring, ring, single, two_stage

CALLS = 4
STRATEGIES: tuple[ModuleType, ...] = (gather, ring, single, two_stage)


class Unprepared(EagerKernel):
    """A kernel that may prepare launches, and never does."""

    prepares = True

    def __init__(self) -> None:
        self.asked = {"forward": 0, "backward": 0, "partial": 0}

    def attend(
        self, rows: QueryBlock, columns: KeyBlock, item: WorkItem, params: KernelParams,
        out: AttentionState | None = None,
    ) -> AttentionState:  # fmt: skip
        """Write results where they are wanted, as kernels do whose launches can be prepared."""
        result = super().attend(rows, columns, item, params)
        if out is None:
            return result
        for target, x in zip(out, result, strict=True):
            target.copy_(x)
        return out

    def prepare_forward(self, *_: Any) -> None:
        """Return no launch."""
        self.asked["forward"] += 1

    def prepare_backward(self, *_: Any) -> None:
        """Return no launch."""
        self.asked["backward"] += 1

    def prepare_partial(self, *_: Any) -> None:
        """Return no launches."""
        self.asked["partial"] += 1


class WithoutDelta(Unprepared):
    """A kernel whose backward computes delta itself, so that it may be prepared."""

    needs_delta = False

    def grads(
        self, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, item: WorkItem,
        params: KernelParams, out: Tensor | None = None,
    ) -> Grads:  # fmt: skip
        """Compute delta first, as kernels do that need none."""
        delta = (upstream.dout * upstream.out).sum(dim=-1).transpose(1, 2)
        return super().grads(rows, columns, upstream._replace(delta=delta), item, params, out)


class OfCausalBands(Unprepared):
    """A kernel that gathers in two stages."""

    capabilities = replace(EagerKernel.capabilities, bands="causal")


def asked(
    rank: int, size: int, strategy: str, kernel: Unprepared, captures: bool
) -> tuple[dict[str, int], int]:
    """Return how often launches were asked for in some calls, and tensors made for that."""
    made: list[object] = []
    group: Any = None
    if size == 1:
        group = torch.distributed.new_group([rank], use_local_synchronization=True)

    def unseen_state(*args: Any, **options: Any) -> Any:
        made.append(args)
        return trial(*args, **options)

    trial = records.unseen_state
    prepare._prepare.cache_clear()
    with ExitStack() as stack:
        stack.enter_context(patch.object(prepare, "choose", lambda *_: Selection(kernel, ())))
        stack.enter_context(patch.object(prepared_ring, "unseen_state", unseen_state))
        for module in STRATEGIES:
            stack.enter_context(patch.object(module, "is_capturing", lambda: captures))
        for _ in range(CALLS):
            q, k, v = (torch.randn(1, 32, n, 8).requires_grad_() for n in (4, 2, 2))
            out = ring_attention(
                q, k, v, group=group, causal=True, layout="zigzag", strategy=strategy
            )
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    prepare._prepare.cache_clear()
    return kernel.asked, len(made)


#: Ranks, strategy and kernel, and which launches are asked for.
WAYS = {
    "single": (1, "auto", Unprepared, {"forward": 1, "backward": 0, "partial": 0}),
    "ring": (2, "ring", Unprepared, {"forward": 1, "backward": 0, "partial": 0}),
    "gather": (2, "gather", WithoutDelta, {"forward": 1, "backward": 1, "partial": 0}),
    "two stages": (2, "gather", OfCausalBands, {"forward": 0, "backward": 0, "partial": 1}),
}


def test_a_full_cache_loses_its_oldest() -> None:
    kept: dict[object, int | None] = {}
    for key in range(20):
        keep(kept, key, None if key % 2 else key)
    assert kept == {key: None if key % 2 else key for key in range(4, 20)}


@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_is_asked_once(way: str, backend: Any) -> None:
    size, strategy, kernel, expected = WAYS[way]
    for counts, made in backend.pool(2).run(asked, size, strategy, kernel(), False):
        assert counts == expected
        assert made == int(way == "ring")


@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_is_not_asked_while_a_graph_is_captured(way: str, backend: Any) -> None:
    size, strategy, kernel, _ = WAYS[way]
    for counts, made in backend.pool(2).run(asked, size, strategy, kernel(), True):
        assert set(counts.values()) == {0}
        assert made == 0
