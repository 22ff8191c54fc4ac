"""Runs all ranks of a case on one device, one after another, and sums their results."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cases import Case
from torch import Tensor

from ring_core import WorkItem, gather_program
from ring_torch.accumulate import Accumulator, Rows, Work, joins_of, unseen_state
from ring_torch.autograd import _sink_grads
from ring_torch.call import add_sinks
from ring_torch.kernels.api import Kernel
from ring_torch.records import (
    BackwardInputs,
    KernelParams,
    KeyBlock,
    KeyGrads,
    QueryBlock,
    runs_of,
)

Arrays = dict[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int64]


class Emulation:
    """Tensors of a case on one device, and the launches of all its ranks."""

    def __init__(self, case: Case, kernel: Kernel, device: str, *, gathered: bool) -> None:
        self.case, self.kernel, self.gathered = case, kernel, gathered
        self.device, self.plan, self.program = torch.device(device), case.plan, case.program
        self.x = {
            name: torch.tensor(array, device=device, dtype=self._dtype(array))
            for name, array in ((name, case.padded(name)) for name in case.inputs)
        }
        scale = case.dims[0] ** -0.5 if case.softmax_scale is None else case.softmax_scale
        self.params = KernelParams(self.plan.mask, scale, case.softcap, blocks=self.plan.blocks)

    def _dtype(self, array: npt.NDArray[Any]) -> torch.dtype:
        return getattr(torch, self.case.dtype) if array.dtype.kind == "f" else torch.int32

    def run(self) -> Arrays:
        """Return ``out``, ``lse`` and the gradients by name."""
        x = self.x
        whole = unseen_state(x["q"], x["v"].shape[3], torch.float32)
        for rank in range(self.case.cp_size):
            q_at, rows, work = self._work(rank)
            launches = [self.kernel.forward(item, self.params) for *_, item in work]
            # One by one, as in a ring.
            joins = joins_of(launches, rows.q.dtype, len(q_at), resumes=True)
            accumulator = Accumulator(joins, rows.q, x["v"].shape[3])
            for launch, (_, columns, _) in zip(launches, work, strict=True):
                accumulator.attend(Work.of([launch], len(q_at), columns.k.shape[1]), rows, columns)
            whole.out[:, q_at], whole.lse[:, :, q_at] = accumulator.state
        out, lse = whole
        if "sinks" in x:
            out, lse = add_sinks(out, lse, x["sinks"])
        out = out.to(x["q"].dtype)
        delta = (x["dout"].float() * out.float()).sum(-1).transpose(1, 2).contiguous()
        dq, dk, dv = (torch.zeros_like(x[name], dtype=torch.float32) for name in "qkv")
        for rank in range(self.case.cp_size):
            q_at, rows, work = self._work(rank)
            upstream = BackwardInputs(
                x["dout"][:, q_at], out[:, q_at], lse[:, :, q_at], delta[:, :, q_at]
            )
            row_sums = Rows(partial(self._local, dq, q_at, 1), "add")
            for k_at, columns, item in work:
                key_sums = KeyGrads(self._local(dk, k_at, 1), self._local(dv, k_at, 1))
                backward = self.kernel.backward([item], self.params, adds=True)
                backward.run(rows, [columns], upstream, row_sums, key_sums)
                dk[:, k_at], dv[:, k_at] = key_sums
            dq[:, q_at] = row_sums.whole()
        results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        results = {
            name: value.to(x["q"].dtype) if name[0] == "d" else value
            for name, value in results.items()
        }
        if "sinks" in x:
            results["dsinks"] = _sink_grads(x["sinks"], lse, delta)
        return {name: value.double().cpu().numpy() for name, value in results.items()}

    def _local(self, x: Tensor, index: Ints, dim: int) -> Tensor:
        """Return a copy of the rows at ``index``."""
        return x.index_select(dim, torch.as_tensor(index, device=self.device))

    def _work(self, rank: int) -> tuple[Ints, QueryBlock, list[tuple[Ints, KeyBlock, WorkItem]]]:
        """Return a rank's rows, and for each launch its columns and item; indices are global."""
        return self.plan.positions(rank), self._rows(rank), [*self._items(rank)]

    def _rows(self, rank: int) -> QueryBlock:
        positions, x = self.plan.positions(rank), self.x
        ids = self._local(x["q_ids"], positions, 1) if "q_ids" in x else None
        slopes = torch.atleast_2d(x["alibi_slopes"]) if "alibi_slopes" in x else None
        index, position = (
            torch.as_tensor(y, device=self.device) for y in (positions, self.plan.q_positions(rank))
        )
        runs = runs_of(self.plan.q_positions(rank))
        return QueryBlock(
            self._local(x["q"], positions, 1), segments=ids, indices=index, position=position,
            slopes=slopes, runs=runs,
        )  # fmt: skip

    def _columns(self, positions: Ints) -> KeyBlock:
        x = self.x
        ids = self._local(x["k_ids"], positions, 1) if "k_ids" in x else None
        k, v = (self._local(x[name], positions, 1) for name in "kv")
        return KeyBlock(
            k, v, ids, torch.as_tensor(positions, device=self.device), runs=runs_of(positions)
        )

    def _items(self, rank: int) -> Iterator[tuple[Ints, KeyBlock, WorkItem]]:
        if self.gathered:
            gather = gather_program(self.plan, rank)
            gathered = self._columns(gather.positions)
            yield from ((gather.positions, gathered, item) for item in gather.items)
            own = self.plan.k_positions(rank)
            yield from ((own, self._columns(own), item) for item in gather.in_place)
            return
        for step in range(self.program.num_steps):
            for item in self.program.items(rank, step):
                k_at = self.plan.k_positions(item.kv_rank)
                assert item.q_rank == rank, "no layout that lends queries"
                yield k_at, self._columns(k_at), item
