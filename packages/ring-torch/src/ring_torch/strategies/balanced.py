"""Queries that other ranks compute for their owner, and the results on their way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ring_core import HELP_PIECES, Stage, WorkItem
from ring_torch.call import Call
from ring_torch.comm.ranks import DONE, Transfer
from ring_torch.records import QueryBlock

#: What arrives at a helper, and where: the tensors of the rows of each piece of an item.
QueryChunk = tuple[Transfer, list[tuple[WorkItem, list[Tensor]]]]


@dataclass
class RemoteQueries:
    """Ships what a call's rows need to their helpers, helps others, and brings results home.

    Rows travel in pieces, one ahead of the piece that is computed, so that a helper holds two.

    Attributes:
        call: The call.
        stages: The pass.
        take: Cuts the tensors a helper needs out of this rank's own, for a slice of rows; as shapes
            are equal on all ranks, it also tells what a shipment from another rank looks like.
        like: Tensors of the shapes and dtypes of the results of a slice of rows.
        add: Adds results that came home in their place.
    """

    call: Call
    stages: Sequence[Stage]
    take: Callable[[slice], list[Tensor]]
    like: Callable[[slice], Sequence[Tensor]]
    add: Callable[[slice, list[Tensor]], None]

    def __post_init__(self) -> None:
        self._ahead = iter(
            [(s.step, n) for s in self.stages if s.helps for n in range(HELP_PIECES)]
        )
        self._in_flight: list[tuple[Transfer, list[tuple[slice, list[Tensor]]]]] = []
        self._next_chunk = self._send_queries()

    def help(
        self, step: int, compute: Callable[[WorkItem, list[Tensor]], Sequence[Tensor]]
    ) -> None:
        """Compute for others in a step, piece by piece; ``compute`` is given what arrived."""
        for piece in range(HELP_PIECES):
            transfer, arriving = self._next_chunk
            transfer.wait()
            self._next_chunk = self._send_queries()
            results = [(item.out_rank, compute(item, x)) for item, x in arriving]
            self.finish()
            self._return_results(step, piece, results)

    def finish(self) -> None:
        """Wait for results sent home, and add each in its place."""
        for transfer, expected in self._in_flight:
            transfer.wait()
            for rows, tensors in expected:
                self.add(rows, tensors)
        self._in_flight.clear()

    def _send_queries(self) -> QueryChunk:
        """Start sending the next piece that others compute, and receiving the next one to do."""
        found = next(self._ahead, None)
        if found is None:
            return DONE, []
        step, piece = found
        ring, program = self.call.ring, self.call.program
        peer = ring.ahead(program.steps[step].shift)
        helped = _piece(program.remote_items(ring.rank, step), piece)
        sends = [(x.contiguous(), peer) for item in helped for x in self.take(item.q_slice)]
        others = [item for item in program.items(ring.rank, step) if item.q_rank != ring.rank]
        arriving = [
            (item, [x.new_empty(x.shape) for x in self.take(item.q_slice)])
            for item in _piece(others, piece)
        ]
        receives = [(x, item.q_rank) for item, tensors in arriving for x in tensors]
        return ring.start(sends, receives), arriving

    def _return_results(
        self, step: int, piece: int, results: Sequence[tuple[int, Sequence[Tensor]]]
    ) -> None:
        """Start sending results to the ranks they belong to, and receiving this rank's own."""
        ring, program = self.call.ring, self.call.program
        peer = ring.ahead(program.steps[step].shift)
        helped = [item.q_slice for item in _piece(program.remote_items(ring.rank, step), piece)]
        expected = [(rows, [x.new_empty(x.shape) for x in self.like(rows)]) for rows in helped]
        transfer = ring.start(
            [(x, owner) for owner, tensors in results for x in tensors],
            [(x, peer) for _, tensors in expected for x in tensors],
        )
        self._in_flight.append((transfer, expected))


def _piece(items: Sequence[WorkItem], number: int) -> list[WorkItem]:
    """The piece of each item that has so many."""
    pieces = [item.cut(HELP_PIECES) for item in items]
    return [cut[number] for cut in pieces if number < len(cut)]


def rows_tensors(rows: QueryBlock) -> list[Tensor]:
    """What a helper needs of some rows to run the forward."""
    return [x for x in (rows.q, rows.segments, rows.bias, rows.bias_shift) if x is not None]


def helped_rows(call: Call, item: WorkItem, like: QueryBlock, tensors: list[Tensor]) -> QueryBlock:
    """Rows that arrived as :func:`rows_tensors`, completed by what every rank knows."""
    q, *rest = tensors
    segments = None if like.segments is None else rest.pop(0)
    bias = None if like.bias is None else rest.pop(0)
    shift = None if like.bias_shift is None else rest.pop(0)
    index, position, _ = [
        None if x is None else x[item.q_slice] for x in call.positions(item.q_rank)
    ]
    return QueryBlock(q, index, position, segments, bias, like.slopes, bias_shift=shift)
