"""Ranks killed, stopped or cut off in a step: the others raise an error, and nothing stays."""

from __future__ import annotations

import signal

import pytest
from lost import LONGEST, LOSSES, MOVEMENTS, STEPS, Loss, Outcome, Steps, lose, steps

from ring_core import StrategyConfig
from ring_torch.local import LocalRanks


@pytest.fixture(scope="module")
def right() -> list[Steps]:
    """Return the results of the steps without a fault."""
    with LocalRanks(3) as pool:
        return pool.run(steps, None, {})


@pytest.mark.parametrize("loss", LOSSES, ids="-".join)
def test_others_end_in_an_error_in_time(loss: Loss, right: list[Steps]) -> None:
    outcome = lose(loss, 3, {})
    assert outcome.seconds < LONGEST
    assert outcome.staying == []
    for rank, (ok, answer) in outcome.survivors.items():
        assert ok, answer
        assert 1 <= len(answer.sums) < STEPS
        assert answer.sums == right[rank].sums[: len(answer.sums)]
        assert answer.error is not None
    ok, answer = outcome.lost
    if loss.how != "cut off":
        assert (ok, answer) == (False, f"died with exit code {-signal.SIGKILL}")
    elif ok:
        assert answer.error is not None
    else:  # gloo aborts
        assert answer == f"died with exit code {-signal.SIGABRT}"


def assert_ended(outcome: Outcome) -> None:
    """Check that every survivor made a step, then raised in time, and that no process is left."""
    assert outcome.seconds < LONGEST
    assert outcome.staying == []
    for ok, answer in outcome.survivors.values():
        assert ok, answer
        assert 1 <= len(answer.sums) < STEPS
        assert answer.error is not None


@pytest.mark.nightly(unless=["killed-forward-during", "killed-backward-during"])
@pytest.mark.parametrize("loss", LOSSES, ids="-".join)
def test_groups_end_in_an_error_in_time(loss: Loss) -> None:
    """Both Ulysses groups of ``hybrid`` end: the lost rank's own, and the one it exchanges with."""
    assert_ended(lose(loss, 4, {"strategy": StrategyConfig("hybrid", ulysses_size=2)}))


@pytest.mark.nightly(unless=["killed-forward-during-shift", "killed-backward-during-halo"])
@pytest.mark.parametrize("movement", MOVEMENTS)
@pytest.mark.parametrize("loss", LOSSES, ids="-".join)
def test_movements_end_in_an_error_in_time(loss: Loss, movement: str) -> None:
    assert_ended(lose(loss, 3, {"movement": movement}))
