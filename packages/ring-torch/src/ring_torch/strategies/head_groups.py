"""Number of groups into which strategy ``gather`` cuts the heads of a call."""

from __future__ import annotations

from ring_core import RingProgram, longest_gather
from ring_core.checks import Sizes
from ring_core.choose.gathering import MAX_SAVED_BYTES
from ring_torch.buffers import HeadGroups

#: Least FLOPs of a forward for each group of heads: about 1.5 ms on an H200. With shorter groups
#: the host cannot launch ahead of the GPU.
GROUP_FLOPS = 1e12
MOST_GROUPS = 4

#: Bytes fetched per FLOP of a forward above which heads are cut into groups. It is the ratio of
#: four ranks with as many K/V heads as query heads at 128k tokens. Below, fetches hide behind the
#: launches of a single group, and more launches do not pay.
MIN_BYTES_PER_FLOP = 1e-4

#: Most bytes of own dK/dV in float32 that a group of heads may take in a backward where some rows
#: see own keys only. Above, heads are cut into more groups; sums of dQ shrink with them.
MOST_SUM_BYTES = 1 << 28

#: FLOPs of a forward above which dK/dV travel home in two parts, the first beside a launch.
EARLY_RETURN_FLOPS = 3e11


def head_groups_of(program: RingProgram, sizes: Sizes, itemsize: int) -> HeadGroups:
    """Return into how many groups of heads a call is cut, the same on all ranks.

    It weighs the bytes of the longest gathered buffer of a rank, twice if these are so many that
    the backward fetches them again, against the mean FLOPs of a rank. If some rows are launched
    over own K/V in place, the backward gets more groups, until a group's sums of dK/dV fit into
    ``MOST_SUM_BYTES``. ``itemsize`` is the bytes of a number of q, k and v.
    """
    dims = sizes.head_dim + sizes.v_head_dim
    plan = program.plan
    pairs = int(program.work().sum()) * sizes.batch // plan.cp_size
    flops = 2 * pairs * sizes.q_heads * dims
    longest, numbers = longest_gather(plan), sizes.batch * sizes.kv_heads * dims  # of a token
    size = longest.length * numbers * itemsize
    fetched_bytes = size if size <= MAX_SAVED_BYTES else 2 * size
    # Every rank has the same plan and sizes, so all cut alike: their messages are of the same
    # groups.
    most_groups = max(1, min(MOST_GROUPS, int(flops / GROUP_FLOPS)))
    allowed = [n for n in range(1, most_groups + 1) if sizes.kv_heads % n == 0]
    forward = backward = allowed[-1] if fetched_bytes > MIN_BYTES_PER_FLOP * flops else 1
    if longest.in_place and forward == 1:
        sum_bytes = max(itemsize, 4) * plan.k_layout.local_len * numbers
        backward = next((n for n in allowed if sum_bytes <= n * MOST_SUM_BYTES), allowed[-1])
    return HeadGroups(forward, backward, before_last_item=flops > EARLY_RETURN_FLOPS)
