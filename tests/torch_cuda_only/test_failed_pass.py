"""A GPU's peer fails in a pass, is killed or stopped: its error, an end by NCCL, no wrong end."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lost import LONGEST, LOSSES, LOST, STEPS, Loss, Steps, lose, steps

from ring_torch import ring_attention
from ring_torch.kernels.triton.launch import ItemLaunch
from ring_torch.local import LocalRanks

pytestmark = pytest.mark.nccl

BROKEN, TIMEOUT = 1, 8.0
PREFIX = {"forward": "fwd", "backward": "bwd"}  # of the names of a pass's launches


_no_memory: Any = Mock(side_effect=torch.OutOfMemoryError("played: out of memory"))


def _fails(rank: int, folder: str, where: str, length: int, transport: str) -> list[str]:
    """Return the errors of the broken rank in two calls; the other rank's log goes to a file."""
    logging.getLogger("ring_torch").addHandler(logging.FileHandler(f"{folder}/{rank}"))
    options: dict[str, Any] = {"kernel": "triton", "transport": transport}
    x = torch.ones(1, length, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        out = ring_attention(x, x, x, **options)
        out.sum().backward()
        assert x.grad is not None
        x.grad.sum().item()

    step()
    if rank == BROKEN:
        run = ItemLaunch.run

        def broken(launch: Any, name: Any, *args: Any, **options: Any) -> None:
            (_no_memory if name.startswith(PREFIX[where]) else run)(launch, name, *args, **options)

        setattr(ItemLaunch, "run", broken)  # noqa: B010 - mypy lets no method be assigned
    said = []
    for _ in range(2):
        try:
            step()
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}")
    time.sleep(TIMEOUT if rank == BROKEN else 0)
    return said


@pytest.mark.parametrize("transport", ["p2p", "symm_mem"])
@pytest.mark.parametrize("length", [256, 49_152])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_its_words_are_logged(tmp_path: Path, where: str, length: int, transport: str) -> None:
    with LocalRanks(2, timeout=TIMEOUT, cuda=True) as pool:
        answers = pool.answers(_fails, str(tmp_path), where, length, transport)
    message = f"({where}) failed on rank {BROKEN} of the group: OutOfMemoryError: played"
    ok, said = answers[BROKEN]
    assert ok, said
    assert said[0].startswith("OutOfMemoryError: played")
    assert message in said[1]
    assert message in (tmp_path / str(1 - BROKEN)).read_text()
    ended, other = answers[1 - BROKEN]
    assert not ended or len(other) == 2, other  # killed by NCCL, or an error each time


AUTO: dict[str, Any] = {"device": "cuda"}
CASES = [
    (loss, options)
    for options in (AUTO, AUTO | {"transport": "p2p"}) for loss in LOSSES
    if loss.how != "cut off" and (loss.when != "during" or options is not AUTO)
]  # fmt: skip


@pytest.fixture(scope="module")
def right() -> list[Steps]:
    """Return the results of the steps without a fault."""
    with LocalRanks(2, cuda=True) as pool:
        return pool.run(steps, None, AUTO)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("loss", "options"), CASES)
def test_the_other_ends_in_time(loss: Loss, options: dict[str, Any], right: list[Steps]) -> None:
    outcome = lose(loss, 2, options, cuda=True)
    assert outcome.seconds < LONGEST
    assert outcome.staying == []
    assert not outcome.lost[0]
    ((ok, answer),) = outcome.survivors.values()
    if ok:
        assert 1 <= len(answer.sums) < STEPS
        assert answer.sums == pytest.approx(right[1 - LOST].sums[: len(answer.sums)], rel=1e-3)
        assert answer.error is not None
    else:
        assert answer.startswith("died with exit code -"), answer  # killed by NCCL's watchdog
