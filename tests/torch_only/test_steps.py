"""Steps of strategies: bytes are those of the model, and what reads peers' memory is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from backends.peer_memory import BufferOnFiles, Now, OnFiles
from backends.torch_ranks import gather, run_rank
from cases import CASES, Case
from patched import chosen
from tolerances import assert_close

import ring_torch
from ring_core import Mask, StrategyConfig, cost
from ring_core.choose.gathering import MAX_SAVED_BYTES
from ring_torch import ContextParallel, prepare
from ring_torch.buffers import ONE_GROUP, HeadGroups
from ring_torch.call import Call, Traffic
from ring_torch.comm.ranks import PeerError, Ranks
from ring_torch.kernels.eager import EagerKernel
from ring_torch.local import LocalRankError
from ring_torch.options import CallOptions
from ring_torch.prepare import check_call
from ring_torch.records import Inputs
from ring_torch.strategies import describe_strategy, gather as gather_strategy
from ring_torch.strategies.balanced import Balanced, offload_pieces_of
from ring_torch.strategies.gather import GATHER
from ring_torch.strategies.ulysses import Ulysses
from ring_torch.transports import SYMM_MEM, peer_copies, symm_buffer
from ring_torch.transports.symm_buffer import DeviceLocation, gather_numbers, refusals

T = 768
MASKS = {
    "causal": Mask(causal=True),
    "full": Mask(),
    "window": Mask(causal=True, window=(200, 0)),
    "documents": Mask(causal=True, cu_seqlens=(0, 100, 500, T)),
}


def _offloaded_rows(program: Any, rank: int) -> int:
    """Query rows that a rank sends to helpers in a pass."""
    steps = offload_pieces_of(program, rank, program.backward)
    return sum(x.stop - x.start for pieces in steps for y in pieces for x in y.sent_rows)


EVEN, PADDED = (8, 4), (9, 3)
hybrid = partial(StrategyConfig, "hybrid")
#: Strategies, layouts and heads.
WAYS: list[tuple[Any, str, tuple[int, int]]] = [
    *(("ring", layout, EVEN) for layout in ("zigzag", "contiguous", "striped")),
    ("balanced", "contiguous", EVEN), ("gather", "zigzag", EVEN),
    ("ulysses", "striped", EVEN), ("ulysses", "zigzag", PADDED),
    (hybrid(ulysses_size=2, outer="ring"), "zigzag", EVEN),
    (hybrid(ulysses_size=2, outer="gather"), "contiguous", PADDED),
    (hybrid(ulysses_size=4, outer="ring"), "zigzag", PADDED),
    (hybrid(ulysses_size=1, outer="gather"), "zigzag", EVEN),
]  # fmt: skip


def calls_of(
    size: int, layout: Any, heads: tuple[int, int], tokens: int, mask: Mask, strategy: Any
) -> Iterator[tuple[Call, Inputs]]:
    """Yield the call of each rank, which has so many tokens, and its inputs."""
    q, k = (torch.zeros(1, tokens, n, 16, requires_grad=True) for n in heads)
    options = CallOptions(mask=mask, strategy=strategy)
    for rank in range(size):
        yield check_call(Ranks(None, rank, size), 0, layout, q, k, k, options)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("strategy", "layout", "heads"), WAYS)
def test_bytes_are_those_of_the_model_and_what_is_sent_arrives(
    strategy: Any, layout: Any, heads: tuple[int, int], mask: str, backward: bool
) -> None:
    ranks: list[Traffic] = []
    for call, inputs in calls_of(4, layout, heads, T // 4, MASKS[mask], strategy):
        saved = bool(call.strategy.saved_shapes(call, inputs, plan_known=True))
        passes = [
            call.strategy.traffic(call, inputs, forward=forward, saved=saved)
            for forward in ([True, False] if backward else [True])
        ]
        ranks.append(Traffic(*map(sum, zip(*passes, strict=True))))
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


OUTER_GATHER = hybrid(ulysses_size=2, outer="gather")


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(("strategy", "size"), [("gather", 4), ("gather", 8), (OUTER_GATHER, 8)])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("left", [200, 300, None])
def test_bytes_in_whole_tiles_are_those_of_the_model(
    left: int | None, layout: Any, strategy: Any, size: int, saves: bool
) -> None:
    tile, mask = 128, Mask(causal=True, window=None if left is None else (left, 0))
    sent: list[int] = []
    with (
        chosen(WholeTiles(tile)),
        patch.object(gather_strategy, "MAX_SAVED_BYTES", MAX_SAVED_BYTES if saves else 0),
    ):
        for call, inputs in calls_of(size, layout, EVEN, 512, mask, strategy):
            inner: Any = getattr(call.strategy, "inner", call)
            assert (inner.strategy.forward_spec.gather.tile, inner.strategy.saves) == (tile, saves)
            passes = (
                call.strategy.traffic(call, inputs, forward=forward, saved=saves).sent
                for forward in (True, False)
            )
            sent.append(sum(passes))
    model = cost.Model(*EVEN, 16, bytes_per_element=4)
    counted = partial(cost.bytes_sent, call.plan, model, strategy, fetches_again=not saves)
    assert sent == list(counted(tile=tile))
    # Of shards that begin at tiles only a window begins elsewhere.
    assert (sent == list(counted())) == (left is None)


GROUPS = {
    "one": ONE_GROUP,
    "early": HeadGroups(1, 1, before_last_item=True),
    "two": HeadGroups(2, 2, before_last_item=False),
    "two early": HeadGroups(2, 2, before_last_item=True),
}
NAMES = (
    "causal-zigzag-cp3", "window-both-contiguous-cp2", "documents-contiguous-cp2",
    "segments-pair-zigzag",
)  # fmt: skip


def on_a_rank(
    rank: int, folder: Path, case: Case, groups: HeadGroups, kernel: str, triton: bool, lost: bool
) -> dict[str, npt.NDArray[Any]]:
    """Return a rank's part of a case; if ``lost``, reads of gradients are not counted as bytes."""
    OnFiles.folder = folder
    buffer_of = cache(BufferOnFiles)
    changes: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_stream", lambda *_: Now()),
        (torch.cuda, "set_stream", lambda _: None),
        (peer_copies, "on_stream", lambda _: nullcontext()),
        (symm_buffer, "_cuda", lambda: None),
        (peer_copies, "has_triton", lambda: triton),
        (symm_buffer, "symm_buffer_of", buffer_of),
        (peer_copies, "fits_one_kernel", lambda *_: False),
        (prepare, "choose_strategy", lambda *_, **__: (GATHER, SYMM_MEM)),
        (gather_strategy, "head_groups_of", lambda *_: groups),
    ]
    if lost:
        changes.append((peer_copies, "note_reads", lambda _: None))
    prepare._prepare.cache_clear()
    with pytest.MonkeyPatch.context() as patched, ring_torch.check():
        for change in changes:
            patched.setattr(*change)
        results = run_rank(rank, case, (kernel, "gather", "auto"), None, cuda=False)
    prepare._prepare.cache_clear()
    return results


def run_case(
    backend: Any, folder: Path, case: Case, groups: HeadGroups = ONE_GROUP,
    kernel: str = "eager", *, triton: bool = True, lost: bool = False,
) -> None:  # fmt: skip
    ranks = backend.pool(case.cp_size)
    results = ranks.run(on_a_rank, folder, case, groups, kernel, triton, lost)
    assert_close(case, gather(case, case.plan, results))


@pytest.mark.nightly(unless=[
    "causal-zigzag-cp3-one-True", "causal-zigzag-cp3-two early-False",
    "window-both-contiguous-cp2-two-False", "window-both-contiguous-cp2-two early-True",
    "documents-contiguous-cp2-early-False", "documents-contiguous-cp2-two-True",
    "segments-pair-zigzag-one-False", "segments-pair-zigzag-early-True",
])  # fmt: skip
@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", NAMES)
def test_case(name: str, groups: str, triton: bool, backend: Any, tmp_path: Path) -> None:
    case = CASES[name]
    if GROUPS[groups].forward > 1:  # two K/V heads, to be cut into groups
        case = replace(case, heads=(4, 2))
    run_case(backend, tmp_path, case, GROUPS[groups], triton=triton)


def test_in_two_stages(backend: Any, tmp_path: Path) -> None:
    """A kernel without band masks gathers in two stages."""
    run_case(backend, tmp_path, CASES["causal-zigzag-cp2"], kernel="sdpa")


def test_reads_that_are_missing_are_seen(backend: Any, tmp_path: Path) -> None:
    with pytest.raises(LocalRankError, match="0 bytes were read from peers, and the program reads"):
        run_case(backend, tmp_path, CASES["causal-zigzag-cp2"], lost=True)


ONE, OTHER = 7, 8  # hosts
ALL, NOT_BACK = [[1, 1], [1, 1]], [[1, 1], [0, 1]]


@pytest.mark.parametrize(
    ("places", "reaches", "overlapping", "word"),
    [
        ([(ONE, 1, 0), (ONE, 2, 1)], ALL, False, None),
        ([(ONE, 1, 0), (ONE, 2, 0)], ALL, False, "ALLOW_OVERLAPPING"),
        ([(ONE, 1, 0), (ONE, 2, 0)], ALL, True, None),
        ([(ONE, 1, 0), (OTHER, 2, 1)], ALL, True, "several hosts"),
        ([(ONE, 1, 0), (OTHER, 2, 0)], ALL, False, "several hosts"),
        ([(ONE, 1, 0), (ONE, 1, 0)], ALL, True, "share a GPU"),
        ([(ONE, 1, 0), (ONE, 1, 1)], ALL, False, "share a GPU"),
        ([(ONE, 1, 0), (ONE, 2, 1)], NOT_BACK, False, "do not reach"),
    ],
)
def test_gpus_are_told_apart_by_what_they_are(
    places: list[tuple[int, int, int]], reaches: list[list[int]], overlapping: bool,
    word: str | None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1" if overlapping else "0")
    reasons = list(refusals([DeviceLocation(*x) for x in places], reaches))
    assert (reasons == []) == (word is None)
    assert word is None or word in reasons[0]


def test_a_peer_that_is_lost_meanwhile() -> None:
    lost = dist.DistBackendError("Connection closed by peer")
    with (
        patch.object(dist, "all_gather", side_effect=lost),
        pytest.raises(PeerError, match="in vain for rank 1 of the group: Connection closed"),
    ):
        gather_numbers(Ranks(None, 0, 2), [1, 2], torch.device("cpu"))


OF_MACHINE = "copies out of the peers' memory need CUDA tensors and a nccl group"


@pytest.mark.parametrize(
    ("layout", "heads", "biased", "said"),
    [
        ("striped", 4, False, "strategy ring, transport p2p\n  not gather over symm_mem: layout 'striped' assigns tokens one by one"),
        ("striped", 4, False, OF_MACHINE),
        ("zigzag", 8, False, "not ulysses over symm_mem: trading heads moves at least 75 % of the bytes of a gather, and 'auto' takes it up to 55 %\n"),
        ("zigzag", 4, True, "not ulysses over symm_mem: the bias would travel, too\n"),
        ("zigzag", 4, False, f"not ulysses over symm_mem: {OF_MACHINE}\n"),
    ],
)  # fmt: skip
def test_explain_says_why_others_are_not_taken(
    layout: Any, heads: int, biased: bool, said: str
) -> None:
    q, k = torch.zeros(1, 8, heads, 8), torch.zeros(1, 8, 4, 8)
    options = CallOptions(causal=True, bias=torch.zeros(1, heads, 8, 32) if biased else None)
    explained = describe_strategy(*check_call(Ranks(None, 0, 4), 0, layout, q, k, k, options))
    assert said in f"{explained}\n"
    assert "one rank: nothing travels" in ContextParallel().explain(k, k, k)
