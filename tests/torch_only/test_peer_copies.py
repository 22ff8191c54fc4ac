"""K/V and gradients copied out of peers' memory, played by processes on CPUs, on the case table."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest
import torch
from backends.peer_memory import BufferOnFiles, Now, OnFiles
from backends.torch_ranks import gather, run_rank
from cases import CASES, Case
from tolerances import assert_close

import ring_torch
from ring_torch import prepare
from ring_torch.buffers import ONE_GROUP, HeadGroups
from ring_torch.comm.ranks import Ranks
from ring_torch.local import LocalRankError
from ring_torch.strategies import gather as gather_strategy
from ring_torch.strategies.gather import GATHER
from ring_torch.transports import SYMM_MEM, peer_copies, symm_buffer

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


@pytest.mark.nightly(
    unless=[
        "causal-zigzag-cp3-one-True",
        "causal-zigzag-cp3-two early-False",
        "window-both-contiguous-cp2-two-False",
        "window-both-contiguous-cp2-two early-True",
        "documents-contiguous-cp2-early-False",
        "documents-contiguous-cp2-two-True",
        "segments-pair-zigzag-one-False",
        "segments-pair-zigzag-early-True",
    ]
)
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
