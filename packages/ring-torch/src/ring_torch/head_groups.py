"""Heads in groups: a gathered pass goes group by group, so that transfers hide behind kernels.

While a kernel runs for one group, the keys of the next arrive and the gradients of the last travel
home. What nothing hides is the transfer of a single group.
"""

from __future__ import annotations

from typing import NamedTuple

from ring_core import RingProgram, longest_gather
from ring_core.checks import Sizes

#: FLOPs of a forward that a group is worth: a millisecond and a half on an H200. With less, the
#: host is not ahead of the GPU.
GROUP_FLOPS = 1e12
MOST_GROUPS = 4

#: Gathered keys of up to this many bytes are kept from the forward for the backward, which
#: otherwise fetches them again.
MAX_SAVED_BYTES = 256 << 20

#: Bytes fetched a FLOP of a forward from which on keys do not hide behind one another's launches:
#: those of a ring of four with a key head for every query head, up to 128k tokens. Fewer are not
#: worth more launches.
MIN_BYTES_PER_FLOP = 1e-4

#: FLOPs of a forward from which on gradients are sent in two parts.
EARLY_RETURN_FLOPS = 3e11


class HeadGroups(NamedTuple):
    """Into how many groups heads are cut; the backward cuts what the forward has cut."""

    forward: int
    backward: int
    #: Whether, of the last group, what gradients are done before its last launch go home beside it.
    early: bool


ONE_GROUP = HeadGroups(1, 1, early=False)


def head_groups_of(program: RingProgram, sizes: Sizes, itemsize: int) -> HeadGroups:
    """Groups for a call that gathers keys, the same on all ranks."""
    dims = sizes.head_dim + sizes.v_head_dim
    plan = program.plan
    pairs = int(program.work().sum()) * sizes.batch // plan.cp_size
    flops = 2 * pairs * sizes.q_heads * dims
    size = longest_gather(plan).length * sizes.batch * sizes.kv_heads * dims * itemsize
    moved = size if size <= MAX_SAVED_BYTES else 2 * size
    groups = 1
    if moved > MIN_BYTES_PER_FLOP * flops:
        most = min(MOST_GROUPS, int(flops / GROUP_FLOPS))
        groups = max(n for n in range(1, max(most, 1) + 1) if sizes.kv_heads % n == 0)
    return HeadGroups(groups, groups, early=flops > EARLY_RETURN_FLOPS)
