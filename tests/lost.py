"""Kills, stops or disconnects a rank within a step, to test what the others do."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_torch import ContextParallel, ring_attention
from ring_torch.comm.ranks import Ranks, Transfer
from ring_torch.local import LocalRanks

TIMEOUT = 2.0  # seconds, of the process group
LONGEST = 60.0  # seconds, far more than the timeout and the time to start
LOST, STEPS = 1, 3


class Loss(NamedTuple):
    """Loss of rank 1: the way, and the point in its second step, or another."""

    how: str
    where: str
    when: str
    step: int = 1


LOSSES = [
    *(Loss("killed", where, when) for where in ("forward", "backward") for when in ("before", "during", "after")),
    Loss("stopped", "forward", "during"),
    Loss("stopped", "backward", "during"),
    Loss("cut off", "forward", "before"),
    Loss("cut off", "backward", "during"),
]  # fmt: skip


#: Movements, and a recurrence, over which every rank sends to another one, forward and backward.
MOVEMENTS: dict[str, Callable[[ContextParallel, Tensor], Tensor]] = {
    "shift": lambda cp, x: cp.shift(x, 1),
    "halo": lambda cp, x: cp.halo(x, 3, 1).rows,
    "relayout": lambda cp, x: cp.relayout(x, to="striped"),
    "recurrence": lambda cp, x: cp.linear_recurrence(x.sigmoid(), x),
}


class Steps(NamedTuple):
    """Gradient sums of the completed steps, and the error that ended the run."""

    sums: list[float]
    error: str | None


def _cut_off() -> None:
    """Close every connection to other ranks, as when a cable is pulled."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            connection = socket.socket(fileno=os.dup(int(entry.name)))
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _lose(how: str) -> None:
    if how == "cut off":
        _cut_off()
    elif how == "late":
        time.sleep(1.5 * TIMEOUT)
    else:
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])


def _lose_while_sending(how: str) -> None:
    """Lose this rank when the second transfer from now on is under way."""
    remaining = iter((1, 0))

    def losing[**P](start: Callable[P, Transfer]) -> Callable[P, Transfer]:
        def start_and_be_lost(*args: P.args, **kwargs: P.kwargs) -> Transfer:
            transfer = start(*args, **kwargs)
            if next(remaining, None) == 0:
                _lose(how)
            return transfer

        return start_and_be_lost

    # On GPUs a ring's messages are an all-to-all. Only this process is patched.
    for name in ("start", "_all_to_all"):
        setattr(Ranks, name, losing(getattr(Ranks, name)))


def _at(loss: Loss | None, where: str, *moments: str) -> None:
    """Be lost if it is at one of these moments."""
    if loss is not None and loss.where == where and loss.when in moments:
        (_lose_while_sending if loss.when == "during" else _lose)(loss.how)


def steps(rank: int, loss: Loss | None, options: dict[str, Any]) -> Steps:
    """Run steps, with ``device`` and other options, until all are done or an error ends them.

    With ``movement`` a step is a movement of :data:`MOVEMENTS` instead of attention.
    """
    x = torch.randn(1, 64, 2, 16, generator=torch.Generator().manual_seed(rank))
    call_options: dict[str, Any] = {"causal": True, "layout": "zigzag"} | options
    x = x.to(call_options.pop("device", "cpu"))
    movement = MOVEMENTS.get(call_options.pop("movement", ""))
    sums: list[float] = []
    for step in range(STEPS):
        local = x.clone().requires_grad_()
        loss_now = loss if rank == LOST and loss is not None and step == loss.step else None
        try:
            _at(loss_now, "forward", "before", "during")
            if movement is None:
                out = ring_attention(local, local, local, **call_options)
            else:
                out = movement(ContextParallel(), local)
            _at(loss_now, "forward", "after")
            _at(loss_now, "backward", "before", "during")
            out.sum().backward()
            _at(loss_now, "backward", "after")
            assert local.grad is not None
            sums.append(local.grad.double().sum().item())  # waits for the GPU, if it is on one
        except RuntimeError as error:
            return Steps(sums, str(error))
    return Steps(sums, None)


class Outcome(NamedTuple):
    """Ends of all ranks: ``(True, Steps)`` or ``(False, how it died)``."""

    survivors: dict[int, tuple[bool, Any]]
    lost: tuple[bool, Any]
    seconds: float  # until the last survivor had ended
    staying: list[int | None]  # processes left afterwards, zombies included


def lose(loss: Loss, ranks: int, options: dict[str, Any], *, cuda: bool = False) -> Outcome:
    """Start a new group of ranks and lose one of them."""
    pool = LocalRanks(ranks, timeout=TIMEOUT, cuda=cuda)
    processes = [process.pid for process in pool._processes]
    try:
        started = time.monotonic()
        for pipe in pool._pipes:
            pipe.send((steps, (loss, options)))
        survivors = {rank: pool._answer(rank) for rank in range(ranks) if rank != LOST}
        seconds = time.monotonic() - started
        if loss.how == "stopped":
            pool._processes[LOST].kill()
        lost = pool._answer(LOST)
    finally:
        pool.close()
    staying = [process for process in processes if not _is_gone(process)]
    return Outcome(survivors, lost, seconds, staying)


def _is_gone(process: int | None) -> bool:
    """Return True if a process is gone, zombies included, within ten seconds."""
    assert process is not None
    until = time.monotonic() + 10
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(process, 0)
            time.sleep(0.05)
        return False
    return True
