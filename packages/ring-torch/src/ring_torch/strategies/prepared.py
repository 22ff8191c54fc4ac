"""Launches of a rank's work items, prepared once for calls whose tensors are alike.

What a call decides again each time takes the host longer than a launch: which kernel, with which
window, over which slices, copied or not. A strategy keeps the launches of its items under the
strides and alignment of the tensors that differ from call to call; shapes, dtypes and options are
those for which the strategy was resolved. Launches hold sizes and compiled functions, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ring_core import WorkItem
from ring_torch.kernels.api import BackwardLaunch, Kernel
from ring_torch.kernels.library import ForwardLaunch
from ring_torch.records import AttentionState, KernelParams, KeyBlock, QueryBlock

_MOST = 16  # kinds of tensors for which launches are kept


class PreparedItem(NamedTuple):
    """The forward launch of a work item.

    Attributes:
        launch: The launch.
        q_start, q_len: First row, and number of rows.
        k_start, k_len: First column, and number of columns.
        waits_for: How many fetches must have arrived.
    """

    launch: ForwardLaunch
    q_start: int
    q_len: int
    k_start: int
    k_len: int
    waits_for: int

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, state: AttentionState, sinks: Tensor | None
    ) -> None:
        """Write the item's rows of ``state``; ``q``, ``k`` and ``v`` are all rows and columns."""
        rows, columns = (self.q_start, self.q_len), (self.k_start, self.k_len)
        self.launch(
            q.narrow(1, *rows), k.narrow(1, *columns), v.narrow(1, *columns),
            state.out.narrow(1, *rows), state.lse.narrow(2, *rows), sinks,
        )  # fmt: skip


@dataclass(frozen=True)
class PreparedLaunches:
    """Launches of both passes, each by the key of :func:`tensors_key`."""

    forward: dict[object, tuple[PreparedItem, ...]] = field(default_factory=dict)
    backward: dict[object, BackwardLaunch] = field(default_factory=dict)

    def keep_forward(self, key: object, items: tuple[PreparedItem, ...] | None) -> None:
        """Keep the launches of a forward, if there are any; of others some may be dropped."""
        if items is not None:
            _keep(self.forward, key, items)

    def keep_backward(self, key: object, launch: BackwardLaunch | None) -> None:
        """Keep the launch of a backward, if there is one; of others some may be dropped."""
        if launch is not None:
            _keep(self.backward, key, launch)


def _keep[T](launches: dict[object, T], key: object, value: T) -> None:
    if len(launches) >= _MOST:
        launches.clear()
    launches[key] = value


def tensors_key(*tensors: Tensor | None) -> object:
    """Return a key of tensors: equal for tensors of equal strides and alignment to 16 bytes."""
    return tuple([None if x is None else (x.stride(), x.data_ptr() % 16) for x in tensors])


def prepare_forward(
    kernel: Kernel, rows: QueryBlock, columns: KeyBlock, state: AttentionState,
    items: Sequence[tuple[WorkItem, int]], params: KernelParams,
) -> tuple[PreparedItem, ...] | None:  # fmt: skip
    """Return the launches of ``(item, waits_for)``, or ``None`` if one of them cannot be prepared.

    All of them have run on such tensors, and together they cover all rows.
    """
    prepared = []
    for item, waits_for in items:
        launch = kernel.prepare_forward(
            rows.take(item.q_slice), columns.take(item.k_slice), state.take(item.q_slice), item, params
        )  # fmt: skip
        if launch is None:
            return None
        spans = item.q_start, item.q_stop - item.q_start, item.k_start, item.k_stop - item.k_start
        prepared.append(PreparedItem(launch, *spans, waits_for))
    return tuple(prepared)
