"""Ranks on this machine, one process each, for tests, demonstrations and benchmarks.

Real jobs start their ranks with ``torchrun`` or a scheduler.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ring_core import checks
from ring_core.base.arguments import check_size, numbers_as_python

# Modules that are imported once, before ranks are forked, as they take seconds to import.
PRELOADED = ("torch._dynamo", "torch.distributed", "ring_torch")

_GRACE = 5.0  # seconds that ranks get after another has failed, or to end
_MOST_PROCESSES = 1024  # most processes on a machine, or threads of one


class LocalRankError(RuntimeError):
    """Error of a function that failed on some ranks; the message holds their tracebacks."""


class LocalRanks(AbstractContextManager["LocalRanks"]):
    """Processes on this machine that are joined in a process group and run functions together.

    They stay alive between functions, until the block ends or :meth:`close` is called.

    Args:
        world_size: Number of processes.
        timeout: Seconds after which a rank gives up waiting for another.
        threads: Number of threads that each rank computes with.
        patience: Seconds after which :meth:`run` gives up waiting for results; ``None`` for never.
        cuda: True to give each rank a GPU and join them with NCCL; False to join them with gloo,
            over the loopback interface.

    Raises:
        ValueError: An argument is malformed.

    Example::

        with LocalRanks(4) as ranks:
            results = ranks.run(function, argument)  # function(rank, argument) on every rank
    """

    @numbers_as_python
    def __init__(
        self,
        world_size: int,
        *,
        timeout: float = 60.0,
        threads: int = 1,
        patience: float | None = 600.0,
        cuda: bool = False,
    ) -> None:
        for name, value in (("world_size", world_size), ("threads", threads)):
            check_size(name, value, high=_MOST_PROCESSES + 1)
        for name, seconds in (("timeout", timeout), ("patience", patience)):
            if seconds is None and name == "patience":
                continue
            if (
                not isinstance(seconds, int | float)
                or isinstance(seconds, bool)
                or not 0 < seconds <= timedelta.max.days
            ):
                raise ValueError(f"{name} must be a number of seconds above 0, got {seconds!r}")
        checks.check_flag("cuda", cuda)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self._patience = patience
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = f"file://{Path(self._folder.name) / 'rendezvous'}"
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(child_end, rank, world_size, rendezvous, timeout, threads, cuda),
                daemon=True,
            )
            process.start()
            child_end.close()
            self._pipes.append(parent_end)
            self._processes.append(process)
        self._pending = [0] * world_size  # number of answers not read yet, by rank

    def __len__(self) -> int:
        return len(self._pipes)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(rank, *args)`` on every rank, and return the results by rank.

        Once a rank has failed, the others get 5 seconds more. A later result is dropped, and the
        process group may be unusable from then on.

        Args:
            function: A function that can be imported by name.
            *args: Arguments; they and the result must be picklable.

        Raises:
            LocalRankError: A rank raised an error, died, or did not answer in time.
        """
        answers = self.answers(function, *args, grace=_GRACE)
        errors = [
            f"rank {rank}: {text}"
            for rank, (succeeded, text) in enumerate(answers)
            if not succeeded
        ]
        if errors:
            raise LocalRankError("\n".join(errors))
        return [value for _, value in answers]

    def answers(
        self, function: Callable[..., Any], *args: Any, grace: float | None = None
    ) -> list[tuple[bool, Any]]:
        """Run a function on every rank; return ``(True, result)`` or ``(False, error)`` by rank.

        A rank that has not answered after ``patience`` counts as failed.

        Args:
            function: A function that can be imported by name.
            *args: Arguments; they and the result must be picklable.
            grace: Seconds that the other ranks get after the first failure; ``None`` for no other
                limit than ``patience``.
        """
        for rank, pipe in enumerate(self._pipes):
            self._pending[rank] += 1
            with suppress(OSError):  # the rank has died, which reading its answer will show
                pipe.send((function, args))
        # Collect answers in the order in which they come. A rank that did not answer an earlier
        # call in time sends that answer first; it is dropped.
        answers: dict[int, tuple[bool, Any]] = {}
        until = math.inf if self._patience is None else time.monotonic() + self._patience
        while pending := [pipe for n, pipe in enumerate(self._pipes) if n not in answers]:
            remaining = until - time.monotonic()
            ready = wait(pending, None if remaining == math.inf else max(0.0, remaining))
            if not ready:
                break
            for rank in (n for n, pipe in enumerate(self._pipes) if pipe in ready):
                answer = self._answer(rank)
                self._pending[rank] -= 1
                if self._pending[rank]:  # the answer to an earlier call
                    continue
                answers[rank] = answer
                if not answer[0] and grace is not None:
                    until = min(until, time.monotonic() + grace)
        return [answers.get(n, (False, "no answer in time")) for n in range(len(self._pipes))]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        """Receive the next answer of a rank; if it has died, return its exit code as an error."""
        try:
            answer: tuple[bool, Any] = self._pipes[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join(5)
            return False, f"died with exit code {self._processes[rank].exitcode}"
        return answer

    def close(self) -> None:
        """End all processes; those that do not end within seconds are killed."""
        for pipe in self._pipes:
            pipe.close()
        until = time.monotonic() + _GRACE
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __exit__(self, *_error: object) -> None:
        self.close()


def _serve(
    pipe: Connection,
    rank: int,
    world_size: int,
    rendezvous: str,
    timeout: float,
    threads: int,
    cuda: bool,
) -> None:
    """Run as one rank: join the process group, then run functions until the pipe closes."""
    failure = None
    try:
        _join(rank, world_size, rendezvous, timeout, threads, cuda=cuda)
    except Exception:  # noqa: BLE001 - whatever went wrong is the answer to all that is asked
        failure = traceback.format_exc()
    while True:
        try:
            function, args = pipe.recv()
            answer = (False, failure) if failure else (True, function(rank, *args))
        except EOFError:
            break
        except Exception:  # noqa: BLE001 - whatever went wrong is the answer
            answer = (False, traceback.format_exc())
        pipe.send(answer)
    os._exit(0)  # peers may be gone; an orderly shutdown would wait for them


def _join(
    rank: int, world_size: int, rendezvous: str, timeout: float, threads: int, *, cuda: bool
) -> None:
    """Make this process a rank of a process group."""
    # Use the loopback interface: looking up the host's name may take seconds.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
        device_id=torch.device("cuda", rank) if cuda else None,
    )
    if not cuda:
        # gloo lets a rank go on while others still connect to it; one whose function then
        # destroys the group would cut them off.
        dist.barrier()
