"""Movements and ``unshard`` refuse DTensors, sparse and nested tensors, and send nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ring_torch import ContextParallel
from ring_torch.local import LocalRanks

CALLS: dict[str, Callable[[ContextParallel, Tensor], object]] = {
    "shift": lambda cp, x: cp.shift(x, 1), "halo": lambda cp, x: cp.halo(x, 1, 0),
    "relayout": lambda cp, x: cp.relayout(x, to="contiguous"),
    "unshard": lambda cp, x: cp.unshard(x),
}  # fmt: skip


def _refused(_: int) -> list[str]:
    cp, whole, messages = ContextParallel(), torch.ones(1, 8, 2), []
    mesh = init_device_mesh("cpu", (2,))
    kinds = {
        "a DTensor": distribute_tensor(whole, mesh, [Shard(1)]),
        "a sparse_coo one": whole[:, :4].to_sparse(),
        "a nested one": torch.nested.nested_tensor([whole[0, :4]] * 2, layout=torch.jagged),
    }
    for name, call in CALLS.items():
        for words, x in kinds.items():
            try:
                call(cp, x)
            except ValueError as error:
                messages += [] if words in str(error) else [f"{name}, {words}: {error}"]
            else:
                messages.append(f"{name}, {words}: no error")
        call(cp, whole[:, :4])  # the group stays usable
    return messages


def test_other_kinds_of_tensors_are_refused() -> None:
    with LocalRanks(2, timeout=20) as ranks:
        assert ranks.run(_refused) == [[], []]
