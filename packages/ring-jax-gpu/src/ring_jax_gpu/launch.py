"""A launch of a Triton kernel: what is known of it when it is traced, and its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jax import lax

from ring_core.triton.tile_configs import Blocks, stages_that_fit
from ring_jax.records import Array, Rectangle

Arrays = dict[str, Array]
Kernel = Literal["fwd", "bwd_dq", "bwd_dkv", "bwd_dbias"]
RANK_OPERAND = "rank"  # whose queries these are, int32[]; for Hopper alone

# Parameters of kernels that are other views of an array: of what comes by the copy engine, for
# blocks that are done NaN-safe; of keys and values side by side, for each by itself.
_VIEWS = {
    "q_pointer": ("q",), "dout_pointer": ("dout",), "k": ("kv",), "v": ("kv",),
    "k_pointer": ("kv", "k"), "v_pointer": ("kv", "v"),
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """What is known of a launch when it is traced; hashable."""

    kernel: Kernel
    numbers: tuple[tuple[str, int], ...]
    consts: tuple[tuple[str, Any], ...]  # of ``Constexprs``, but for ``TMA``
    grid: tuple[int, int, int]
    warps: int
    stages: int
    hopper: bool = False  # kernels for Hopper can do it
    rectangles: tuple[Rectangle, ...] = ()  # of Static
    fallback: tuple[Launch, ...] = ()  # what to launch instead where they cannot


def launches_of(launch: Launch) -> tuple[Launch, ...]:
    """The launches of plain Triton that one stands for, or itself."""
    return launch.fallback or (launch,)


def kernel_of(launch: Launch) -> Any:
    """The kernel of plain Triton."""
    from ring_core.triton import backward, forward

    return getattr(forward if launch.kernel == "fwd" else backward, launch.kernel)


def arrays_of(launch: Launch, arrays: Arrays, changed: tuple[str, ...]) -> Arrays:
    """All but what another launch changes, and what kernels for Hopper alone take."""
    known, others = kernel_of(launch).arg_names, {*changed, RANK_OPERAND}
    return {name: x for name, x in arrays.items() if name not in others or name in known}


def stages_of(launch: Launch, itemsize: int, capability: int) -> int:
    """How many blocks may be on their way at once.

    Raises:
        UnsupportedError: A GPU has no room for a block.
    """
    consts: dict[str, Any] = dict(launch.consts)
    blocks = Blocks(consts["BLOCK_Q"], consts["BLOCK_K"], launch.warps, launch.stages)
    return stages_that_fit(
        "bwd_fused" if consts["FUSED"] else launch.kernel, blocks, (consts["D"], consts["DV"]),
        itemsize, capability,
    )  # fmt: skip


def arguments_of(kernel: Any, launch: Launch, arrays: Arrays, *, has_tma: bool) -> dict[str, Any]:
    """All arguments of a kernel by name, ``None`` for arrays that the call does not have.

    jax-triton takes a name that it does not know for a constant; here that is an error.
    """
    from ring_core.triton.scores import Constexprs, as_constants, nan_safe_constexprs

    copied = has_tma and launch.kernel != "bwd_dbias" and _can_use_tma(launch, arrays)
    consts = Constexprs(**dict(launch.consts), TMA=copied)
    known: dict[str, Any] = {
        **arrays, **dict(launch.numbers), "consts": as_constants(consts),
        "nan_safe": as_constants(nan_safe_constexprs(consts)),
        **{name: arrays[x] for name, of in _VIEWS.items() for x in of if x in arrays},
        **(_descriptors(consts, arrays) if copied else {}),
    }  # fmt: skip
    unknown = {*arrays, *dict(launch.numbers)} - {*kernel.arg_names, "kv", "k", "v"}
    assert not unknown, f"{launch.kernel} has no parameters {sorted(unknown)}"
    return {name: known.get(name) for name in kernel.arg_names}


def _can_use_tma(launch: Launch, arrays: Arrays) -> bool:
    """Whether tiles can come by the copy engine, which knows no padding inside a row."""
    consts = dict(launch.consts)
    whole = consts["D"] == consts["PADDED"] and consts["DV"] == consts["PADDED_V"]
    return bool(whole and arrays["q"].dtype.itemsize * consts["DV"] % 16 == 0)


def _descriptors(consts: Any, arrays: Arrays) -> dict[str, Any]:
    """Tensors as ``[heads, length, dims]`` for the copy engine, with the tiles that it fetches."""
    from jax_triton import TensorDescriptor

    keys, values = ("kv", "kv") if consts.KV_PACKED else ("k", "v")
    shapes = {
        "q": ("q", consts.BLOCK_Q, consts.D), "dout": ("dout", consts.BLOCK_Q, consts.DV),
        "k": (keys, consts.BLOCK_K, consts.D), "v": (values, consts.BLOCK_K, consts.DV),
    }  # fmt: skip
    found = {}
    for name, (array, length, dims) in shapes.items():
        if array in arrays:
            flat = lax.collapse(arrays[array], 0, 2)
            found[name] = TensorDescriptor.from_array(flat, (1, length, dims))
    return found
