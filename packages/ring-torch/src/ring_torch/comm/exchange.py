"""Exchanges in which every rank waits for all others: parts of tensors, and torch's collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ring_torch.buffers import BufferSpec
from ring_torch.comm.ranks import PeerError, Ranks, run_collective


def collective(ranks: Ranks, name: str, start: Callable[[], dist.Work | None]) -> None:
    """Run a collective so that its error names it; refuse it on a closed group.

    Args:
        ranks: The ranks of the group.
        name: Name of the call, for messages.
        start: Starts it with ``async_op=True``.

    Raises:
        RuntimeError: A pass of an earlier call failed, or a peer did.
    """
    ranks.begin_pass()
    try:
        run_collective(ranks, start)
    except PeerError as error:
        raise RuntimeError(f"{name}: rank {ranks.rank} {error}") from error


def exchange(
    ranks: Ranks, parts: Sequence[Sequence[torch.Tensor]], device: torch.device
) -> list[list[torch.Tensor]]:
    """Send part ``n`` of each tensor to rank ``n``, and wait for what all ranks send.

    All parts of a tensor have one shape, which is the same on all ranks. The parts for a rank
    travel in one message.

    Returns:
        The received parts, by tensor and then by rank; this rank's own part is the one given.

    Raises:
        PeerError: A peer failed, or did not answer within the group's timeout.
    """
    spec = BufferSpec.of(*((blocks[0].shape, blocks[0].dtype) for blocks in parts))
    peers = ranks.peers
    sends = [(spec.pack([blocks[peer] for blocks in parts], device), peer) for peer in peers]
    receives = [(spec.buffer(device), peer) for peer in peers]
    # All pairs of ranks exchange at the same time; buffers are this exchange's own.
    ranks.start(sends, receives).wait()
    received = {peer: spec.views(buffer) for buffer, peer in receives}
    # This rank's own part has not travelled.
    received[ranks.rank] = [blocks[ranks.rank] for blocks in parts]
    return [[received[rank][n] for rank in range(ranks.size)] for n in range(len(parts))]
