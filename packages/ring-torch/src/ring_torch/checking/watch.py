"""Bytes and time of a checked pass, and what ranks tell each other that they have found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ring_torch.comm.exchange import exchange
from ring_torch.comm.ranks import Ranks
from ring_torch.transports.api import counted_by

_NOTE = 2048  # bytes of the message in which a rank tells the others what it has found


class Watch(TorchDispatchMode):
    """Dispatch mode that counts the bytes sent or read from peers in a block, and takes the time.

    Messages are counted at torch's operations of process groups: sends, all-to-alls and all-gathers
    into one tensor. Copies out of peers' memory are no such operations;
    :func:`ring_torch.transports.api.counted_by` reports them.

    Args:
        device: Device on which the call computes.

    Attributes:
        sent: Bytes of messages sent.
        read: Bytes read from peers' memory.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the base has no types
        self.sent = self.read = 0
        self._device = device
        self._marks: list[Any] = []
        self._reads = counted_by(self._add_read)

    def __enter__(self) -> Self:
        self._mark()
        self._reads.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]  # the base has no types
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # the base has no types
        self._reads.__exit__(None, None, None)
        self._mark()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name  # noqa: SLF001 - an operator has no public name
        if name == "c10d::send":
            self.sent += sum(x.nbytes for x in args[0])
        elif name == "c10d::alltoall_base_":
            self.sent += _bytes_for_others(args[1], dist.ProcessGroup.unbox(args[2]), args[4])
        elif name == "c10d::_allgather_base_":
            self.sent += args[1].nbytes * (dist.ProcessGroup.unbox(args[2]).size() - 1)
        return func(*args, **(kwargs or {}))

    @property
    def seconds(self) -> float:
        """Seconds that the block took, on a GPU by its own clock for what was queued there."""
        start, end = self._marks
        if self._device.type != "cuda":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _add_read(self, size: int) -> None:
        """Count bytes that were read from a peer's memory."""
        self.read += size

    def _mark(self) -> None:
        """Record a point in time, on a GPU as an event of the current stream."""
        mark: Any = time.perf_counter()
        if self._device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append(mark)


def _bytes_for_others(sent: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> int:
    """Return how many bytes of an all-to-all leave this rank; without ``sizes`` parts are equal."""
    if not sizes:
        return sent.nbytes // group.size() * (group.size() - 1)
    return sent.nbytes // max(len(sent), 1) * (sum(sizes) - sizes[group.rank()])


def shared_findings(ranks: Ranks, messages: Sequence[str], device: torch.device) -> str | None:
    """Tell all ranks what this one has found, and return what any of them has, on all alike.

    Args:
        ranks: Ranks of the group, all of which call this at the same time.
        messages: What this rank has found.
        device: Device of the call's tensors.

    Returns:
        The findings by rank, as one text, each rank's cut to ``_NOTE`` bytes; ``None`` if no rank
        has any.

    Raises:
        PeerError: A peer failed, or did not answer within the group's timeout.
    """
    note = "; ".join(messages).encode()[:_NOTE].ljust(_NOTE, b"\0")
    local = torch.frombuffer(bytearray(note), dtype=torch.uint8).to(device)
    by_rank = exchange(ranks, [[local] * ranks.size], device)[0]
    received = torch.stack(by_rank).cpu().numpy()  # one copy, as each waits for the device
    notes = [bytes(x).rstrip(b"\0").decode(errors="replace") for x in received]
    return "; ".join(f"rank {n}: {text}" for n, text in enumerate(notes) if text) or None
