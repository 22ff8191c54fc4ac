"""Steps of a ring, resolved for each rank: together they are the program, and messages meet."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch
from weakref import ref

import pytest
import torch

from ring_core import Mask, StrategyConfig, cost
from ring_core.choose.gathering import MAX_SAVED_BYTES
from ring_torch import prepare
from ring_torch.call import Traffic
from ring_torch.comm.ranks import DONE, Ranks
from ring_torch.kernels.api import Selection
from ring_torch.kernels.eager import EagerKernel
from ring_torch.options import CallOptions
from ring_torch.prepare import _prepare, check_call
from ring_torch.strategies import gather
from ring_torch.strategies.balanced import Balanced, OffloadPiece, offload_pieces_of, remote_queries
from ring_torch.strategies.ulysses import Ulysses

T = 768
MASKS = {
    "causal": Mask(causal=True),
    "full": Mask(),
    "window": Mask(causal=True, window=(200, 0)),
    "documents": Mask(causal=True, cu_seqlens=(0, 100, 500, T)),
}
RINGS: list[tuple[Any, str]] = [
    ("ring", "zigzag"), ("ring", "contiguous"), ("ring", "striped"), ("balanced", "contiguous"),
]  # fmt: skip


def test_rows_of_a_peer_are_freed_before_the_next_step() -> None:
    arrived: list[ref[torch.Tensor]] = []

    def compute(_: object, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        arrived.extend(map(ref, tensors))
        return tensors

    def rows(tokens: slice) -> list[torch.Tensor]:
        return [torch.zeros(4)[tokens]]

    ranks: Any = SimpleNamespace(start=lambda *_: DONE)
    item: Any = SimpleNamespace(q_slice=slice(2), q_rank=1, out_rank=1)
    steps = [(OffloadPiece(1, (slice(2),), (item,)),), ()]
    parts = remote_queries(
        ranks, steps, take=rows, compute=compute, results_like=rows, add=lambda *_: None
    )  # fmt: skip
    next(parts)
    next(parts)
    assert [x() for x in arrived] == [None]
    assert list(parts) == [None]  # a part for the step without pieces, then the end


def _offloaded_rows(program: Any, rank: int) -> int:
    """Query rows that a rank sends to helpers in a pass."""
    steps = offload_pieces_of(program, rank, program.backward)
    return sum(x.stop - x.start for pieces in steps for y in pieces for x in y.sent_rows)


EVEN, PADDED = (8, 4), (9, 3)
HYBRID: list[tuple[int, Literal["ring", "gather"], str, tuple[int, int]]] = [
    (2, "ring", "zigzag", EVEN), (2, "gather", "contiguous", PADDED),
    (4, "ring", "zigzag", PADDED), (1, "gather", "zigzag", EVEN),
]  # fmt: skip
SPLIT: list[tuple[Any, str, tuple[int, int]]] = [
    ("ulysses", "striped", EVEN),
    ("ulysses", "zigzag", PADDED),
    *(
        (StrategyConfig("hybrid", ulysses_size=size, outer=outer), layout, heads)
        for size, outer, layout, heads in HYBRID
    ),
]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("strategy", "layout", "heads"),
    [*((*ring, EVEN) for ring in RINGS), ("gather", "zigzag", EVEN), *SPLIT],
)
def test_bytes_are_those_of_the_model_and_what_is_sent_arrives(
    strategy: Any, layout: Any, heads: tuple[int, int], mask: str, backward: bool
) -> None:
    q, k = (torch.zeros(1, T // 4, n, 16, requires_grad=True) for n in heads)
    options = CallOptions(mask=MASKS[mask], strategy=strategy)
    ranks: list[Traffic] = []
    for rank in range(4):
        call, inputs = check_call(Ranks(None, rank, 4), 0, layout, q, k, k, options)
        saved = bool(call.strategy.saved_shapes(call, inputs, plan_known=True))
        passes = [
            call.strategy.traffic(call, inputs, forward=forward, saved=saved)
            for forward in ([True, False] if backward else [True])
        ]
        ranks.append(Traffic(*(sum(x) for x in zip(*passes, strict=True))))
    assert sum(x.sent for x in ranks) == sum(x.received for x in ranks) > 0
    model = cost.Model(*heads, 16, bytes_per_element=4)
    expected = cost.bytes_sent(call.plan, model, strategy, backward=backward)
    deltas = [0] * 4
    if call.kernel.needs_delta and backward:
        # The CPU's kernel takes delta, float32 [B, H, T], beside the gradient of the output.
        if isinstance(call.strategy, Ulysses):
            members, places = call.strategy.heads.q.shape
            deltas = [4 * (members - 1) * places * (T // 4)] * 4
        elif isinstance(call.strategy, Balanced):
            deltas = [4 * heads[0] * _offloaded_rows(call.program, rank) for rank in range(4)]
    assert [x.sent - delta for x, delta in zip(ranks, deltas, strict=True)] == list(expected)


class WholeTiles(EagerKernel):
    """A kernel whose backward adds up in whole tiles of keys, as flash-attn-4's on Hopper."""

    needs_delta = False

    def __init__(self, tile: int) -> None:
        self.split_backward: Any = SimpleNamespace(
            tile=tile, applies=lambda *_, **__: True, backward=lambda *_: None,
            rounding=lambda *_: None,
        )  # fmt: skip


OUTER_GATHER = StrategyConfig("hybrid", ulysses_size=2, outer="gather")


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(("strategy", "size"), [("gather", 4), ("gather", 8), (OUTER_GATHER, 8)])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("left", [200, 300, None])
def test_bytes_in_whole_tiles_are_those_of_the_model(
    left: int | None, layout: Any, strategy: Any, size: int, saves: bool
) -> None:
    tile, tokens = 128, 512
    mask = Mask(causal=True, window=None if left is None else (left, 0))
    q, k = (torch.zeros(1, tokens, n, 16, requires_grad=True) for n in EVEN)
    options = CallOptions(mask=mask, strategy=strategy)
    sent: list[int] = []
    with (
        patch.object(prepare, "choose", lambda *_: Selection(WholeTiles(tile), ())),
        patch.object(gather, "MAX_SAVED_BYTES", MAX_SAVED_BYTES if saves else 0),
    ):
        _prepare.cache_clear()
        for rank in range(size):
            call, inputs = check_call(Ranks(None, rank, size), 0, layout, q, k, k, options)
            inner: Any = getattr(call.strategy, "inner", call)
            assert (inner.strategy.forward_spec.gather.tile, inner.strategy.saves) == (tile, saves)
            sent.append(
                sum(
                    call.strategy.traffic(call, inputs, forward=forward, saved=saves).sent
                    for forward in (True, False)
                )
            )
        _prepare.cache_clear()
    model = cost.Model(*EVEN, 16, bytes_per_element=4)
    counted = partial(cost.bytes_sent, call.plan, model, strategy, fetches_again=not saves)
    assert sent == list(counted(tile=tile))
    # Of shards that begin at tiles only a window begins elsewhere.
    assert (sent == list(counted())) == (left is None)
