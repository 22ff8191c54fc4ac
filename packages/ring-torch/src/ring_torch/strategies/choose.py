"""Which strategy and transport a call takes, and why not others."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ring_core import (
    Plan,
    StrategyConfig,
    StrategyName,
    UnsupportedError,
    gather_memory,
    gather_refusals,
)
from ring_torch.call import Call
from ring_torch.comm.ranks import Ranks
from ring_torch.strategies.sessions import TRANSPORTS

#: ``auto`` does not gather where that takes more than this many times a ring's memory.
MOST_MEMORY = 3.0

#: Strategies and transports that a name may mean, the fastest first.
_PAIRS: dict[str, tuple[tuple[StrategyName, str], ...]] = {
    "auto": (("gather", "symm_mem"), ("ring", "p2p")),
    "ring": (("ring", "p2p"),),
    "balanced": (("balanced", "p2p"),),
    "gather": (("gather", "symm_mem"), ("gather", "p2p")),
    "ulysses": (("ulysses", "p2p"),),
}

TRANSPORT_NAMES = ("auto", *TRANSPORTS)


def choose_strategy(
    strategy: str,
    transport: str,
    ring: Ranks,
    plan: Plan,
    device: torch.device,
    *,
    widths: tuple[int, int, int],
    probe: bool,
) -> tuple[StrategyName, str]:
    """The strategy and the transport of a call, or with ``auto`` the fastest that can do it.

    ``auto`` gathers by copies out of the peers' memory where it can and that takes no more than
    ``MOST_MEMORY`` times what a ring does.

    Args:
        strategy: A name.
        transport: One of ``TRANSPORT_NAMES``.
        ring: The ranks.
        plan: What they compute.
        device: Where the tensors are.
        widths: Numbers a query token and a key token, and bytes of a number.
        probe: Whether peers may be asked if they reach each other's memory.

    Raises:
        UnsupportedError: What was named cannot do this call.
    """
    alone = StrategyConfig(strategy).ring_strategy
    pairs = [(name, way) for name, way in _PAIRS[strategy] if transport in ("auto", way)]
    if not pairs:
        raise UnsupportedError(
            f"strategy {strategy!r} sends messages, and transport {transport!r} copies out of the "
            f"peers' memory. Instead: use transport='p2p' or 'auto', or strategy='gather'"
        )
    if ring.size == 1:
        return alone, "p2p"
    for name, way in pairs:
        reasons = list(gather_refusals(plan)) if name == "gather" else []
        if way == "symm_mem":
            reasons += _symm_mem_refusals(ring, device, probe=probe)
        if name == "gather" and (strategy, transport) == ("auto", "auto") and not reasons:
            reasons += _memory_refusals(plan, *widths)
        if not reasons:
            return name, way
    raise UnsupportedError(
        f"strategy {strategy!r} over transport {pairs[-1][1]!r}: {'; '.join(reasons)}. "
        f"Instead: use strategy='ring' or 'auto' and transport='p2p' or 'auto'"
    )


def _memory_refusals(plan: Plan, q_width: int, kv_width: int, itemsize: int) -> list[str]:
    if gather_memory(plan, q_width=q_width, kv_width=kv_width, itemsize=itemsize) <= MOST_MEMORY:
        return []
    return [f"it takes more than {MOST_MEMORY:g} times the memory of a ring"]


def _symm_mem_refusals(ring: Ranks, device: torch.device, *, probe: bool) -> list[str]:
    if device.type != "cuda" or dist.get_backend(ring.group) != "nccl":
        return ["copies out of the peers' memory need CUDA tensors and a nccl group"]
    return list(peer_refusals(ring, probe=probe) or ())


def peer_refusals(ring: Ranks, *, probe: bool) -> tuple[str, ...] | None:
    """Why ranks cannot copy out of each other's memory; they talk about it once a group.

    ``None`` if they have not talked yet and, without ``probe``, shall not.
    """
    if ring.size == 1 or dist.get_backend(ring.group) != "nccl":
        return ()
    from ring_torch.transports.symm_buffer import known_buffer, symm_buffer_of

    found = symm_buffer_of(ring) if probe else known_buffer(ring)
    return None if found is None else found.refusals


def describe_strategy(call: Call, widths: tuple[int, int, int]) -> str:
    """A few lines for ``explain``: how a call's tokens move, and why not in a faster way."""
    ring, plan = call.ring, call.plan
    lines = [f"strategy {call.strategy.name}, transport {call.transport}"]
    if ring.size == 1:
        return f"{lines[0]} (one rank: nothing travels)"
    if call.transport == "symm_mem" and peer_refusals(ring, probe=False) is None:
        lines[0] += ", if the ranks' GPUs reach each other's memory: the first call asks them"
    if call.transport != "symm_mem":
        reasons = [*gather_refusals(plan), *_symm_mem_refusals(ring, call.device, probe=False)]
        reasons = reasons or _memory_refusals(plan, *widths)
        lines.append(f"  not gather over symm_mem: {'; '.join(reasons) or 'another one was named'}")
    return "\n".join(lines)
