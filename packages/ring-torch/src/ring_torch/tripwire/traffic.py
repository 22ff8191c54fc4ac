"""What a pass of a checked call sent and how long it took, and what it has to."""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ring_core.cost import BACKWARD_FLOPS, Model
from ring_core.tripwire import peak_tflops
from ring_torch.call import Call
from ring_torch.comm.handshake import HEADER_BYTES
from ring_torch.records import Inputs
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
    sent_before: int = 0  # bytes of messages before the strategy's own

    def faults(self, seen: Watch) -> list[str]:
        """What is wrong with bytes and time, a line each."""
        found = []
        call = self.call
        if call.ranks.size > 1:
            traffic = call.strategy.traffic(
                call, self.inputs, forward=self.forward, saved=not self.fetches
            )
            expected, moved, done, word = traffic.received, seen.read, "read from peers", "reads"
            if call.transport.sends_messages:
                expected, moved, done, word = traffic.sent, seen.sent, "sent", "sends"
                expected += HEADER_BYTES + self.sent_before
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

    def _flops(self) -> float:
        """The visible pairs that this rank computes, in matmuls."""
        q, _, v = self.inputs[:3]
        model = Model(q.shape[2], q.shape[2], q.shape[3], v.shape[3], q.shape[0])
        pairs = self.call.strategy.visible_pairs(self.call)
        return pairs * model.flops_per_pair * (1.0 if self.forward else BACKWARD_FLOPS)
