"""Split backward in plain torch, which sums dK/dV in tiles and in a memory order of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ring_core import Plan, Request, WorkItem
from ring_torch.accumulate import Columns, ColumnSums, Rows, item_grads, one_by_one
from ring_torch.buffers import KVPayload
from ring_torch.kernels import fa4
from ring_torch.kernels.api import OwnSpans, SplitBackward
from ring_torch.kernels.eager import EagerKernel
from ring_torch.records import Backward, BackwardInputs, Grads, KernelParams, KeyBlock, QueryBlock

KEYS = 4  # keys of a tile


@dataclass(frozen=True)
class Tiled(SplitBackward):
    """A split backward that stores each tile's elements in reverse order.

    Attributes:
        used: Answers of ``applies``, and True for each run.
    """

    used: list[bool]
    tile = KEYS

    def applies(self, plan: Plan, request: Request, *, splits: bool, tile: int) -> bool:
        """Return True if all items and fetches consist of whole tiles."""
        del request
        self.used.append(fa4.in_whole_tiles(plan, splits, tile))
        return self.used[-1]

    def backward(self, items: Sequence[WorkItem], params: KernelParams) -> Backward:
        """Return the launch of items."""

        def run(
            rows: QueryBlock, held: list[KeyBlock], upstream: BackwardInputs, row_sums: Rows,
            column_sums: ColumnSums,
        ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
            assert isinstance(column_sums, Columns)
            self.used.append(True)
            columns = held[0]
            batch, length, heads, dim = columns.k.shape
            totals = column_sums.flat.view(2, batch, heads, length, dim)
            for item in reversed(items):
                memory = row_sums.memory(item.q_slice)
                assert memory is not None
                operands = rows.take(item.q_slice), columns.take(item.k_slice)
                grads = _item_grads(
                    item, params, *operands, upstream.take(item.q_slice), memory, None
                )
                memory.copy_(grads.dq)
                for total, x in zip(totals, (grads.dk, grads.dv), strict=True):
                    total[:, :, item.k_slice] += _reversed(x.transpose(1, 2))
            held.clear()
            # As libraries have it: the items' rows as a batch, padded at the end.
            sizes = {item.q_stop - item.q_start for item in items}
            in_turn = all(a.q_stop == b.q_start for a, b in pairwise(items))
            if len(sizes) != 1 or not in_turn or (batch > 1 and len(items) > 1):
                return None
            own = upstream.take(slice(items[0].q_start, items[-1].q_stop))
            lse, delta = own.lse, (own.dout * own.out).sum(dim=-1).transpose(1, 2)
            if batch == 1:
                lse, delta = (
                    x[0].unflatten(1, (len(items), -1)).transpose(0, 1) for x in (lse, delta)
                )
            return lse, torch.nn.functional.pad(delta, (0, 3), value=torch.nan)[..., :-3]

        return Backward(run, adds=False)

    def rounding(
        self, spans: OwnSpans, keys: KVPayload, params: KernelParams
    ) -> Callable[[Tensor, Tensor, Tensor], None]:
        """Return what rounds spans of own keys."""
        del params

        def round_all(sums: Tensor, dk: Tensor, dv: Tensor) -> None:
            assert dk.shape == (keys.batch, keys.length, keys.heads, keys.dim)
            batch, _, heads, dim = dk.shape
            totals = sums.view(2, batch, heads, spans.length, dim)
            for n in range(spans.number):
                start = spans.target + n * spans.target_step
                first = spans.source + n * spans.source_step
                for total, grad in zip(totals, (dk, dv), strict=True):
                    own = _reversed(total[:, :, start : start + spans.keys])
                    grad[:, first : first + spans.keys] = own.transpose(1, 2)

        return round_all


class TiledKernel(EagerKernel):
    """An eager kernel with a split backward that sums in tiles."""

    needs_delta = False

    def __init__(self, used: list[bool]) -> None:
        self.split_backward: SplitBackward = Tiled(used)

    def backward(self, items: Sequence[WorkItem], params: KernelParams, *, adds: bool) -> Backward:
        """Return the launch of a backward that is not split; it computes delta itself."""
        del adds
        return one_by_one(items, [partial(_item_grads, item, params) for item in items])


def _item_grads(
    item: WorkItem, params: KernelParams, rows: QueryBlock, columns: KeyBlock,
    upstream: BackwardInputs, dst: Tensor | None, key: object,
) -> Grads:  # fmt: skip
    delta = (upstream.dout * upstream.out).sum(dim=-1).transpose(1, 2)
    launch = partial(EagerKernel().differentiate, item, params)
    return item_grads(launch, params, rows, columns, upstream._replace(delta=delta), dst, key)


def _reversed(x: Tensor) -> Tensor:
    """Return ``[B, K, n, D]`` with each tile's elements in reverse order."""
    tiles = x.unflatten(2, (-1, KEYS)).flatten(3)
    reversed_keys: Tensor = tiles.flip(3).unflatten(3, (KEYS, -1)).flatten(2, 3)
    return reversed_keys
