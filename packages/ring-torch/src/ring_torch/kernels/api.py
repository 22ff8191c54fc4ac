"""Interface of attention kernels, which make launches of work items.

A kernel knows nothing of ranks, groups or steps. Shapes are those of ``ring_torch.records``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from ring_core import (
    Capabilities,
    KernelConfig,
    Plan,
    Request,
    RingProgram,
    WorkItem,
)
from ring_torch.buffers import KVPayload
from ring_torch.records import Backward, Forward, KernelParams


class OwnSpans(NamedTuple):
    """Spans of a rank's own keys in a buffer of gathered keys: of one length, equally far apart.

    Attributes:
        number: Number of spans.
        keys: Number of keys of a span.
        source: Local index of the first key of the first span.
        source_step: Keys from one span to the next in the shard.
        target: Column of that first key in the buffer.
        target_step: Columns from one span to the next in the buffer.
        length: Columns of the buffer.
    """

    number: int
    keys: int
    source: int
    source_step: int
    target: int
    target_step: int
    length: int


class SplitBackward(Protocol):
    """Backward of a kernel in two stages, so that dK/dV are rounded once, after they are summed.

    The first adds to float32 sums ``[B, K, m, D]`` and ``[B, K, m, Dv]``. The kernel may order the
    numbers inside each of its tiles of keys as it likes: sums of several launches, and of several
    ranks, are added number by number. The second rounds them into gradients.
    """

    #: Keys of a tile. Sums of a part of a tile cannot be told from others of it.
    tile: int

    def applies(self, plan: Plan, request: Request, *, splits: bool, tile: int) -> bool:
        """Return True if every launch of a call over gathered keys can use the split backward.

        It is asked for bands alone, without segment ids, predicates or slopes, and all ranks must
        get the same answer. ``splits`` and ``tile`` are those options of their programs
        (:func:`ring_core.gather_program`).
        """

    def backward(self, items: Sequence[WorkItem], params: KernelParams) -> Backward:
        """Return the launch of items that adds to such sums, which begin with zeros."""

    def rounding(
        self, spans: OwnSpans, keys: KVPayload, params: KernelParams
    ) -> Callable[[Tensor, Tensor, Tensor], None]:
        """Return a launch ``(sums, dk, dv)`` that rounds spans of own keys into whole gradients.

        ``sums`` is the flat buffer, ``keys`` the shape of own K/V.
        """


class Kernel(Protocol):
    """A stateless implementation of attention over work items, forward and backward.

    A kernel has to define ``capabilities``, ``forward`` and ``backward``. The others have defaults.
    """

    capabilities: Capabilities  # calls that do not fit these never reach it
    #: True if its backward takes ``delta``; otherwise it computes that from the final ``out``.
    needs_delta: bool = True
    #: True if a launch that is a whole call can add the sinks (``QueryBlock.sinks``).
    adds_sinks: bool = False
    #: True if it reads values of tensors on the host, which a CUDA graph cannot hold.
    reads_on_host: bool = False
    #: The split backward, if it has one.
    split_backward: SplitBackward | None = None

    def unavailable_reason(self) -> str | None:
        """Return why it cannot run on this machine, or ``None``.

        It is asked only for calls on the devices of its capabilities.
        """
        return None

    def config_refusals(
        self, _config: KernelConfig, _request: Request, _program: RingProgram, /
    ) -> tuple[str, ...]:
        """Return the reasons why it cannot run a call with these settings on this machine.

        They come on top of what its capabilities refuse.
        """
        return ()

    def forward(self, item: WorkItem, params: KernelParams) -> Forward:
        """Return the launch of an item's forward, which any number of calls run."""

    def backward(self, items: Sequence[WorkItem], params: KernelParams, *, adds: bool) -> Backward:
        """Return the launch of the backward of items that read the same columns.

        Their queries' ``out``, ``lse`` and ``delta`` are those over all keys. With ``adds`` it is
        to add to sums in the accumulators' dtype itself, if the kernel can.
        """


@dataclass(frozen=True)
class Selection:
    """The kernel chosen for a call, with the reasons against those before it."""

    kernel: Kernel
    rejected: tuple[tuple[Capabilities, tuple[str, ...]], ...]

    def describe(self) -> str:
        """Return the lines of ``explain`` about the kernel, and about those not taken."""
        others = [
            f"  not {capabilities.name} ({', '.join(capabilities.devices) or 'any device'}): {'; '.join(reasons)}"
            for capabilities, reasons in self.rejected
        ]
        return "\n".join([f"kernel {self.kernel.capabilities.name}", *others])
