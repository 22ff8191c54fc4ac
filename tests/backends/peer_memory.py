"""Peer memory emulated between CPU processes, by files that all ranks map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
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

    def wait_event(self, event: Now) -> None:
        del event

    def wait_stream(self, stream: Now) -> None:
        del stream


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

    def barrier_with_signature(self, digest: int) -> Now:
        del digest
        return self.barrier()

    def barrier(self) -> Now:
        dist.barrier()
        return self.stream

    def stream_for(self, rank: int, *, after: Now) -> Now:
        del rank
        return after

    def release(self, after: Sequence[Now]) -> None:
        del after
        dist.barrier()  # nobody writes before all have read

    def join(self, stream: Now) -> None:
        del stream

    def wait_reusable(self) -> None:
        pass
