"""A GPU's peer is killed or stopped: an error in time, or an end by NCCL, and no wrong result."""

from __future__ import annotations

from typing import Any

import pytest
from lost import LONGEST, LOSSES, LOST, STEPS, Loss, Steps, lose, steps

from ring_torch.local import LocalRanks

pytestmark = [pytest.mark.ranks(2), pytest.mark.nccl]
P2P: dict[str, Any] = {"device": "cuda", "transport": "p2p"}
AUTO: dict[str, Any] = {"device": "cuda"}
CASES = [
    *((loss, P2P) for loss in LOSSES if loss.how != "cut off"),
    *((loss, AUTO) for loss in LOSSES if loss.how != "cut off" and loss.when != "during"),
]


@pytest.fixture(scope="module")
def right() -> list[Steps]:
    """Return the results of the steps without a fault."""
    with LocalRanks(2, cuda=True) as pool:
        return pool.run(steps, None, AUTO)


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
