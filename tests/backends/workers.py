"""Processes that stay: one per rank, started once for each world size, fed functions to run."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PATIENCE = 120.0


class WorkerError(AssertionError):
    """A function failed on some ranks; the message holds their tracebacks."""


class Pool:
    """``world_size`` gloo ranks that run the functions they are sent, together."""

    def __init__(self, world_size: int, *, timeout: float = 60.0) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "torch.distributed", "ring_torch"])
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world_size, store, timeout), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(rank, *args)`` on every rank; what each returned.

        Raises:
            WorkerError: A rank raised, died or did not answer.
        """
        answers = self.answers(function, *args)
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            raise WorkerError("\n".join(failures))
        return [value for _, value in answers]

    def answers(self, function: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        """``(True, value)`` or ``(False, traceback)`` of every rank."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: list[tuple[bool, Any]] = []
        for rank, pipe in enumerate(self._pipes):
            try:
                answers.append(pipe.recv() if pipe.poll(PATIENCE) else (False, "no answer in time"))
            except EOFError:
                self._processes[rank].join(5)
                answers.append((False, f"died with exit code {self._processes[rank].exitcode}"))
        return answers

    def close(self) -> None:
        """End all processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, rank: int, world_size: int, store: str, timeout: float) -> None:
    """Be one rank until the pipe closes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            answer = (True, function(rank, *args))
        except Exception:  # noqa: BLE001 - whatever went wrong is the answer
            answer = (False, traceback.format_exc())
        pipe.send(answer)
    os._exit(0)  # peers may be gone; an orderly shutdown would wait for them
