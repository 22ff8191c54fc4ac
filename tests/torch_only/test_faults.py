"""Ranks that disagree, die or never call: the others raise an error; no wrong result, no hang."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_torch import ring_attention
from ring_torch.local import LocalRankError, LocalRanks


def call(**options: Any) -> None:
    shape = options.pop("shape", (1, 8, 2, 8))
    dtype = options.pop("dtype", torch.float32)
    x = torch.ones(shape, dtype=dtype)
    ring_attention(x, x, x, **options)


def _missing(rank: int, what: str) -> tuple[str, float]:
    start = time.monotonic()
    x = torch.ones(1, 8, 2, 8, requires_grad=True)
    if rank == 1 and what == "never calls":
        time.sleep(4)  # twice as long as the others wait
        return "", 0.0
    if rank == 1 and what == "dies":
        os._exit(7)
    try:
        out = ring_attention(x, x, x)
        if rank == 1 and what == "dies between the passes":
            os._exit(7)
        out.sum().backward()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("a result without the peer")


@pytest.mark.parametrize("what", ["never calls", "dies", "dies between the passes"])
def test_missing_peer_ends_in_an_error(what: str) -> None:
    pool = LocalRanks(3, timeout=2)
    try:
        answers = pool.answers(_missing, what)
    finally:
        pool.close()
    for rank in (0, 2):
        ok, (message, seconds) = answers[rank]
        assert ok, answers[rank]
        assert message
        assert seconds < 30


def _one_fails(rank: int) -> None:
    if rank == 1:
        raise KeyError("what went wrong")
    dist.barrier()


def test_a_failing_rank_ends_the_run_of_all() -> None:
    """A failing rank ends the run at once: the others would wait for it for ten minutes."""
    with LocalRanks(3, timeout=600) as ranks, pytest.raises(LocalRankError) as caught:
        ranks.run(_one_fails)
    assert "what went wrong" in str(caught.value)
    assert "rank 0: no answer in time" in str(caught.value)


def _slowly(rank: int, seconds: float) -> tuple[int, float]:
    if rank == 0 and seconds:
        raise ValueError("rank 0 refuses")
    time.sleep(seconds)
    return rank, seconds


def test_an_answer_that_comes_too_late_is_not_taken_for_that_of_the_next_call() -> None:
    with LocalRanks(2) as ranks:
        answers = ranks.answers(_slowly, 3.0, grace=0.2)
        assert "rank 0 refuses" in answers[0][1]
        assert answers[1] == (False, "no answer in time")
        assert ranks.run(_slowly, 0.0) == [(0, 0.0), (1, 0.0)]
