"""Constant part of an operation in a graph: written as text, and read when the graph runs.

Tensors, and numbers that may change without recompilation, are arguments of the operation, in two
lists. The text holds their indices in these lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group  # torch has no public name for it
from torch.distributed.distributed_c10d import GroupName

from ring_core import ChunkLayout, KernelConfig, StrategyConfig
from ring_torch.capture import constant_in_graphs
from ring_torch.comm.groups import members_of
from ring_torch.comm.ranks import Group, OneRank, Ranks, ranks_of
from ring_torch.comm.whole import check_graph

_OTHER_GROUP = (
    "the process group that this graph was compiled for is gone, or another one is the default "
    "group by now; compile it anew (torch.compiler.reset())"
)


#: Our classes that may occur in options, and the keys by which the text names them.
_RECORDS: dict[str, Any] = {
    "chunks": ChunkLayout, "kernel": KernelConfig, "strategy": StrategyConfig,
}  # fmt: skip


def to_json(x: Any, tensors: list[Tensor] | None = None, numbers: list[int] | None = None) -> Any:
    """Return a layout or an option in a form that JSON can store.

    Other values, as strings and ``None``, are returned as they are. It runs in the graph's trace,
    as torch 2.11 accepts no object of our classes as a constant.

    Args:
        x: The value.
        tensors: List to which tensors in it are added; their indices are written.
        numbers: List to which integers in it are added; their indices are written. If ``None``, the
            integers themselves are written, as those inside our classes always are. An integer that
            had another value in an earlier trace is a symbol to the compiler; written out, it
            becomes a constant.
    """
    if isinstance(x, float):
        return {"float": x.hex()}
    if isinstance(x, int) and not isinstance(x, bool):
        return index(x) if numbers is None else _placed("number", x, numbers)
    if isinstance(x, Tensor) and tensors is not None:
        return _placed("tensor", x, tensors)
    if isinstance(x, (tuple, list)):
        return [to_json(y, tensors, numbers) for y in x]
    for key, record in _RECORDS.items():
        if isinstance(x, record):
            return {key: [to_json(getattr(x, name)) for name in record.__match_args__]}
    return x


def as_documents(offsets: Any) -> Any:
    """Return ``cu_seqlens`` as an operation takes them: a sequence of integers, or a tensor.

    It is traced, so it must not look at the value of a number.

    Raises:
        ValueError: They are in an array that the host does not know.
    """
    is_sequence = isinstance(offsets, (tuple, list))
    if is_sequence and any(isinstance(x, (np.ndarray, np.generic, Tensor)) for x in offsets):
        offsets, is_sequence = torch.stack([_on_host(x) for x in offsets]), False
    if is_sequence:
        return offsets
    array = _on_host(offsets)
    if array.device.type != "cpu":
        raise ValueError(
            "cu_seqlens must be known on the host: pass cu_seqlens.cpu(), or segment_ids"
        )
    return array.clone()  # the caller may write to the given one before the graph runs


def _on_host(x: Any) -> Tensor:
    """Return a tensor as it is, and numbers as one on the host, whatever the default device is."""
    return x if isinstance(x, Tensor) else torch.as_tensor(x, device="cpu")


def _placed(kind: str, x: Any, values: list[Any]) -> dict[str, int]:
    """Add a value to a list, and return its kind and its index in the list."""
    values.append(x)
    return {kind: len(values) - 1}


def from_json(x: Any, tensors: Sequence[Any] = (), numbers: Sequence[int] | None = None) -> Any:
    """Return the value that :func:`to_json` has written; lists come back as tuples.

    ``numbers`` are ``None`` while a graph is traced, where they are not known: each integer that
    was put in that list is read as 0.
    """
    if isinstance(x, list):
        return tuple([from_json(y, tensors, numbers) for y in x])
    if not isinstance(x, dict):
        return x
    ((key, value),) = x.items()
    if key == "tensor":
        return tensors[value]
    if key == "number":
        return 0 if numbers is None else numbers[value]
    return float.fromhex(value) if key == "float" else _RECORDS[key](*from_json(value))


@constant_in_graphs
def size_of(group: Any) -> int:
    """Return the number of ranks of a group; the compiler takes it for a constant."""
    return ranks_of(group).size


def group_fields(ranks: Ranks) -> dict[str, Any]:
    """Return the facts of a group by which :func:`ranks_named` finds it again, ready for JSON."""
    name: str | None = None if ranks.group is None else ranks.group.group_name
    if ranks is ranks_of(OneRank.WHOLE):
        name = OneRank.WHOLE.value
    return {"group": name, "ranks": [ranks.rank, ranks.size]}


def ranks_named(facts: Mapping[str, Any], *, is_forward: bool = False) -> Ranks:
    """Return the ranks of a group from its facts, as :func:`group_fields` wrote them.

    Args:
        facts: The facts.
        is_forward: True for a forward, which a backward may be computing again.

    Raises:
        ValueError: The group is gone, or this rank or the number of ranks is not that of the facts.
        UnsupportedError: It is computed again in a backward, whose forward was of a graph for
            shards and this one is for whole sequences, or the other way round.
    """
    name = facts["group"]
    group: Group = None
    try:
        if name == OneRank.WHOLE.value:
            group = OneRank.WHOLE
        elif name is not None:  # torch has no public function from a name to its group
            group = _resolve_process_group(GroupName(name))
        ranks = ranks_of(group)
    except RuntimeError as error:
        raise ValueError(f"{_OTHER_GROUP}: {error}") from error
    if [ranks.rank, ranks.size] != facts["ranks"]:
        raise ValueError(_OTHER_GROUP)
    if is_forward:
        check_graph(members_of(group).ranks, is_whole=group is OneRank.WHOLE)
    return ranks
