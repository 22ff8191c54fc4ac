"""What is static about a call in a graph: written as text, and read when the graph runs."""

from __future__ import annotations

from operator import index
from typing import Any

from torch.distributed import distributed_c10d

from ring_core import ChunkLayout, KernelConfig, LayoutSpec, StrategyConfig
from ring_torch.comm.ranks import Ranks, ranks_of

_OTHER_GROUP = (
    "the process group that this graph was compiled for is gone, or another one is the default "
    "group by now; compile it anew (torch.compiler.reset())"
)


def fields_of(x: Any) -> Any:
    """Return the fields of a layout, a kernel or a strategy in order, or its name as it is.

    They are read in the graph's trace, since torch 2.11 takes no object of ours for a constant. A
    number that was another in an earlier trace is a symbol there; its index is a constant.
    """
    if isinstance(x, ChunkLayout):
        return [[index(chunk) for chunk in chunks] for chunks in x.chunks]
    if isinstance(x, KernelConfig):
        sizes = [None if size is None else index(size) for size in (x.block_q, x.block_k)]
        return [x.name, *sizes, x.fused_backward]
    if isinstance(x, StrategyConfig):
        return [x.name, x.ulysses_size, x.outer, x.local_size]
    return x


def group_fields(ring: Ranks) -> dict[str, Any]:
    """Return the facts of a group by which :func:`ring_of` finds it again."""
    name = None if ring.group is None else ring.group.group_name
    return {"group": name, "ranks": [ring.rank, ring.size]}


def layout_of(field: Any) -> LayoutSpec:
    """Return the layout of what :func:`fields_of` wrote."""
    if isinstance(field, list):
        return ChunkLayout(tuple(map(tuple, field)))
    layout: LayoutSpec = field
    return layout


def ring_of(name: str | None, ranks: tuple[int, int]) -> Ranks:
    """Return the ring of the group of this name.

    Raises:
        ValueError: It is gone, or has other ranks.
    """
    group: Any = None
    try:
        if name is not None:  # there is no public way from a name
            typed = distributed_c10d.GroupName(name)
            group = distributed_c10d._resolve_process_group(typed)  # type: ignore[attr-defined] # noqa: SLF001
        ring = ranks_of(group)
    except RuntimeError as error:
        raise ValueError(f"{_OTHER_GROUP}: {error}") from error
    if (ring.rank, ring.size) != ranks:
        raise ValueError(_OTHER_GROUP)
    return ring
