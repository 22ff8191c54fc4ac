"""What a pass of a checked call sent and how long it took, and what it has to."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ring_core import WorkItem, gather_program
from ring_core.cost import BACKWARD_FLOPS, Model
from ring_core.tripwire import peak_tflops
from ring_torch.buffers import packing_of
from ring_torch.call import Call
from ring_torch.comm.handshake import HEADER_BYTES
from ring_torch.payload import KVPayload
from ring_torch.records import Inputs
from ring_torch.strategies.bias_shift import sent_for_shift
from ring_torch.strategies.ulysses import exchanges_of
from ring_torch.transports.api import counted_by


class Watch(TorchDispatchMode):
    """Counts the bytes that are sent or read from peers inside, and takes the time.

    Messages are counted at torch's own operations; copies out of the peers' memory, which are none
    of a process group, by :func:`ring_torch.transports.api.counted_by`.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as torch has it
        self.sent = self.read = 0
        self._device = device
        self._marks: list[Any] = []
        self._reads = counted_by(self._add_read)

    def __enter__(self) -> Self:
        self._mark()
        self._reads.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._reads.__exit__(None, None, None)
        self._mark()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name  # noqa: SLF001
        if name == "c10d::send":
            self.sent += sum(x.nbytes for x in args[0])
        elif name == "c10d::alltoall_base_":  # in equal parts, of which a rank keeps its own
            ranks = dist.ProcessGroup.unbox(args[2]).size()
            self.sent += args[1].nbytes // ranks * (ranks - 1)
        return func(*args, **(kwargs or {}))

    @property
    def seconds(self) -> float:
        """From the first to the last operation inside, on a GPU by its own clock."""
        first, last = self._marks
        if self._device.type != "cuda":
            return float(last - first)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def _add_read(self, size: int) -> None:
        self.read += size

    def _mark(self) -> None:
        mark: Any = time.perf_counter()
        if self._device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append(mark)


class Pass(NamedTuple):
    """A pass of a call, for what is expected of it."""

    call: Call
    inputs: Inputs
    forward: bool
    fetches: bool = True  # whether gathered keys are fetched; a backward may have them saved

    def faults(self, seen: Watch) -> list[str]:
        """What is wrong with bytes and time, a line each."""
        found = []
        call = self.call
        if call.ring.size > 1:
            expected, moved = _EXPECTED[call.strategy.name](self), seen.read
            done, word = "read from peers", "reads"
            if call.transport == "p2p":
                expected, moved, done, word = HEADER_BYTES + expected, seen.sent, "sent", "sends"
                expected += sent_for_shift(call, self.inputs) if self.forward else 0
            if moved != expected:
                found.append(f"{moved:,} bytes were {done}, and the program {word} {expected:,}")
        most = peak_tflops(
            torch.cuda.get_device_name(call.device) if call.device.type == "cuda" else "cpu"
        )
        if most is not None and self.inputs.q_ids is None and self.inputs.bias is None:
            rate = self._flops() / seen.seconds / 1e12
            if rate > most:
                found.append(
                    f"{rate:,.0f} TFLOP/s, and the device has {most:,.0f}: work was left out"
                )
        return found

    def query_bytes(self) -> int:
        """Of one token's query rows, as a helper gets them."""
        x = self.inputs
        given = [y[:, :1] for y in (x.q, x.q_ids) if y is not None]
        given += [y[:, :, :1] for y in (x.bias, x.bias_shift) if y is not None]
        size = sum(y.nbytes for y in given)
        if not self.forward:
            batch, _, heads, _ = x.q.shape
            numbers = 2 if self.call.kernel.needs_delta else 1  # lse, delta
            size += (
                batch
                * heads
                * (2 * x.v.shape[3] * x.q.element_size() + numbers * self.call.acc_dtype.itemsize)
            )
        return size

    def result_bytes(self) -> int:
        """Of one token's results, as a helper sends them home."""
        x = self.inputs
        batch, _, heads, dim = x.q.shape
        if self.forward:
            return batch * heads * (x.v.shape[3] + 1) * self.call.acc_dtype.itemsize
        bias = x.bias[:, :, :1].numel() if x.bias is not None and self.call.params.bias_grad else 0
        return (batch * heads * dim + bias) * self.call.acc_dtype.itemsize

    def _flops(self) -> float:
        """The visible pairs that this rank computes, in matmuls."""
        q, _, v = self.inputs[:3]
        model = Model(q.shape[2], q.shape[2], q.shape[3], v.shape[3], q.shape[0])
        pairs = self.call.program.work().sum(axis=0)
        whole_heads = self.call.strategy.name == "ulysses"  # of all tokens, as on every rank
        own = pairs.mean() if whole_heads else pairs[self.call.ring.rank]
        return float(own) * model.flops_per_pair * (1.0 if self.forward else BACKWARD_FLOPS)


def _ring(one: Pass) -> int:
    call, inputs = one.call, one.inputs
    program, rank, keys = call.program, call.ring.rank, inputs.key_tensors()
    sent = 0
    for stage in program.forward if one.forward else program.backward:
        if stage.kv_hop is not None:
            sent += packing_of(keys).size
        if stage.grad_hop is not None and not one.forward:
            sent += packing_of(keys[:2], call.acc_dtype).size
        if stage.helps:
            sent += one.query_bytes() * _rows(program.remote_items(rank, stage.step))
            sent += one.result_bytes() * _rows(
                [x for x in program.items(rank, stage.step) if x.q_rank != rank]
            )
    return sent


def _gather(one: Pass) -> int:
    """Keys that others fetch from here and gradients that go back, or by reads the reverse.

    Groups of heads add up to all: where segment ids go with keys, heads are not cut.
    """
    call, rank, keys = one.call, one.call.ring.rank, KVPayload.of(one.inputs)
    fetches = [
        (peer, x.rank, x.source.stop - x.source.start)
        for peer in range(call.ring.size)
        for x in gather_program(call.plan, peer).fetches
    ]
    asked = sum(n for peer, owner, n in fetches if owner == rank != peer)
    given = sum(n for peer, owner, n in fetches if peer == rank != owner)
    if call.transport == "symm_mem":
        asked, given = given, asked
    total = keys.size(asked) if one.fetches else 0
    if not one.forward:
        total += keys.batch * given * keys.width * call.acc_dtype.itemsize
    return total


def _ulysses(one: Pass) -> int:
    """Parts of heads of all tokens there, and of results back; packed as they are sent."""
    moves = exchanges_of(one.call, one.inputs)
    both = (moves.qkv, moves.results) if one.forward else (moves.upstream, moves.qkv)
    return (one.call.ring.size - 1) * sum(x.message.size for x in both)


#: Bytes that a rank sends in a pass beside its header, or reads from peers, by strategy.
_EXPECTED: dict[str, Callable[[Pass], int]] = {
    "ring": _ring, "balanced": _ring, "gather": _gather, "ulysses": _ulysses,
}  # fmt: skip


def _rows(items: tuple[WorkItem, ...] | list[WorkItem]) -> int:
    return sum(x.q_stop - x.q_start for x in items)
