"""Symmetric memory of a group for exchanges by one kernel, with the tables that these read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ring_core.base.arguments import not_none
from ring_torch.capture import is_capturing
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import timeout_of
from ring_torch.launches.direct import has_launch_hooks
from ring_torch.transports import exchange_kernel
from ring_torch.transports.api import is_counted
from ring_torch.transports.symm_buffer import SymmetricMemory

_HEADER_BYTES = 1024  # enough for MOST_RANKS
_FIRST = 2  # index of the next exchange's number in a header
_MOST_TABLES = 1024

# The state of each group. Process groups take no attributes of ours, so it is kept here.
_state_of: WeakKeyDictionary[dist.ProcessGroup, ExchangeState] = WeakKeyDictionary()


@dataclass
class ExchangeState:
    """Symmetric memory of a group for exchanges by one kernel, and the tables that kernels read."""

    memory: SymmetricMemory
    _setup: exchange_kernel.ExchangeSetup | None = None
    _stream: torch.cuda.Stream | None = None  # stream of the last pass outside of CUDA graphs
    _side_streams: list[torch.cuda.Stream] = field(default_factory=list)
    _tables: dict[object, torch.Tensor] = field(default_factory=dict)
    _kept: list[object] = field(default_factory=list)  # tensors that captured CUDA graphs read
    #: Launches of earlier passes, for passes that are alike. They hold addresses of the memory and
    #: of tables, and live as long as these.
    _prepared: dict[object, Any] = field(default_factory=dict)

    def reserve(self, size: int) -> exchange_kernel.ExchangeSetup:
        """Ensure ``size`` bytes of data, let this pass follow the last one, and return its setup.

        All ranks call it with equal sizes. New memory makes all tables void, which hold addresses.
        """
        if self.memory.reserve(size) or self._setup is None:
            self._forget()
            self._setup = self._new_setup()
        if is_capturing():
            self._kept.append(self._setup)
        self._wait_last()
        return self._setup

    def _wait_last(self) -> None:
        """Let the current stream wait for the last pass, if that ran on another stream.

        Exchanges are numbered, so two of a group must never run at the same time.
        """
        last_stream, device = self._stream, torch.cuda.current_device()
        handle = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001 - streams take longer
        if (last_stream is not None and last_stream.cuda_stream == handle) or is_capturing():
            return
        self._stream = torch.cuda.current_stream()
        if last_stream is not None:
            self._stream.wait_stream(last_stream)

    def side_streams(self, number: int) -> Sequence[torch.cuda.Stream]:
        """Return streams beside the caller's, for a CUDA graph that is being captured."""
        while len(self._side_streams) < number:
            self._side_streams.append(torch.cuda.Stream())
        return self._side_streams[:number]

    def _new_setup(self) -> exchange_kernel.ExchangeSetup:
        """Make the setup of this rank in new memory, whose first exchange has number 1."""
        headers, ranks = self.memory.headers(), self.memory.ranks
        device = headers[ranks.rank].device
        headers[ranks.rank][_FIRST] = 1
        addresses = [x.data_ptr() for x in headers]
        patience = timeout_of(not_none(ranks.group), device) // timedelta(microseconds=1)
        header_addresses = torch.tensor(addresses, dtype=torch.int64).to(device)
        return exchange_kernel.ExchangeSetup(
            header_addresses,
            addresses[ranks.rank],
            ranks.rank,
            _programs(device),
            _head_programs(device),
            1000 * patience,
        )

    def _forget(self) -> None:
        """Drop all tables, and the launches that hold their addresses."""
        self._tables.clear()
        self._prepared.clear()

    def prepared(self, key: object) -> Any:
        """Return the launch that was kept for a key; ``None`` if there is none to be repeated.

        A pass that is captured or whose bytes are counted is launched anew: it has more to do.
        """
        launch = self._prepared.get(key)
        if launch is None or is_counted() or is_capturing() or has_launch_hooks():
            return None
        return launch

    def keep(self, key: object, launch: object) -> None:
        """Keep a launch for later passes with the same key, unless it is ``None``."""
        if launch is None:
            return
        if len(self._prepared) > _MOST_TABLES:
            self._prepared.clear()
        self._prepared[key] = launch

    def keep_in_graph(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Keep tensors alive that a CUDA graph reads, if one is being captured."""
        if is_capturing():
            self._kept += [x for x in tensors if x is not None]

    def table(
        self, key: object, width: int, rows: Callable[[], Sequence[Sequence[int]]]
    ) -> torch.Tensor:
        """Return a table on the device, int64 ``[n, width]``, made by ``rows`` once a key."""
        if len(self._tables) > _MOST_TABLES:
            self._forget()
        if key not in self._tables:
            values = torch.tensor(rows(), dtype=torch.int64).view(-1, width)
            self._tables[key] = values.to(not_none(self._setup).headers.device)
        if is_capturing():
            self._kept.append(self._tables[key])
        return self._tables[key]


def _programs(device: torch.device) -> int:
    """Return how many thread blocks the exchange kernels launch: half of the GPU's multiprocessors.

    They wait for other ranks, so all of them must run at once. If they held all multiprocessors, a
    kernel of NCCL on another stream might wait for one here, while its peer holds those that the
    blocks there need: a deadlock.
    """
    return int(torch.cuda.get_device_properties(device).multi_processor_count) // 2


def _head_programs(device: torch.device) -> int:
    """Return how many thread blocks trade tokens for heads: all multiprocessors but 36.

    Those are left for NCCL, as :func:`_programs` says, which takes up to 32. With fewer blocks the
    kernel is slower than NCCL: it writes and reads all of q, k and v, not K/V alone.
    """
    processors = int(torch.cuda.get_device_properties(device).multi_processor_count)
    return max(_programs(device), processors - 36)


def exchange_state_of(ranks: Ranks) -> ExchangeState:
    """Return the exchange state of a group, with memory of its own, made the first time."""
    group = not_none(ranks.group)
    if group not in _state_of:
        _state_of[group] = ExchangeState(SymmetricMemory(ranks, _HEADER_BYTES))
    return _state_of[group]
