"""Peer memory emulated between CPU processes, by files that all ranks map."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_torch.buffers import BufferSpec
from ring_torch.comm.ranks import Ranks


class OnFiles:
    """Stand-in for :class:`SymmetricMemory`: one memory-mapped file for each rank."""

    folder: Path
    made = 0

    def __init__(self, ranks: Ranks, header: int) -> None:
        self.ranks, self.header, self.files = ranks, header, list[Any]()

    def reserve(self, size: int) -> bool:
        if self.files and self.files[0].size >= self.header + size:
            return False
        OnFiles.made += 1
        paths = [self.folder / f"{OnFiles.made}-{rank}" for rank in range(self.ranks.size)]
        np.memmap(paths[self.ranks.rank], np.uint8, "w+", shape=(self.header + size,)).flush()
        dist.barrier()
        self.files = [np.memmap(path, np.uint8, "r+") for path in paths]
        return True

    def headers(self) -> list[Tensor]:
        return [torch.from_numpy(x[: self.header].view(np.int64)) for x in self.files]

    def views(self, rank: int, start: int, packing: BufferSpec) -> list[Tensor]:
        start += self.header
        # A storage of its own: the interpreter copies a tensor's whole storage.
        return packing.views(torch.from_numpy(self.files[rank][start : start + packing.size]))


class Now:
    """Stand-in for a CUDA stream or event: all work is done at once, so nothing ever waits."""

    def record_event(self) -> Now:
        return self

    def wait_event(self, _: Now) -> None: ...

    def wait_stream(self, _: Now) -> None: ...


@dataclass
class BufferOnFiles:
    """Stand-in for :class:`SymmBuffer`: barriers are real; copies are made at once."""

    ranks: Ranks
    stream: Now = field(default_factory=Now)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    memory: OnFiles = field(init=False)

    def __post_init__(self) -> None:
        self.memory = OnFiles(self.ranks, 0)

    def reserve(self, size: int) -> None:
        self.memory.reserve(size)

    def barrier_with_signature(self, _: int) -> Now:
        return self.barrier()

    def barrier(self) -> Now:
        dist.barrier()
        return self.stream

    def stream_for(self, _: int, *, after: Now) -> Now:
        return after

    def release(self, _: Sequence[Now]) -> None:
        dist.barrier()  # nobody writes before all have read

    def join(self, _: Now) -> None: ...

    def wait_reusable(self) -> None: ...


def interpret_one_kernel(patched: pytest.MonkeyPatch, folder: Path) -> None:
    """Patch the one-kernel transport: interpreted, one program per rank, memory in files."""
    from triton.runtime import interpreter

    from ring_torch.transports import exchange_kernel, one_kernel

    def now() -> int:
        time.sleep(1e-3)  # lets the awaited ranks run
        return time.monotonic_ns()

    OnFiles.folder = folder
    patched.setattr(one_kernel, "SymmetricMemory", OnFiles)
    patched.setattr(one_kernel, "_programs", lambda _: (1, 1))
    patched.setattr(one_kernel.ExchangeState, "_wait_last", lambda _: None)
    patched.setattr(exchange_kernel, "_now", now)
    checking = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
    patched.setattr(interpreter.interpreter_builder, "options", checking)
