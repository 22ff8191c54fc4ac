"""Estimate what a plan costs on given hardware: FLOPs, bytes, messages, memory and time.

The model is a ring whose ranks wait for each other after every stage: a stage takes as long as its
slowest rank's kernels or the messages that travel meanwhile, if these take longer. It knows nothing
of launches, merges or small blocks, on which kernels run slower, so it is a bound to compare
layouts by and no forecast of a benchmark.

Letters: ``B`` batch, ``H`` query heads, ``K`` key/value heads, ``D`` head dim of Q and K, ``Dv`` of
V, ``Tq`` and ``Tk`` queries and keys per rank, ``e`` bytes per element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import Floats, check_kind, check_rate, check_size, check_text
from ring_core.base.config import StrategyConfig, pairs_of, strategy_config
from ring_core.choose.balance import ALL_LAYOUTS, layout_for
from ring_core.layouts.layout import Layout
from ring_core.masks.mask import Mask, check_documents
from ring_core.plan.plan import Plan, make_plan
from ring_core.programs.gather import gather_program, gather_refusals
from ring_core.programs.grid import RankGrid, rank_grid
from ring_core.programs.heads import HeadPlan, head_plan
from ring_core.programs.ring import RingProgram, Stage, offload_pieces, ring_program

BACKWARD_FLOPS = 2.5  # matmul FLOPs of the backward over those of the forward
_FLOAT32 = 4  # bytes of an accumulator, lse or delta


@dataclass(frozen=True)
class Hardware:
    """The rates that a device and its link achieve.

    >>> from ring_core.cost import Hardware
    >>> mine = Hardware("mine", 400, 350, link_gb_s=40, hop_us=20, source="measured here")

    Attributes:
        name: The name for ``--hardware`` and tables.
        matmul_tflops: Achievable bf16 attention TFLOP/s per device, forward.
        backward_tflops: Achievable bf16 attention TFLOP/s per device, backward.
        link_gb_s: Rate at which a device sends in one direction, GB/s (1e9 bytes).
        hop_us: Latency of a message, microseconds; the same for a hop of any distance, as on a
            switched network (on a torus, far hops cost more than this says).
        source: The origin of the figures, in words.

    Raises:
        ValueError: A rate is no finite number above 0, or a text is none.
    """

    name: str
    matmul_tflops: float
    backward_tflops: float
    link_gb_s: float
    hop_us: float
    source: str

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            check_text(name, getattr(self, name))
        for rate in ("matmul_tflops", "backward_tflops", "link_gb_s"):
            check_rate(rate, getattr(self, rate))
        check_rate("hop_us", self.hop_us, zero=True)


_TPU = (
    "a planning figure, not a measurement: {mfu}% of the {peak} TFLOP/s bf16 peak in both passes; "
    "ICI one way on one link as published; 1 us a hop assumed"
)
HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        h.name: h
        for h in (
            Hardware(
                "h200-nvlink", 649, 588, 370, 30,
                "measured on 4x H200: flash-attn-4, 16k causal, head dim 128; copy-engine pulls of "
                "16 to 256 MiB over NVLink (18 links) take about 30 us plus bytes over 370 GB/s",
            ),
            Hardware(
                "h200-400gbit", 649, 588, 45, 30,
                "kernels as h200-nvlink; one 400 Gbit/s port a GPU, 45 of its 50 GB/s and 30 us a "
                "message assumed",
            ),
            Hardware("tpu-v5e", 98.5, 98.5, 45, 1, _TPU.format(mfu=50, peak=197)),
            Hardware("tpu-v5p", 229.5, 229.5, 90, 1, _TPU.format(mfu=50, peak=459)),
            Hardware("tpu-v6e", 367.2, 367.2, 90, 1, _TPU.format(mfu=40, peak=918)),
        )
    }
)  # fmt: skip


def hardware(name: str) -> Hardware:
    """Return the preset of a name, one of ``HARDWARE``.

    >>> from ring_core.cost import hardware
    >>> hardware("h200-nvlink").link_gb_s
    370

    Raises:
        ValueError: No such preset.
    """
    if not isinstance(name, str) or name not in HARDWARE:
        raise ValueError(
            f"unknown hardware {name!r}; known: {', '.join(HARDWARE)}; or describe yours as "
            f"ring_core.cost.Hardware(...)"
        )
    return HARDWARE[name]


@dataclass(frozen=True)
class Model:
    """The sizes of an attention layer.

    >>> from ring_core.cost import Model
    >>> Model(num_q_heads=32, num_kv_heads=8, head_dim=128).flops_per_pair
    16384

    Attributes:
        num_q_heads: Number of query heads ``H``.
        num_kv_heads: Number of key/value heads ``K``, a divisor of ``H``.
        head_dim: Head dim ``D`` of Q and K.
        v_head_dim: Head dim ``Dv`` of V; ``None`` means that of Q and K.
        batch: Batch size ``B``.
        bytes_per_element: Bytes per element ``e`` of the inputs; 2 for bfloat16.

    Raises:
        ValueError: A size is no positive integer, or ``K`` does not divide ``H``.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    batch: int = 1
    bytes_per_element: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "v_head_dim" or self.v_head_dim is not None:
                check_size(field.name, getattr(self, field.name))
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads must be a multiple of num_kv_heads, got {self.num_q_heads} and "
                f"{self.num_kv_heads}"
            )

    @property
    def value_dim(self) -> int:
        """Head dim ``Dv`` of V."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def flops_per_pair(self) -> int:
        """Forward FLOPs of one visible (query, key) pair: ``2 * B * H * (D + Dv)``."""
        return 2 * self.batch * self.num_q_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True)
class Cost:
    """The estimated cost of one call; with a backward, of forward and backward together.

    Attributes:
        flops: FLOPs of the busiest rank: its visible pairs times ``2 * B * H * (D + Dv)``, which is
            ``4 * B * H * D`` where the dims are equal, and 2.5 times as many again backward.
        bytes_sent: Bytes that a rank sends.
        messages: Number of messages that a rank sends.
        active_steps: Number of live steps, in which some rank has work; the own block is one.
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
    forward_bytes, backward_bytes = _message_bytes(program.plan, model)
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


def bytes_sent(
    plan: Plan, model: Model, strategy: str | StrategyConfig, *, backward: bool = True,
    fetches_again: bool = False,
) -> tuple[int, ...]:  # fmt: skip
    """Return the bytes that each rank sends in a call of a strategy, without headers.

    >>> from ring_core import Mask, StrategyConfig, make_plan
    >>> from ring_core.cost import Model, bytes_sent
    >>> plan = make_plan(Mask(causal=True), seq_len=65536, cp_size=4, layout="zigzag")
    >>> model = Model(num_q_heads=32, num_kv_heads=8, head_dim=128)
    >>> ways = "ring", "gather", "ulysses", StrategyConfig("hybrid", ulysses_size=2)
    >>> [round(max(bytes_sent(plan, model, way)) / 2**20) for way in ways]
    [704, 480, 482, 513]

    With ``e`` bytes an element and float32 sums, a token of K/V that travels is ``K * (D + Dv) *
    e`` bytes, one of dK/dV ``K * (D + Dv) * 4``:

    - ``ring`` passes the K/V of all tokens of a rank on at each hop, and dK/dV backward, too;
    - ``gather`` sends each rank the K/V that it sees, and gets their dK/dV back;
    - ``ulysses`` sends each other rank its heads of q, k and v, and gets out and lse back, for all
      tokens of the rank; backward dO and dQ, dK, dV. Heads that are padded or copied count
      (:func:`ring_core.head_plan`);
    - ``hybrid`` does so within a group, and between groups what a ring or a gather does, with the
      tokens of a group and the heads of a rank.

    Args:
        plan: The plan.
        model: Heads, dims, batch, bytes an element.
        strategy: ``"ring"``, ``"gather"`` or ``"ulysses"``, or a :class:`ring_core.StrategyConfig`
            of one of them or of ``hybrid``; without ``ulysses_size`` all ranks are on one host.
        backward: Count the backward as well.
        fetches_again: For ``gather``, or ``hybrid`` with it between groups: the backward fetches
            K/V again, as the forward has not saved them.

    Raises:
        ValueError: The strategy is none of these, or cannot run the plan; or ``fetches_again`` is
            given where nothing is gathered, or without a backward.
    """
    config = _check_bytes(plan, model, strategy, backward, fetches_again)
    sent = _moved(plan, model, config, backward, fetches_again)
    return tuple(map(int, sent.sum(axis=1)))


class LinkBytes(NamedTuple):
    """The bytes that ranks send over either kind of link; see :func:`bytes_by_link`.

    Attributes:
        within_host: Bytes that each rank sends to ranks of its host.
        between_hosts: Bytes that each rank sends to ranks of other hosts.
    """

    within_host: tuple[int, ...]
    between_hosts: tuple[int, ...]


def bytes_by_link(
    plan: Plan, model: Model, strategy: str | StrategyConfig, *, ranks_per_host: int,
    backward: bool = True, fetches_again: bool = False,
) -> LinkBytes:  # fmt: skip
    """Return the bytes that each rank sends within its host, and to other hosts.

    >>> from ring_core import Mask, StrategyConfig, make_plan
    >>> from ring_core.cost import Model, bytes_by_link
    >>> plan = make_plan(Mask(causal=True), seq_len=65536, cp_size=4, layout="zigzag")
    >>> hybrid = StrategyConfig("hybrid", ulysses_size=2)
    >>> sent = bytes_by_link(plan, Model(32, 8, 128), hybrid, ranks_per_host=2)
    >>> max(sent.within_host) >> 20, max(sent.between_hosts) >> 20
    (321, 192)

    Args:
        plan: The plan.
        model: Heads, dims, batch, bytes an element.
        strategy: As in :func:`bytes_sent`; ``hybrid`` without ``ulysses_size`` takes the largest
            groups within a host.
        ranks_per_host: Number of consecutive ranks on each host, a divisor of the plan's ranks.
        backward: Count the backward as well.
        fetches_again: As in :func:`bytes_sent`.

    Raises:
        ValueError: As in :func:`bytes_sent`; or hosts would have unlike numbers of ranks.
    """
    config = _check_bytes(plan, model, strategy, backward, fetches_again)
    if plan.cp_size % check_size("ranks_per_host", ranks_per_host):
        raise ValueError(
            f"ranks_per_host must divide the plan's {plan.cp_size} ranks, got {ranks_per_host}"
        )
    host = np.arange(plan.cp_size) // ranks_per_host
    sent = _moved(plan, model, config, backward, fetches_again, [str(x) for x in host])
    of_host = np.equal.outer(host, host)
    within, between = (np.where(x, sent, 0).sum(axis=1) for x in (of_host, ~of_host))
    return LinkBytes(tuple(map(int, within)), tuple(map(int, between)))


_BETWEEN_RANKS = npt.NDArray[np.int64]  # bytes from a rank (row) to a rank (column), [P, P]
_COUNTED = ("ring", "gather", "ulysses", "hybrid")


def _check_bytes(
    plan: Plan, model: Model, strategy: str | StrategyConfig, backward: bool, fetches_again: bool
) -> StrategyConfig:
    """Check the arguments of a count of bytes, and return the strategy as a StrategyConfig."""
    for name, value, kind in (
        ("plan", plan, Plan), ("model", model, Model), ("backward", backward, bool),
        ("fetches_again", fetches_again, bool),
    ):  # fmt: skip
        check_kind(name, value, kind)
    config = strategy_config(strategy, _COUNTED)
    gathers = "gather" in (config.name, config.name == "hybrid" and config.outer)
    if fetches_again and not (gathers and backward):
        raise ValueError("fetches_again is for the backward of strategy 'gather': leave it out")
    return config


def _moved(
    plan: Plan, model: Model, config: StrategyConfig, backward: bool, fetches_again: bool,
    hosts: Sequence[str] | None = None,
) -> _BETWEEN_RANKS:  # fmt: skip
    """Return the bytes of a call from each rank to each rank; ``hosts`` are those of ranks."""
    match config.name:
        case "ring":
            return _ring_bytes(plan, model, backward)
        case "gather":
            return _gather_bytes(plan, model, backward, fetches_again)
        case "ulysses":
            grid = RankGrid(plan.cp_size, plan.cp_size)
        case _:
            grid = rank_grid(
                plan.cp_size, model.num_q_heads, plan.q_layout.name, outer=config.outer,
                ulysses_size=config.ulysses_size, hosts=hosts,
            )  # fmt: skip
    heads = head_plan(model.num_q_heads, model.num_kv_heads, grid.ulysses_size)
    moved = np.zeros((plan.cp_size, plan.cp_size), np.int64)
    for first in range(0, plan.cp_size, grid.ulysses_size):
        group = grid.inner_ranks(first)
        moved[np.ix_(group, group)] = _exchange_bytes(plan, model, heads, backward)
    np.fill_diagonal(moved, 0)
    if grid.outer_size == 1:
        return moved
    # Each rank of a group goes on with the tokens of the group, and its part of the heads.
    outer_plan = make_plan(
        plan.mask, seq_len=plan.seq_len, cp_size=grid.outer_size,
        layout=grid.outer_layout(plan.q_layout.name), kv_seq_len=plan.kv_seq_len,
        pad_to=(plan.q_layout.padded_len, plan.k_layout.padded_len),
    )  # fmt: skip
    outer_model = replace(model, num_q_heads=heads.q.shape[1], num_kv_heads=heads.kv.shape[1])
    outer = StrategyConfig(config.outer)
    between_groups = _moved(outer_plan, outer_model, outer, backward, fetches_again)
    for rank in grid.inner_ranks(0):
        peers = grid.outer_ranks(rank)
        moved[np.ix_(peers, peers)] += between_groups
    return moved


def _ring_bytes(plan: Plan, model: Model, backward: bool) -> _BETWEEN_RANKS:
    """Return the bytes of a ring from each rank to each rank."""
    program, sizes = ring_program(plan), _message_bytes(plan, model)
    moved, ranks = np.zeros((plan.cp_size, plan.cp_size), np.int64), np.arange(plan.cp_size)
    passes = (program.forward, program.backward) if backward else (program.forward,)
    for stages, size in zip(passes, sizes, strict=False):
        for stage in stages:
            for hop, message in ((stage.kv_hop, size.kv), (stage.grad_hop, size.grad)):
                if hop is not None:
                    moved[ranks, (ranks + hop) % plan.cp_size] += message
    return moved


def _gather_bytes(plan: Plan, model: Model, backward: bool, fetches_again: bool) -> _BETWEEN_RANKS:
    """Return the bytes from each rank to each rank where a rank fetches what its queries see."""
    if reasons := gather_refusals(plan):
        raise ValueError(f"strategy 'gather' cannot run this plan: {'; '.join(reasons)}")
    width = model.batch * model.num_kv_heads * (model.head_dim + model.value_dim)
    keys = np.zeros((plan.cp_size, plan.cp_size), np.int64)
    for rank in range(plan.cp_size):
        for fetch in gather_program(plan, rank).fetches:
            if fetch.rank != rank:
                keys[fetch.rank, rank] += fetch.source.stop - fetch.source.start
    grads = keys.T * width * _FLOAT32 if backward else 0
    return keys * width * model.bytes_per_element * (1 + fetches_again) + grads


def _exchange_bytes(plan: Plan, model: Model, heads: HeadPlan, backward: bool) -> int:
    """Return the bytes that a rank sends each other where they trade tokens for heads."""
    d, dv, e = model.head_dim, model.value_dim, model.bytes_per_element
    rows = model.batch * plan.q_layout.local_len * int(heads.q.shape[1])
    keys = model.batch * plan.k_layout.local_len * int(heads.kv.shape[1]) * (d + dv)
    # Gradients of a K/V head with copies are summed in float32 before they are rounded.
    grad = e if heads.copies == 1 else _FLOAT32
    forward = rows * (d * e + dv * e + _FLOAT32) + keys * e
    return forward + (rows * (d + dv) * e + keys * grad if backward else 0)


class _Bytes(NamedTuple):
    """Bytes of one message of each kind, in one pass."""

    kv: int
    grad: int  # dK/dV
    ship: int  # queries, to the helper
    results: int  # of offloaded queries, back home


def _message_bytes(plan: Plan, model: Model) -> tuple[_Bytes, _Bytes]:
    """Return the bytes of messages of the forward, and of the backward."""
    rows, kv = _rows(plan, model)
    d, dv, e = model.head_dim, model.value_dim, model.bytes_per_element
    return (
        _Bytes(kv * e, 0, ship=rows * d * e, results=rows * (dv + 1) * _FLOAT32),
        _Bytes(
            kv * e,
            kv * _FLOAT32,
            ship=rows * ((d + dv) * e + 2 * _FLOAT32),  # lse and delta, too
            results=rows * d * _FLOAT32,
        ),
    )


def _rows(plan: Plan, model: Model) -> tuple[int, int]:
    """Return a rank's rows of Q, ``B * Tq * H``, and numbers in K/V, ``B * Tk * K * (D + Dv)``."""
    rows = model.batch * plan.q_layout.local_len * model.num_q_heads
    keys = model.batch * plan.k_layout.local_len * model.num_kv_heads
    return rows, keys * (model.head_dim + model.value_dim)


def _run(
    stages: Sequence[Stage],
    step_s: Floats,
    sizes: _Bytes,
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
    rows, kv = _rows(program.plan, model)
    has_offload = any(step.offload != "none" for step in program.steps)
    several = program.num_steps > 1
    slots = 2 * kv * model.bytes_per_element if several else 0
    q, dout = (rows * dim * model.bytes_per_element for dim in (model.head_dim, model.value_dim))
    out, dq = (rows * dim * _FLOAT32 for dim in (model.value_dim, model.head_dim))
    forward = slots + out + (q + out if has_offload else 0)
    if not backward:
        return forward
    grads = (3 if several else 1) * kv * _FLOAT32
    return max(forward, slots + dq + grads + (q + dout + dq if has_offload else 0))
