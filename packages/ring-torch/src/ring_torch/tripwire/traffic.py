"""Bytes and time of a checked call's forward or backward, compared with its program."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ring_core.cost import BACKWARD_FLOPS, Model
from ring_core.tripwire import peak_tflops
from ring_torch.call import Call
from ring_torch.checking.watch import Watch
from ring_torch.comm.handshake import HEADER_BYTES
from ring_torch.records import Inputs


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
