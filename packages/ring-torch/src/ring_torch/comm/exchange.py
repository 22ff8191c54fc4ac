"""Parts of tensors from every rank to every other. Nothing here knows of attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ring_torch.buffers import BufferSpec
from ring_torch.comm.ranks import Ranks, others


def exchange(
    ring: Ranks, parts: Sequence[Sequence[Tensor]], device: torch.device
) -> list[list[Tensor]]:
    """Send part ``n`` of each tensor to rank ``n``; all parts of a tensor have one shape.

    Returns:
        What came, by tensor and rank; this rank's own part is the one given.

    Raises:
        PeerError: A peer failed, or did not answer within the group's timeout.
    """
    spec = BufferSpec.of(*((some[0].shape, some[0].dtype) for some in parts))
    peers = others(ring)
    sends = [(spec.pack([some[peer] for some in parts], device), peer) for peer in peers]
    receives = [(spec.buffer(device), peer) for peer in peers]
    ring.start(sends, receives).wait()
    came = {peer: spec.views(buffer) for buffer, peer in receives}
    came[ring.rank] = [some[ring.rank] for some in parts]
    return [[came[rank][n] for rank in range(ring.size)] for n in range(len(parts))]
