"""Calls in CUDA graphs: the same results as without, whatever runs before, between and after."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_core import StrategyConfig
from ring_core.base.config import OUTER_NAMES
from ring_torch import ContextParallel
from ring_torch.local import LocalRanks
from ring_torch.transports import symm_buffer

LENGTH, HEADS, DIM = 2048, (8, 2, 2), 64
#: Strategies and transports that are captured; a hybrid has two groups of two ranks.
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "symm_mem": (2, {"transport": "symm_mem"}),
    "ring": (2, {"strategy": "ring"}),
    "ulysses": (2, {"strategy": "ulysses", "transport": "p2p"}),
    "ulysses-symm_mem": (2, {"strategy": "ulysses", "transport": "symm_mem"}),
    **{
        f"hybrid-{outer}": (4, {"strategy": StrategyConfig("hybrid", ulysses_size=2, outer=outer)})
        for outer in OUTER_NAMES
    },
}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Both = Callable[[Sequence[Tensor]], list[Tensor]]


def _attend(q: Tensor, k: Tensor, v: Tensor, move: Any) -> Tensor:
    cp = ContextParallel(layout="zigzag")
    whole = q.shape[1] * dist.get_world_size()
    documents = (0, whole // 3, whole)
    packed = cp.attention(q, k, v, cu_seqlens=documents, causal=True, **move)
    out: Tensor = cp.attention(packed, k, v, causal=True, **move)
    return out


def _shards(seed: int, length: int = LENGTH) -> list[Tensor]:
    """Return q, k, v and dout of this rank."""
    torch.manual_seed(seed + dist.get_rank())
    shape = (1, length // dist.get_world_size())
    heads = (*HEADS, HEADS[0])
    made = [torch.randn(*shape, h, DIM, device="cuda", dtype=torch.bfloat16) for h in heads]
    return [x.requires_grad_(n < len(HEADS)) for n, x in enumerate(made)]


def _both(attend: Attend, tensors: Sequence[Tensor]) -> list[Tensor]:
    *qkv, dout = tensors
    out = attend(*qkv)
    return [x.detach() for x in (out, *torch.autograd.grad(out, qkv, dout))]


def _differences(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest expected number."""
    pairs = zip(results, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def _replayed(
    held: Sequence[Tensor], run: Both, seeds: Iterable[int], *, before: int = 3
) -> list[float]:
    """Capture a function of the tensors held, after ``before`` eager runs, and replay the graph.

    Return the differences of results for new inputs from eager calls before and after.
    """
    aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(before):
            run(held)
    torch.cuda.current_stream().wait_stream(aside)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = run(held)
    differences = []
    for seed in seeds:
        fresh = _shards(seed)
        if len(held) > len(fresh):  # segment ids
            places = torch.arange(held[0].shape[1], device="cuda", dtype=torch.int32)
            fresh.append(places[None] // (50 * seed))
        expected = run(fresh)
        with torch.no_grad():
            for static_input, x in zip(held, fresh, strict=True):
                static_input.copy_(x)
        graph.replay()
        replayed = [x.clone() for x in results]
        differences += [_differences(replayed, x) for x in (expected, run(fresh))]
        if seed == 12:  # a longer call reallocates the memory that peers read
            run(_shards(seed, 4 * LENGTH))
    return differences


def in_one_graph(_: int, move: Any) -> list[float]:
    """Capture both passes together, replay with new inputs and eager calls between replays."""
    with patch.object(symm_buffer, "LEAST_COPY", 0):  # heads arrive in two parts
        return _replayed(_shards(0), partial(_both, partial(_attend, move=move)), range(10, 16))


def after_one_call(_: int, move: Any) -> list[float]:
    """Capture a call after one eager call, which is the least that a capture needs."""
    attend: Attend = partial(ContextParallel(layout="zigzag").attention, causal=True, **move)
    return _replayed(_shards(0), partial(_both, attend), range(30, 33), before=1)


def as_graphed_callable(_: int, move: Any) -> list[float]:
    """Capture a graph for each pass by ``torch.cuda.make_graphed_callables``."""
    attend = partial(_attend, move=move)
    graphed: Any = torch.cuda.make_graphed_callables(attend, tuple(_shards(0)[:3]))
    replayed = []
    for seed in range(20, 26):
        fresh = _shards(seed)
        results = [x.clone() for x in _both(graphed, fresh)]
        replayed.append(_differences(results, _both(attend, fresh)))
    return replayed


def with_segments(_: int, kernel: str) -> list[float]:
    """Replay with other segment ids than were captured."""
    cp = ContextParallel(layout="zigzag")

    def both(tensors: Sequence[Tensor]) -> list[Tensor]:
        *shards, ids = tensors
        attend = partial(cp.attention, segment_ids=ids, causal=True, kernel=kernel)
        return _both(attend, shards)

    held = _shards(0)
    held.append(torch.zeros(1, held[0].shape[1], device="cuda", dtype=torch.int32))
    return _replayed(held, both, range(5, 9))


def too_early(_: int, move: Any) -> str:
    """Return the error of capturing a call that was never made before."""
    q, k, v, _dout = _shards(0, LENGTH // 2)
    # The collector may free earlier graphs inside of a capture, which would end it: collect now.
    gc.collect()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            _attend(q, k, v, move)
    except ValueError as error:
        return str(error)
    return "captured"


def _marks(size: int, move: dict[str, Any]) -> list[pytest.MarkDecorator]:
    """Return marks for the number of ranks, and for NCCL, which captured messages need."""
    sends_messages = move.get("transport") != "symm_mem"
    return [pytest.mark.ranks(size), *[pytest.mark.nccl] * sends_messages]


@pytest.mark.parametrize(
    ("size", "move"),
    [pytest.param(*way, id=name, marks=_marks(*way)) for name, way in WAYS.items()],
)
def test_results_are_those_of_calls_as_usual(size: int, move: Any) -> None:
    with LocalRanks(size, cuda=True) as ranks:
        for differences in (
            *ranks.run(after_one_call, move),  # first, before any other call
            *ranks.run(in_one_graph, move),
            *ranks.run(as_graphed_callable, move),
        ):
            assert max(differences) < 1e-2, differences
        assert all("once outside of a graph" in text for text in ranks.run(too_early, move))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kernel", ["triton", "fa4"])
def test_segment_ids_may_change(kernel: str) -> None:
    with LocalRanks(2, cuda=True) as ranks:
        for differences in ranks.run(with_segments, kernel):
            assert max(differences) < 1e-2, differences
