"""Cache of index tables and prepared launches of exchange kernels, for passes with equal keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ring_torch.capture import is_capturing
from ring_torch.launches.direct import PreparedLaunch, has_launch_hooks

_MOST = 1024  # tables, and launches


@dataclass
class KeptLaunches:
    """Tables and launches, which hold addresses of the memory that ranks share.

    Launches hold addresses of tables, too, and live no longer than these.
    """

    _tables: dict[object, torch.Tensor] = field(default_factory=dict)
    _launches: dict[object, PreparedLaunch] = field(default_factory=dict)
    _in_graphs: dict[int, object] = field(default_factory=dict)  # what captured graphs read, by id

    def begin_pass(self, setup: object, *, is_counted: bool) -> Mapping[object, PreparedLaunch]:
        """Return the launches that a pass with this setup may repeat, by their keys.

        A pass that is captured or whose bytes are counted has more to do, and repeats none. If
        there are too many tables all are dropped here: a pass's own stay until it ends. What is
        returned is no copy: it loses what :meth:`clear` drops, and gains what :meth:`keep` keeps.
        """
        if len(self._tables) > _MOST:
            self.clear()
        if is_capturing():
            self._in_graphs[id(setup)] = setup
            return {}
        return {} if is_counted or has_launch_hooks() else self._launches

    def clear(self) -> None:
        """Drop all tables, and the launches that hold their addresses."""
        self._tables.clear()
        self._launches.clear()

    def keep(self, key: object, launch: PreparedLaunch | None) -> None:
        """Keep a launch for later passes with the same key, unless it is ``None``."""
        if launch is None:
            return
        if len(self._launches) > _MOST:
            self._launches.clear()
        self._launches[key] = launch

    def keep_in_graph(self, objects: Iterable[object]) -> None:
        """Keep objects alive whose memory a CUDA graph reads, if one is being captured."""
        if is_capturing():
            self._in_graphs |= {id(x): x for x in objects if x is not None}

    def table(
        self, key: object, width: int, rows: Callable[[], Sequence[Sequence[int]]],
        device: torch.device,
    ) -> torch.Tensor:  # fmt: skip
        """Return a table on the device, int64 ``[n, width]``, made by ``rows`` once a key.

        Raises:
            ValueError: A CUDA graph is being captured, and the table is not there: it was dropped
                since the call was made, as the memory has grown, or there were too many.
        """
        if key not in self._tables:
            if is_capturing():
                raise ValueError(
                    "a call is captured into a CUDA graph, and what was kept of it has been dropped: by a "
                    "larger call, which moves the memory that ranks share, or by many others. Instead: "
                    "make it once more outside of a graph, then capture it"
                )
            values = torch.tensor(rows(), dtype=torch.int64, device=device).view(-1, width)
            self._tables[key] = values
        self.keep_in_graph([self._tables[key]])
        return self._tables[key]
