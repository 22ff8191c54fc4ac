"""Memory of gathered keys, by which ``strategy="auto"`` decides in every framework."""

from __future__ import annotations

from ring_core.base.arguments import check_size, numbers_as_python
from ring_core.base.config import Request
from ring_core.plan.plan import Plan
from ring_core.programs.gather import longest_gather

#: ``auto`` does not gather where that takes more than this many times a ring's memory.
MOST_MEMORY = 3.0

#: Gathered keys of up to this many bytes are kept from the forward for the backward, which
#: otherwise fetches them again.
MAX_SAVED_BYTES = 256 << 20


@numbers_as_python
def gather_memory(
    plan: Plan, *, q_width: int, kv_width: int, itemsize: int, buffer_len: int | None = None
) -> float:
    """Return the memory that gathering takes in forward and backward, as a multiple of a ring's.

    A ring holds two slots of K/V, dQ and three times dK/dV. Gathering holds the K/V in the longest
    buffer with their gradients, and the rank's own K/V and gradients a second time. Gradients take
    4 bytes per number. The dQ of a gather is not counted.

    Args:
        plan: The plan.
        q_width: Numbers per query token, ``H * D``.
        kv_width: Numbers per key token, ``K * (D + Dv)``.
        itemsize: Bytes of a number of the inputs.
        buffer_len: Number of keys in the longest buffer. ``None`` is that of ranks which fetch what
            their queries see (:func:`longest_gather`), of a plan that can gather
            (:func:`gather_refusals`).

    >>> from ring_core import Mask, gather_memory, make_plan
    >>> plan = make_plan(Mask(), seq_len=4096, cp_size=4)
    >>> round(gather_memory(plan, q_width=2048, kv_width=1024, itemsize=2), 2)
    1.25
    """
    queries, keys = plan.q_layout.local_len, plan.k_layout.local_len
    if buffer_len is None:
        buffer_len = longest_gather(plan).length
    else:
        buffer_len = check_size("buffer_len", buffer_len)
    ring = keys * kv_width * (2 * itemsize + 3 * 4) + queries * q_width * 4
    return (buffer_len + keys) * kv_width * (itemsize + 4) / ring


def memory_refusals(
    plan: Plan, request: Request, *, itemsize: int, buffer_len: int | None = None
) -> tuple[str, ...]:
    """Return why ``auto`` does not gather: memory beyond ``MOST_MEMORY`` times a ring's.

    It is empty where memory allows it. Arguments are those of :func:`gather_memory`, with the
    widths of a request.
    """
    memory = gather_memory(
        plan, q_width=request.q_heads * request.head_dim,
        kv_width=request.kv_heads * (request.head_dim + request.v_head_dim), itemsize=itemsize,
        buffer_len=buffer_len,
    )  # fmt: skip
    if memory <= MOST_MEMORY:
        return ()
    return (f"it takes more than {MOST_MEMORY:g} times the memory of a ring",)
