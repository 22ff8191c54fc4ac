"""Time, memory and messages of a ring's program: see :mod:`ring_core.cost`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ring_core.base.arguments import Floats, check_kind, check_size, numbers_as_python
from ring_core.choose.balance import ALL_LAYOUTS, layout_for
from ring_core.cost.model import (
    BACKWARD_FLOPS,
    FLOAT32_BYTES,
    Hardware,
    MessageBytes,
    Model,
    message_bytes,
    rows_and_keys,
)
from ring_core.layouts.layout import Layout
from ring_core.masks.mask import Mask, check_documents
from ring_core.plan.plan import make_plan
from ring_core.programs.ring import RingProgram, Stage, offload_pieces, ring_program
from ring_core.programs.steps import pairs_of


@dataclass(frozen=True)
class Cost:
    """The estimated cost of one call; with a backward, of forward and backward together.

    Attributes:
        flops: FLOPs of the busiest rank: its visible pairs times ``2 * B * H * (D + Dv)``, which is
            ``4 * B * H * D`` where the dims are equal, and 2.5 times as many again backward.
        bytes_sent: Bytes that a rank sends.
        messages: Number of messages that a rank sends.
        active_steps: Number of live steps: that of the own block, and those in which some rank has
            work.
        imbalance: Visible pairs of the busiest rank over the mean of all.
        memory_bytes: Bytes that a rank needs beyond the caller's tensors, in the larger pass.
        compute_s: Seconds of computing: the slowest rank of every stage, summed.
        exposed_s: Seconds of communication not hidden by computing: ``time_s - compute_s``.
        time_s: Seconds in all: the longer of computing and transfer of every stage, summed.
    """

    flops: float
    bytes_sent: int
    messages: int
    active_steps: int
    imbalance: float
    memory_bytes: int
    compute_s: float
    exposed_s: float
    time_s: float


@numbers_as_python
def estimate(
    program: RingProgram, model: Model, hardware: Hardware, *, backward: bool = True
) -> Cost:
    """Estimate what a ring's program costs.

    >>> from ring_core import Mask, make_plan, ring_program
    >>> from ring_core.cost import Model, estimate, hardware
    >>> plan = make_plan(Mask(causal=True), seq_len=131072, cp_size=4, layout="zigzag")
    >>> cost = estimate(ring_program(plan), Model(32, 8, 128), hardware("h200-nvlink"))
    >>> print(f"{1e3 * cost.time_s:.1f} ms, {cost.messages} messages")
    203.8 ms, 8 messages

    A message carries, in bytes:

    - K/V, for every ``kv_hop``: ``B * Tk * K * (D + Dv) * e``
    - dK/dV, for every ``grad_hop``, in float32: ``B * Tk * K * (D + Dv) * 4``
    - to a helping rank, q: ``B * Tq * H * D * e``; backward q, dO, lse and delta:
      ``B * Tq * H * (D * e + Dv * e + 8)``
    - from a helping rank, in float32, out and lse: ``B * Tq * H * (Dv + 1) * 4``; backward dQ:
      ``B * Tq * H * D * 4``

    It takes ``hop_us`` plus its bytes over ``link_gb_s``. Messages that start before a stage's
    kernels are hidden under that stage, those that start after them under the next; what goes to
    helping ranks before the first stage, or home after the last, under nothing.

    Offloaded steps are taken as if a rank sent all its queries and also helped another with all of
    its own: an upper bound, since ranks do one or the other, often with a part of the queries.

    Args:
        program: The ring's program; its ``work()`` gives the visible pairs of every rank and step.
        model: Heads, dims, batch, bytes an element.
        hardware: Rates; see :func:`hardware` for presets.
        backward: Count the backward as well.
    """
    for name, value, kind in (
        ("program", program, RingProgram), ("model", model, Model), ("hardware", hardware, Hardware),
        ("backward", backward, bool),
    ):  # fmt: skip
        check_kind(name, value, kind)
    work = program.work()
    longest, busiest = work.max(axis=1), int(work.sum(axis=0).max())
    flops = float(busiest * model.flops_per_pair)
    rate = model.flops_per_pair / (hardware.matmul_tflops * 1e12)
    forward_bytes, backward_bytes = message_bytes(program.plan, model)
    pieces = offload_pieces(program.plan.q_layout.local_len)
    passes = [_run(program.forward, longest * rate, forward_bytes, pieces, hardware)]
    if backward:
        flops *= 1 + BACKWARD_FLOPS
        rate = BACKWARD_FLOPS * model.flops_per_pair / (hardware.backward_tflops * 1e12)
        passes.append(_run(program.backward, longest * rate, backward_bytes, pieces, hardware))
    compute_s, time_s, bytes_sent, messages = map(sum, zip(*passes, strict=True))
    return Cost(
        flops=flops,
        bytes_sent=bytes_sent,
        messages=messages,
        active_steps=program.num_steps,
        imbalance=program.imbalance,
        memory_bytes=_memory(program, model, backward),
        compute_s=compute_s,
        exposed_s=time_s - compute_s,
        time_s=time_s,
    )


@numbers_as_python
def compare(
    mask: Mask,
    *,
    seq_len: int,
    cp_size: int,
    model: Model,
    hardware: Hardware,
    layouts: Sequence[str] = ALL_LAYOUTS,
    kv_seq_len: int | None = None,
    backward: bool = True,
) -> dict[str, Cost | str]:
    """Estimate what a ring costs over each layout.

    >>> from ring_core import Mask
    >>> from ring_core.cost import Model, compare, hardware
    >>> costs = compare(
    ...     Mask(causal=True),
    ...     seq_len=65536,
    ...     cp_size=8,
    ...     model=Model(32, 8, 128),
    ...     hardware=hardware("h200-nvlink"),
    ... )
    >>> min(costs, key=lambda name: costs[name].time_s)
    'zigzag/ring'

    Args:
        mask: The rule that says which query sees which key.
        seq_len: Number of queries, over all ranks.
        cp_size: Number of ranks.
        model: The attention layer.
        hardware: Rates; see :func:`hardware` for presets.
        layouts: Names of layouts; ``chunks`` is what :func:`ring_core.balanced_layout` makes.
        kv_seq_len: Number of keys, over all ranks, if it is another.
        backward: Count the backward as well.

    Returns:
        For each layout and strategy, as ``zigzag/ring``, the cost; or, where the layout cannot be
        had for these lengths, the text that says why.

    Raises:
        ValueError: Arguments that no layout could plan, e.g. ``cu_seqlens`` that end elsewhere.
    """
    check_kind("mask", mask, Mask)
    if not isinstance(layouts, list | tuple):
        raise ValueError(f"layouts must be a list of names, got {layouts!r}")
    for name in layouts:
        if name not in ALL_LAYOUTS:
            raise ValueError(f"layouts: unknown layout {name!r}; known: {', '.join(ALL_LAYOUTS)}")
    cp_size, seq_len = check_size("cp_size", cp_size), check_size("seq_len", seq_len)
    keys = seq_len if kv_seq_len is None else check_size("kv_seq_len", kv_seq_len)
    for name, value, kind in (
        ("model", model, Model), ("hardware", hardware, Hardware), ("backward", backward, bool)
    ):  # fmt: skip
        check_kind(name, value, kind)
    check_documents(mask, seq_len, keys)
    costs: dict[str, Cost | str] = {}
    for name, strategy in pairs_of(layouts):
        pair = f"{name}/{strategy}"
        try:
            layout = layout_for(name, mask, seq_len=seq_len, cp_size=cp_size, kv_seq_len=kv_seq_len)
            for length in (seq_len, keys):
                Layout(layout, length, cp_size)
        except ValueError as error:
            costs[pair] = str(error)
            continue
        plan = make_plan(
            mask, seq_len=seq_len, cp_size=cp_size, layout=layout, kv_seq_len=kv_seq_len
        )
        costs[pair] = estimate(ring_program(plan, strategy), model, hardware, backward=backward)
    return costs


def _run(
    stages: Sequence[Stage],
    step_s: Floats,
    sizes: MessageBytes,
    pieces: int,
    hardware: Hardware,
) -> tuple[float, float, int, int]:
    """Return ``(compute_s, time_s, bytes_sent, messages)`` of a pass.

    Time is divided into slots, in each of which computing and transfers overlap. Slot ``n + 1`` is
    stage ``n``; in the slots before the first and after the last nothing is computed.

    Args:
        stages: The stages of the pass.
        step_s: Seconds that the slowest rank computes in each step, ``[num_steps]``.
        sizes: Bytes of messages.
        pieces: Pieces in which offloaded queries travel.
        hardware: Rates.
    """
    kv = np.array([s.kv_hop is not None for s in stages])
    grad = np.array([s.grad_hop is not None for s in stages])
    offloads = np.array([s.offloads for s in stages])
    # The first piece for a helper travels in the slot before, the last result in the slot after.
    ship, results = sizes.ship / pieces, sizes.results / pieces
    # Rows: messages that a rank sends in each slot, and their bytes. K/V of the next stage travel
    # in a stage's own slot, dK/dV in the slot after it.
    messages, sent = np.zeros((2, len(stages) + 2))
    messages[:-2] += offloads
    messages[1:-1] += kv + 2 * (pieces - 1) * offloads
    messages[2:] += grad.astype(int) + offloads
    sent[:-2] += offloads * ship
    sent[1:-1] += kv * sizes.kv + (pieces - 1) * offloads * (ship + results)
    sent[2:] += grad * sizes.grad + offloads * results
    compute = np.zeros(len(stages) + 2)
    compute[1:-1] = step_s[[s.step for s in stages]]
    moved = messages * hardware.hop_us * 1e-6 + sent / (hardware.link_gb_s * 1e9)
    return (
        float(compute.sum()), float(np.maximum(compute, moved).sum()), round(sent.sum()),
        round(messages.sum()),
    )  # fmt: skip


def _memory(program: RingProgram, model: Model, backward: bool) -> int:
    """Return the bytes a rank needs beyond the caller's tensors, in the larger of the two passes.

    Forward, two K/V slots and out in float32; backward, two K/V slots, dQ and three times dK/dV
    (the sum, what the step adds, what arrives) in float32. Where steps are offloaded, the forward
    adds a slot for another rank's q and its float32 out, the backward one for its q, dO and float32
    dQ. A single live step moves nothing: it needs no slots, and dK/dV once.
    """
    rows, kv = rows_and_keys(program.plan, model)
    has_offload = any(step.offload != "none" for step in program.steps)
    several = program.num_steps > 1
    slots = 2 * kv * model.bytes_per_element if several else 0
    q, dout = (rows * dim * model.bytes_per_element for dim in (model.head_dim, model.value_dim))
    out, dq = (rows * dim * FLOAT32_BYTES for dim in (model.value_dim, model.head_dim))
    forward = slots + out + (q + out if has_offload else 0)
    if not backward:
        return forward
    grads = (3 if several else 1) * kv * FLOAT32_BYTES
    return max(forward, slots + dq + grads + (q + dout + dq if has_offload else 0))
