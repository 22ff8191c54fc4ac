"""The static description of a Triton kernel launch, and the kernel's arguments by name."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

from jax import lax

from ring_core.triton.tile_configs import Blocks, stages_that_fit
from ring_jax.records import Array, Item

Arrays = dict[str, Array]
KernelName = Literal["fwd", "bwd_dq", "bwd_dkv", "bwd_dbias"]
ITEM_NUMBER = "item_number"  # of the rank's item in `rectangles`; only kernels for Hopper take it
#: int32 [B, 2, outer length]: where the segment of each outer token starts and stops among the
#: inner tokens, if segment ids ascend on both sides, else zeros. Only kernels for Hopper take it.
SEGMENT_CELLS = "segment_cells"
#: bool []: True if they ascend. Where they do not, plain Triton does the launch on Hopper, too.
IDS_ASCEND = "ids_ascend"

# The documents of each kernel's outer tokens, int32 [2, outer length]: where they start and stop
# among the inner tokens. A launch and its fallback may have different outer sides.
CELLS: dict[KernelName, str] = {
    "fwd": "q_cells", "bwd_dq": "q_cells", "bwd_dkv": "k_cells", "bwd_dbias": "q_cells",
}  # fmt: skip
# The blocks that each kernel visits, by the outer block, and their counts.
LISTS: dict[KernelName, tuple[str, str]] = {
    "fwd": ("q_block_index", "q_counts"), "bwd_dq": ("q_block_index", "q_counts"),
    "bwd_dkv": ("k_block_index", "k_counts"),
}  # fmt: skip
# Parameters of kernels that are further views of an array. Arrays that the copy engine fetches are
# also passed as pointers, for blocks that are computed NaN-safe; keys and values that lie side by
# side are passed as one array each.
_VIEWS = {
    "q_pointer": ("q",), "dout_pointer": ("dout",), "k": ("kv",), "v": ("kv",),
    "k_pointer": ("kv", "k"), "v_pointer": ("kv", "v"), "cells": ("q_cells", "k_cells"),
    "block_index": ("q_block_index", "k_block_index"), "counts": ("q_counts", "k_counts"),
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """The static description of a launch, known when it is traced; hashable."""

    kernel: KernelName
    numbers: tuple[tuple[str, int], ...]  # integer arguments by name
    consts: tuple[tuple[str, Any], ...]  # fields of ``Constexprs`` by name, except ``TMA``
    grid: tuple[int, int, int]
    warps: int
    stages: int
    hopper: bool = False  # a kernel for Hopper can do it
    # The plan's distinct work items if all are fully visible or empty; else none. The kernels for
    # Hopper then share out an item's blocks evenly; ITEM_NUMBER says which item is the rank's.
    rectangles: tuple[Item[int], ...] = ()
    fallback: tuple[Launch, ...] = ()  # launches in plain Triton to replace it on other GPUs


def launches_of(launch: Launch) -> tuple[Launch, ...]:
    """Return the launches in plain Triton that a launch stands for."""
    return launch.fallback or (launch,)


def kernel_of(launch: Launch) -> Any:
    """Return the launch's kernel in plain Triton."""
    from ring_core.triton import backward, forward

    return getattr(forward if launch.kernel == "fwd" else backward, launch.kernel)


def arrays_of(launch: Launch, arrays: Arrays, changed: tuple[str, ...]) -> Arrays:
    """Return the arrays of a launch: without those of other launches and of Hopper's kernels.

    ``changed`` are the arrays that some launch changes; each launch has parameters for its own.
    """
    by_outer = {*CELLS.values(), *itertools.chain(*LISTS.values())}
    optional = {*changed, ITEM_NUMBER, SEGMENT_CELLS, IDS_ASCEND, *by_outer}
    own = {*kernel_of(launch).arg_names, CELLS[launch.kernel], *LISTS.get(launch.kernel, ())}
    return {name: x for name, x in arrays.items() if name not in optional or name in own}


def stages_of(launch: Launch, itemsize: int, capability: int) -> int:
    """Return the number of pipeline stages of a launch, lowered until they fit in shared memory.

    Raises:
        UnsupportedError: The shared memory of this GPU is too small for even one.
    """
    consts: dict[str, Any] = dict(launch.consts)
    blocks = Blocks(consts["BLOCK_Q"], consts["BLOCK_K"], launch.warps, launch.stages)
    return stages_that_fit(
        "bwd_fused" if consts["FUSED"] else launch.kernel, blocks, (consts["D"], consts["DV"]),
        itemsize, capability,
    )  # fmt: skip


def arguments_of(kernel: Any, launch: Launch, arrays: Arrays, *, has_tma: bool) -> dict[str, Any]:
    """Return all arguments of a kernel by name, ``None`` for arrays that the call does not have.

    ``has_tma`` says that the GPU has a copy engine for tiles. jax-triton would take a name that it
    does not know for a constant; here that is an assertion error.
    """
    from ring_core.triton.scores import Constexprs, as_constants, nan_safe_constexprs

    consts = Constexprs(**dict(launch.consts), TMA=False)
    # The copy engine cannot pad inside a row, and fetches rows of multiples of 16 bytes.
    is_unpadded = (consts.D, consts.DV) == (consts.PADDED, consts.PADDED_V)
    fits = is_unpadded and arrays["q"].dtype.itemsize * consts.DV % 16 == 0
    uses_tma = has_tma and launch.kernel != "bwd_dbias" and fits
    consts = consts._replace(TMA=uses_tma)
    arguments: dict[str, Any] = {
        **arrays, **dict(launch.numbers), "consts": as_constants(consts),
        "nan_safe": as_constants(nan_safe_constexprs(consts)),
        **{name: arrays[x] for name, views in _VIEWS.items() for x in views if x in arrays},
        **(_descriptors(consts, arrays) if uses_tma else {}),
    }  # fmt: skip
    views = {"kv", "k", "v", CELLS[launch.kernel], *LISTS.get(launch.kernel, ())}
    unknown = {*arrays, *dict(launch.numbers)} - {*kernel.arg_names, *views}
    assert not unknown, f"{launch.kernel} has no parameters {sorted(unknown)}"
    return {name: arguments.get(name) for name in kernel.arg_names}


def _descriptors(consts: Any, arrays: Arrays) -> dict[str, Any]:
    """Return the copy engine's descriptors of tensors ``[heads, length, dims]`` and their tiles."""
    from jax_triton import TensorDescriptor

    keys, values = ("kv", "kv") if consts.KV_PACKED else ("k", "v")
    shapes = {
        "q": ("q", consts.BLOCK_Q, consts.D), "dout": ("dout", consts.BLOCK_Q, consts.DV),
        "k": (keys, consts.BLOCK_K, consts.D), "v": (values, consts.BLOCK_K, consts.DV),
    }  # fmt: skip
    descriptors = {}
    for name, (array, length, dims) in shapes.items():
        if array in arrays:
            flat = lax.collapse(arrays[array], 0, 2)
            descriptors[name] = TensorDescriptor.from_array(flat, (1, length, dims))
    return descriptors
