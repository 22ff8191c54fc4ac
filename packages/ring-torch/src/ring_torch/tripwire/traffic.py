"""Bytes and time of a checked call's forward or backward, compared with its program."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ring_core.cost import BACKWARD_FLOPS, Model
from ring_core.tripwire import peak_tflops
from ring_torch.call import Call
from ring_torch.comm.handshake import HEADER_BYTES
from ring_torch.records import Inputs
from ring_torch.transports.api import counted_by


class Watch(TorchDispatchMode):
    """Dispatch mode that counts the bytes sent or read from peers in a block, and takes the time.

    Messages are counted at torch's operations of process groups. Copies out of peers' memory are no
    such operations; :func:`ring_torch.transports.api.counted_by` reports them.

    Args:
        device: Device on which the call computes.

    Attributes:
        sent: Bytes of messages sent.
        read: Bytes read from peers' memory.
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
        name = func._schema.name  # noqa: SLF001 - an operator has no public name
        if name == "c10d::send":
            self.sent += sum(x.nbytes for x in args[0])
        elif name == "c10d::alltoall_base_":
            self.sent += _bytes_for_others(args[1], dist.ProcessGroup.unbox(args[2]), args[4])
        return func(*args, **(kwargs or {}))

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last operation in the block, on a GPU by its own clock."""
        start, end = self._marks
        if self._device.type != "cuda":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _add_read(self, size: int) -> None:
        """Count bytes that were read from a peer's memory."""
        self.read += size

    def _mark(self) -> None:
        """Record a point in time, on a GPU as an event of the current stream."""
        mark: Any = time.perf_counter()
        if self._device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append(mark)


def _bytes_for_others(sent: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> int:
    """Return how many bytes of an all-to-all leave this rank; without ``sizes`` parts are equal."""
    if not sizes:
        return sent.nbytes // group.size() * (group.size() - 1)
    row = sent.nbytes // max(len(sent), 1)
    return row * (sum(sizes) - sizes[group.rank()])


class CheckedPass(NamedTuple):
    """Forward or backward of a call, with the bytes that it is expected to send.

    Attributes:
        call: The call.
        inputs: Inputs of this rank.
        forward: True for the forward, False for the backward.
        fetches: True if gathered keys are fetched; a backward may have them saved.
        sent_before: Bytes of messages sent before those of the call's strategy.
    """

    call: Call
    inputs: Inputs
    forward: bool
    fetches: bool = True
    sent_before: int = 0

    def faults(self, watch: Watch) -> list[str]:
        """Return error messages: for other bytes than the program's, and for an impossible speed.

        No device exceeds its peak rate: a pass that seems to has left work out.
        """
        # Bytes are compared where they were counted: messages at the sender, reads at the reader.
        messages = []
        call = self.call
        if call.ranks.size > 1:
            traffic = call.strategy.traffic(
                call, self.inputs, forward=self.forward, saved=not self.fetches
            )
            expected, actual, past, present = (
                traffic.received,
                watch.read,
                "read from peers",
                "reads",
            )
            if call.transport.sends_messages:
                expected, actual, past, present = traffic.sent, watch.sent, "sent", "sends"
                expected += HEADER_BYTES + self.sent_before
            if actual != expected:
                messages.append(
                    f"{actual:,} bytes were {past}, and the program {present} {expected:,}"
                )
        peak = peak_tflops(
            torch.cuda.get_device_name(call.device) if call.device.type == "cuda" else "cpu"
        )
        if peak is not None and self.inputs.q_ids is None and self.inputs.bias is None:
            rate = self._flops() / watch.seconds / 1e12
            if rate > peak:
                messages.append(
                    f"{rate:,.0f} TFLOP/s, and the device has {peak:,.0f}: work was left out"
                )
        return messages

    def _flops(self) -> float:
        """Return the floating point operations of the visible pairs that this rank computes."""
        q, _, v = self.inputs[:3]
        model = Model(q.shape[2], q.shape[2], q.shape[3], v.shape[3], q.shape[0])
        pairs = self.call.strategy.visible_pairs(self.call)
        return pairs * model.flops_per_pair * (1.0 if self.forward else BACKWARD_FLOPS)
