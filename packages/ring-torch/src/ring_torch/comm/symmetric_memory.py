"""Memory of a rank's that its peers read and write: PyTorch's symmetric memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_torch.buffers import BufferSpec
from ring_torch.capture import is_capturing
from ring_torch.comm.ranks import Ranks

_MOST_VIEWS = 1024


@dataclass
class SymmetricMemory:
    """A buffer of every rank's, equally long, that grows: a header, and room after it."""

    ring: Ranks
    header: int  # bytes, zero at first
    handle: Any = None  # of all ranks' buffers
    _memory: Tensor | None = None
    _in_graphs: bool = False  # whether CUDA graphs hold addresses of this memory
    _kept: list[object] = field(default_factory=list)  # what they hold that no call needs any more
    _views: dict[tuple[int, int, BufferSpec], list[Tensor]] = field(default_factory=dict)

    def reserve(self, size: int) -> bool:
        """Make room for so many bytes after the header, on all ranks alike; whether it is new.

        What a CUDA graph holds, as it is captured, stays.
        """
        if self._memory is not None and self._memory.numel() >= self.header + size:
            self._in_graphs = self._in_graphs or is_capturing()
            return False
        with torch.inference_mode(mode=False):  # passes that train will write there
            self._reserve_new(size)
        return True

    def _reserve_new(self, size: int) -> None:
        """Take new memory, once nobody uses the old."""
        import torch.distributed._symmetric_memory as symm_mem

        assert self.ring.group is not None
        torch.cuda.synchronize()  # peers may still be reading the old one
        dist.barrier(group=self.ring.group)
        if self._in_graphs:
            self._kept.append((self._memory, self.handle))
        self._views.clear()
        self._memory, self.handle, self._in_graphs = None, None, False
        device = torch.device("cuda", torch.cuda.current_device())
        self._memory = symm_mem.empty(self.header + size, dtype=torch.uint8, device=device)
        self._memory[: self.header].zero_()
        torch.cuda.synchronize()  # it is zero before any peer writes there
        self.handle = symm_mem.rendezvous(self._memory, self.ring.group)

    def headers(self) -> list[Tensor]:
        """Each rank's header, int64."""
        words = self.header // torch.int64.itemsize
        ranks = range(self.ring.size)
        with torch.inference_mode(mode=False):
            return [self.handle.get_buffer(rank, (words,), torch.int64, 0) for rank in ranks]

    def views(self, rank: int, start: int, packing: BufferSpec) -> list[Tensor]:
        """The tensors of a message in a rank's buffer, behind the header."""
        key = (rank, start, packing)
        if len(self._views) > _MOST_VIEWS:
            self._views.clear()
        if key not in self._views:
            at = self.header + start
            with torch.inference_mode(mode=False):
                part = self.handle.get_buffer(rank, (packing.size,), torch.uint8, at)
                self._views[key] = packing.views(part)
        return self._views[key]
