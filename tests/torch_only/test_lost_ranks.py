"""Ranks killed, stopped or cut off within a step: an error on the others, nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ring_torch import ring_attention
from ring_torch._comm import Ring, Transfer
from ring_torch.local import LocalRanks

TIMEOUT = 2.0  # of the group, seconds
LONGEST = 60.0  # seconds, far more than the timeout and what starts around it
LOST, STEPS = 1, 3


class Loss(NamedTuple):
    """How rank 1 is lost, and at which point of its second step."""

    how: str
    where: str
    when: str


LOSSES = [
    *(Loss("killed", where, when) for where in ("forward", "backward") for when in ("before", "during", "after")),
    Loss("stopped", "forward", "during"),
    Loss("stopped", "backward", "during"),
    Loss("cut off", "forward", "before"),
    Loss("cut off", "backward", "during"),
]  # fmt: skip


def _cut_off() -> None:
    """Close every connection to other ranks, as when a cable is pulled."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            one = socket.socket(fileno=os.dup(int(entry.name)))
            if one.family in (socket.AF_INET, socket.AF_INET6):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def _lose(how: str) -> None:
    if how == "cut off":
        _cut_off()
    else:
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])


def _lose_while_sending(how: str) -> None:
    """Be lost when the second transfer from now on is under way."""
    start, left = Ring.start, iter((1, 0))

    def start_(ring: Ring, sends: Any, receives: Any) -> Transfer:
        transfer = start(ring, sends, receives)
        if next(left, None) == 0:
            _lose(how)
        return transfer

    Ring.start = start_  # type: ignore[assignment, method-assign]


def _at(point: tuple[str, str], loss: Loss | None) -> None:
    if loss is None or point != (loss.where, loss.when):
        return
    if loss.when == "during":
        _lose_while_sending(loss.how)
    else:
        _lose(loss.how)


def _steps(rank: int, loss: Loss | None) -> tuple[list[float], str | None]:
    """The sum of the gradient after each step, and the error that ended them."""
    x = torch.randn(1, 64, 2, 16, generator=torch.Generator().manual_seed(rank))
    sums: list[float] = []
    for step in range(STEPS):
        mine = x.clone().requires_grad_()
        here = loss if rank == LOST and step == 1 else None
        try:
            _at(("forward", "before"), here)
            _at(("forward", "during"), here)
            out = ring_attention(mine, mine, mine, causal=True, schedule="zigzag")
            _at(("forward", "after"), here)
            _at(("backward", "before"), here)
            _at(("backward", "during"), here)
            out.sum().backward()
            _at(("backward", "after"), here)
        except RuntimeError as error:
            return sums, str(error)
        assert mine.grad is not None
        sums.append(mine.grad.double().sum().item())
    return sums, None


@pytest.fixture(scope="module")
def right() -> list[tuple[list[float], str | None]]:
    """What the steps give that nothing disturbs."""
    with LocalRanks(3) as pool:
        return pool.run(_steps, None)


@pytest.mark.parametrize("loss", LOSSES, ids="-".join)
def test_others_end_in_an_error_in_time(
    loss: Loss, right: list[tuple[list[float], str | None]]
) -> None:
    pool = LocalRanks(3, timeout=TIMEOUT)
    processes = [process.pid for process in pool._processes]
    try:
        started = time.monotonic()
        for pipe in pool._pipes:
            pipe.send((_steps, (loss,)))
        answers = {rank: pool._answer(rank) for rank in (0, 2)}
        assert time.monotonic() - started < LONGEST
        if loss.how == "stopped":
            pool._processes[LOST].kill()
        lost = pool._answer(LOST)
    finally:
        pool.close()
    for rank, (ok, answer) in answers.items():
        assert ok, answer
        sums, error = answer
        assert 1 <= len(sums) < STEPS
        assert sums == right[rank][0][: len(sums)]
        assert error is not None
    if loss.how == "cut off":
        assert lost[0] or lost[1] == f"died with exit code {-signal.SIGABRT}", lost  # by gloo
        assert not lost[0] or lost[1][1] is not None
    else:
        assert lost == (False, f"died with exit code {-signal.SIGKILL}")
    assert all(process is not None and _is_gone(process) for process in processes)


def _is_gone(process: int) -> bool:
    """Whether a process is gone, not even waiting to be reaped; it gets a moment."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
