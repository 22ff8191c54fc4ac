"""How keys travel: the choice among the ways, and why not."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ring_core import Plan, UnsupportedError, gather_refusals
from ring_torch._comm import Ring

#: ``p2p``: round the ring, in messages. ``gather``: all that a rank needs at once, in messages.
#: ``pull``: the same, copied out of the peers' memory.
TRANSPORTS = ("auto", "p2p", "gather", "pull")


def choose_transport(
    transport: str, ring: Ring, plan: Plan, device: torch.device, *, probe: bool
) -> str:
    """The transport a call named, or with ``auto`` the fastest that can do it.

    Gathered keys take more memory than a ring's two slots, so ``auto`` gathers only on one host.

    Args:
        transport: One of ``TRANSPORTS``.
        ring: The ranks.
        plan: What they compute.
        device: Where the tensors are.
        probe: Whether peers may be asked if they reach each other's memory.

    Raises:
        UnsupportedError: The one named cannot do this call.
    """
    if ring.size == 1 or transport == "p2p":
        return "p2p"
    reasons = list(gather_refusals(plan))
    if transport != "gather":
        reasons += _pull_refusals(ring, device, probe=probe)
    if transport == "auto":
        return "p2p" if reasons else "pull"
    if reasons:
        raise UnsupportedError(
            f"transport {transport!r}: {'; '.join(reasons)}. Instead: use transport='p2p' or 'auto'"
        )
    return transport


def _pull_refusals(ring: Ring, device: torch.device, *, probe: bool) -> list[str]:
    if device.type != "cuda" or dist.get_backend(ring.group) != "nccl":
        return ["copies out of the peers' memory need CUDA tensors and a nccl group"]
    if not probe:
        return []
    from ring_torch._window import reaches

    return [] if reaches(ring) else ["the ranks' GPUs do not reach each other's memory"]
