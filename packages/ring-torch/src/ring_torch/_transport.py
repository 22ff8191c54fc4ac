"""How keys travel: the choice among the ways, and why not."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ring_core import Plan, UnsupportedError, gather_memory, gather_refusals
from ring_torch._comm import Ring

#: ``p2p``: round the ring, in messages. ``gather``: all that a rank needs at once, in messages.
#: ``pull``: the same, copied out of the peers' memory.
TRANSPORTS = ("auto", "p2p", "gather", "pull")

#: Those that bring all a rank needs at once.
GATHERED = ("gather", "pull")

#: ``auto`` does not gather where that takes more than this many times a ring's memory.
MOST_MEMORY = 3.0


def choose_transport(
    transport: str,
    ring: Ring,
    plan: Plan,
    device: torch.device,
    *,
    widths: tuple[int, int, int],
    probe: bool,
) -> str:
    """The transport a call named, or with ``auto`` the fastest that can do it.

    ``auto`` copies out of the peers' memory where it can and that takes no more than
    ``MOST_MEMORY`` times what a ring does.

    Args:
        transport: One of ``TRANSPORTS``.
        ring: The ranks.
        plan: What they compute.
        device: Where the tensors are.
        widths: Numbers a query token and a key token, and bytes of a number.
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
        return "p2p" if reasons or _is_large(plan, *widths) else "pull"
    if reasons:
        raise UnsupportedError(
            f"transport {transport!r}: {'; '.join(reasons)}. Instead: use transport='p2p' or 'auto'"
        )
    return transport


def _is_large(plan: Plan, q_width: int, kv_width: int, itemsize: int) -> bool:
    memory = gather_memory(plan, q_width=q_width, kv_width=kv_width, itemsize=itemsize)
    return memory > MOST_MEMORY


def _pull_refusals(ring: Ring, device: torch.device, *, probe: bool) -> list[str]:
    if device.type != "cuda" or dist.get_backend(ring.group) != "nccl":
        return ["copies out of the peers' memory need CUDA tensors and a nccl group"]
    return list(ask_peers(ring)) if probe else list(_known(ring) or ())


def ask_peers(ring: Ring) -> tuple[str, ...]:
    """Why ranks cannot copy out of each other's memory; they talk about it once a group."""
    if ring.size == 1 or dist.get_backend(ring.group) != "nccl":
        return ()
    from ring_torch._window import window_of

    return window_of(ring).refusals


def _known(ring: Ring) -> tuple[str, ...] | None:
    """The same, or ``None`` if they have not talked yet."""
    if ring.size == 1 or dist.get_backend(ring.group) != "nccl":
        return ()
    from ring_torch._window import known_window

    window = known_window(ring)
    return None if window is None else window.refusals


def describe_transport(
    transport: str, ring: Ring, plan: Plan, device: torch.device, widths: tuple[int, int, int]
) -> str:
    """A few lines for ``explain``: the transport of a call, and why it is not a faster one."""
    lines = [f"transport {transport}"]
    if ring.size == 1:
        return f"{lines[0]} (one rank: nothing travels)"
    if transport == "pull" and _known(ring) is None:
        lines[0] += ", if the ranks' GPUs reach each other's memory: the first call asks them"
    if transport != "pull":
        reasons = [*gather_refusals(plan), *_pull_refusals(ring, device, probe=False)]
        if not reasons and _is_large(plan, *widths):
            reasons = [f"it takes more than {MOST_MEMORY:g} times the memory of p2p"]
        lines.append(f"  not pull: {'; '.join(reasons) or 'another one was named'}")
    return "\n".join(lines)
