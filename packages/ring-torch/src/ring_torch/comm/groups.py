"""Facts about a process group: its members, their hosts, and the devices it sends from."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ring_core.base.arguments import not_none
from ring_torch.comm.ranks import Ranks, is_foreign, peer_errors, ranks_of
from ring_torch.comm.store import backend_of, read_hosts, timeout_of


class Members(NamedTuple):
    """A group as any rank knows it, also one that it has no part in.

    Attributes:
        group: Process group, one-dimensional ``DeviceMesh``, a rank alone, or ``None``.
        ranks: Global ranks of its members, in the order of the group.
    """

    group: Any
    ranks: tuple[int, ...]


def members_of(group: Any) -> Members:
    """Return the members of a group, or of a one-dimensional ``DeviceMesh`` of any ranks.

    Raises:
        ValueError: It is neither, or a process group that this rank is not in.
    """
    if is_foreign(group):
        # Torch orders the ranks of a group.
        return Members(group, tuple(sorted(group.mesh.flatten().tolist())))
    # A rank of the group counts as using it from here on: the others learn its host.
    ranks = ranks_of(group)
    if ranks.group is None:
        return Members(group, (0,))
    return Members(group, tuple(dist.get_process_group_ranks(ranks.group)))


def hosts_of(ranks: Ranks, device: torch.device, *, wait: bool) -> tuple[str, ...]:
    """Return the name of each rank's host. Ranks leave it in the store when they first use a group.

    Args:
        ranks: All ranks of a group.
        device: Device whose messages have the timeout.
        wait: True to wait for ranks that have not used the group yet, up to the group's timeout.

    Raises:
        PeerError: A rank has not used the group.
        ValueError: This process was forked from one that had made the group.
        RuntimeError: A pass of an earlier call failed.
    """
    # Hosts do not change while a group lives: the store is asked once.
    if ranks.state.hosts is None:
        ranks.check_open()
        group, timeout = not_none(ranks.group), timedelta(0)
        if wait:
            timeout = timeout_of(group, device)
        with peer_errors(ranks.peers):
            ranks.state.hosts = read_hosts(group, ranks.size, timeout)
    return ranks.state.hosts


def default_device(ranks: Ranks) -> torch.device:
    """Return the device on which the backend of a group communicates."""
    return torch.device(
        "cuda" if ranks.group and dist.get_backend(ranks.group) == "nccl" else "cpu"
    )


def check_device(ranks: Ranks, device: torch.device) -> None:
    """Refuse a device whose tensors the backend of the group cannot send.

    Raises:
        ValueError: The group has no backend for the device.
    """
    try:
        backend_of(not_none(ranks.group), device)
    except RuntimeError as error:
        raise ValueError(
            f"the process group ({dist.get_backend(ranks.group)}) sends no tensors of device "
            f"{str(device)!r}: move them, or give a group that does"
        ) from error


def warn_if_alone() -> None:
    """Warn if a launcher started several processes but no process group is initialised.

    Under Python's default filters a process shows the warning once, as it has one source line.
    """
    size = os.environ.get("WORLD_SIZE", "")
    if dist.is_available() and dist.is_initialized():
        return
    if size.isdecimal() and int(size) > 1:
        warnings.warn(
            f"WORLD_SIZE is {size}, but torch.distributed is not initialized: each process holds "
            f"whole sequences and attends alone. Call torch.distributed.init_process_group() before "
            f"the first use, or unset WORLD_SIZE if that is meant",
            stacklevel=1,
        )
