"""K/V and gradients copied out of peers' memory, played by processes on CPUs, on the case table."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from backends.peer_memory import BufferOnFiles, Now, OnFiles
from backends.torch_ranks import gather, run_rank
from cases import CASES, Case
from tolerances import assert_close

import ring_torch
from ring_torch import ContextParallel, prepare
from ring_torch.buffers import ONE_GROUP, HeadGroups
from ring_torch.comm.ranks import PeerError, Ranks
from ring_torch.local import LocalRankError
from ring_torch.options import CallOptions
from ring_torch.prepare import check_call
from ring_torch.strategies import describe_strategy, gather as gather_strategy
from ring_torch.strategies.gather import GATHER
from ring_torch.transports import SYMM_MEM, peer_copies, symm_buffer
from ring_torch.transports.symm_buffer import DeviceLocation, gather_numbers, refusals

Arrays = dict[str, npt.NDArray[Any]]
GROUPS = {
    "one": ONE_GROUP,
    "early": HeadGroups(1, 1, before_last_item=True),
    "two": HeadGroups(2, 2, before_last_item=False),
    "two early": HeadGroups(2, 2, before_last_item=True),
}
NAMES = (
    "causal-zigzag-cp3",
    "window-both-contiguous-cp2",
    "documents-contiguous-cp2",
    "segments-pair-zigzag",
)


def on_a_rank(
    rank: int, folder: Path, case: Case, groups: HeadGroups, kernel: str, triton: bool, lost: bool
) -> Arrays:
    """Return a rank's part of a case; if ``lost``, reads of gradients are not counted as bytes."""
    OnFiles.folder = folder
    buffers: list[BufferOnFiles] = []

    def buffer_of(ranks: Ranks) -> BufferOnFiles:
        if not buffers:
            buffers.append(BufferOnFiles(ranks))
        return buffers[0]

    prepare._prepare.cache_clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "current_stream", lambda *_: Now())
        patched.setattr(torch.cuda, "set_stream", lambda _: None)
        patched.setattr(peer_copies, "on_stream", lambda _: nullcontext())
        patched.setattr(symm_buffer, "_cuda", lambda: None)
        patched.setattr(peer_copies, "has_triton", lambda: triton)
        patched.setattr(symm_buffer, "symm_buffer_of", buffer_of)
        patched.setattr(peer_copies, "fits_one_kernel", lambda *_: False)
        patched.setattr(prepare, "choose_strategy", lambda *_, **__: (GATHER, SYMM_MEM))
        patched.setattr(gather_strategy, "head_groups_of", lambda *_: groups)
        if lost:
            patched.setattr(peer_copies, "note_reads", lambda _: None)
        with ring_torch.check():
            results = run_rank(rank, case, (kernel, "gather", "auto"), None, cuda=False)
    prepare._prepare.cache_clear()
    return results


def cut(case: Case, groups: HeadGroups) -> Case:
    """Return the case, with two K/V heads if they are to be cut into groups."""
    return replace(case, heads=(4, 2)) if groups.forward > 1 else replace(case)


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
    case = cut(CASES[name], GROUPS[groups])
    arguments = (tmp_path, case, GROUPS[groups], "eager", triton, False)
    assert_close(
        case, gather(case, case.plan, backend.pool(case.cp_size).run(on_a_rank, *arguments))
    )


def test_in_two_stages(backend: Any, tmp_path: Path) -> None:
    """A kernel without band masks gathers in two stages."""
    case = CASES["causal-zigzag-cp2"]
    arguments = (tmp_path, case, ONE_GROUP, "sdpa", True, False)
    assert_close(case, gather(case, case.plan, backend.pool(2).run(on_a_rank, *arguments)))


def test_reads_that_are_missing_are_seen(backend: Any, tmp_path: Path) -> None:
    with pytest.raises(LocalRankError, match="0 bytes were read from peers, and the program reads"):
        backend.pool(2).run(
            on_a_rank, tmp_path, CASES["causal-zigzag-cp2"], ONE_GROUP, "eager", True, True
        )


ONE, OTHER = 7, 8  # hosts
ALL = [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("places", "reaches", "overlapping", "word"),
    [
        ([DeviceLocation(ONE, 1, 0), DeviceLocation(ONE, 2, 1)], ALL, False, None),
        ([DeviceLocation(ONE, 1, 0), DeviceLocation(ONE, 2, 0)], ALL, False, "ALLOW_OVERLAPPING"),
        ([DeviceLocation(ONE, 1, 0), DeviceLocation(ONE, 2, 0)], ALL, True, None),
        ([DeviceLocation(ONE, 1, 0), DeviceLocation(OTHER, 2, 1)], ALL, True, "several hosts"),
        ([DeviceLocation(ONE, 1, 0), DeviceLocation(OTHER, 2, 0)], ALL, False, "several hosts"),
        ([DeviceLocation(ONE, 1, 0), DeviceLocation(ONE, 1, 0)], ALL, True, "share a GPU"),
        ([DeviceLocation(ONE, 1, 0), DeviceLocation(ONE, 1, 1)], ALL, False, "share a GPU"),
        (
            [DeviceLocation(ONE, 1, 0), DeviceLocation(ONE, 2, 1)],
            [[1, 1], [0, 1]],
            False,
            "do not reach",
        ),
    ],
)
def test_gpus_are_told_apart_by_what_they_are(
    places: list[DeviceLocation], reaches: list[list[int]], overlapping: bool, word: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1" if overlapping else "0")
    reasons = list(refusals(places, reaches))
    assert (reasons == []) == (word is None)
    assert word is None or word in reasons[0]


def test_a_peer_that_is_lost_meanwhile() -> None:
    lost = dist.DistBackendError("Connection closed by peer")
    with (
        patch.object(dist, "all_gather", side_effect=lost),
        pytest.raises(PeerError, match="in vain for rank 1 of the group: Connection closed"),
    ):
        gather_numbers(Ranks(None, 0, 2), [1, 2], torch.device("cpu"))


def test_explain_says_why_keys_are_not_gathered() -> None:
    x = torch.zeros(1, 8, 1, 8)
    call, inputs = check_call(Ranks(None, 0, 4), 0, "striped", x, x, x, CallOptions())
    said = describe_strategy(call, inputs)
    reason = "layout 'striped' assigns tokens one by one"
    assert said.startswith(f"strategy ring, transport p2p\n  not gather over symm_mem: {reason}")
    assert "need CUDA tensors and a nccl group" in said
    assert "one rank: nothing travels" in ContextParallel().explain(x, x, x)


@pytest.mark.parametrize(
    ("heads", "biased", "reason"),
    [
        (8, False, "trading heads moves at least 75 % of the bytes of a gather, and 'auto' takes it up to 55 %"),
        (4, True, "the bias would travel, too"),
        (4, False, None),
    ],
)  # fmt: skip
def test_explain_says_why_heads_are_not_traded(
    heads: int, biased: bool, reason: str | None
) -> None:
    q, k = torch.zeros(1, 8, heads, 8), torch.zeros(1, 8, 4, 8)
    options = CallOptions(causal=True, bias=torch.zeros(1, heads, 8, 32) if biased else None)
    said = describe_strategy(*check_call(Ranks(None, 0, 4), 0, "zigzag", q, k, k, options))
    lines = [line for line in said.split("\n") if "ulysses" in line]
    of_machine = "copies out of the peers' memory need CUDA tensors and a nccl group"
    assert lines == [f"  not ulysses over symm_mem: {reason or of_machine}"]
