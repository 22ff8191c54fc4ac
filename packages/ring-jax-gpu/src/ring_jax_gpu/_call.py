"""The call of a Triton kernel as an operation of JAX that changes some of its arrays.

What it becomes is decided when a program is compiled for a GPU: only then are Triton and jax-triton
imported, and only then is it known whether the GPU has a copy engine for tiles.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
from jax.custom_batching import sequential_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ring_core.triton.tile_configs import Blocks
from ring_core.triton.tile_sizes import HOPPER, stages_that_fit
from ring_jax._ring import axes_of, vary_alike
from ring_jax._types import Array, Rectangle

Arrays = dict[str, Array]
Kernel = Literal["attend", "add_to_queries", "add_to_keys", "add_to_bias"]

_GLUON = (3, 9)  # of Triton
ONLY_HOPPER = "rank"  # whose queries these are, int32[]

# Parameters of kernels that are other views of an array: of what comes by the copy engine, for
# blocks that are done with care; of keys and values side by side, for each by itself.
_VIEWS = {
    "q_pointer": ("q",), "dout_pointer": ("dout",), "k": ("kv",), "v": ("kv",),
    "k_pointer": ("kv", "k"), "v_pointer": ("kv", "v"),
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """What is known of a launch when it is traced; hashable."""

    kernel: Kernel
    numbers: tuple[tuple[str, int], ...]
    facts: tuple[tuple[str, Any], ...]  # of ``_scores.Facts``, but for ``TMA``
    grid: tuple[int, int, int]
    warps: int
    stages: int
    hopper: bool = False  # kernels for Hopper can do it
    rectangles: tuple[Rectangle, ...] = ()  # of Static
    otherwise: tuple[Launch, ...] = ()  # what to launch instead where they cannot


def launches_of(launch: Launch) -> tuple[Launch, ...]:
    """The launches of plain Triton that one stands for, or itself."""
    return launch.otherwise or (launch,)


triton_launch_p = Primitive("ring_triton_launch")
triton_launch_p.multiple_results = True


def run(launch: Launch, given: Arrays, changed: Arrays) -> Arrays:
    """Launch a kernel that reads ``given`` and updates ``changed``; returns the latter."""
    given, changed = vary_alike((given, changed), axes_of((given, changed)))
    names = (*given, *changed)
    bind = partial(triton_launch_p.bind, launch=launch, names=names, num_changed=len(changed))

    # A vmapped axis is run through one by one.
    results = sequential_vmap(bind)(*given.values(), *changed.values())
    return dict(zip(changed, results, strict=True))


def _execute(*arrays: Array, **params: Any) -> Any:
    return jax.jit(partial(triton_launch_p.bind, **params))(*arrays)


def _changed_types(*types: Any, num_changed: int, **_: Any) -> Any:
    return types[len(types) - num_changed :]


triton_launch_p.def_impl(_execute)
triton_launch_p.def_abstract_eval(_changed_types)


def _lower(context: Any, *operands: Any, **params: Any) -> Any:
    return mlir.lower_fun(partial(_call_triton, **params))(context, *operands)


mlir.register_lowering(triton_launch_p, _lower, platform="cuda")


def _call_triton(
    *arrays: Array, launch: Launch, names: tuple[str, ...], num_changed: int
) -> list[Array]:
    """Call the kernel, or kernels, on the GPU that is compiled for."""
    by_name, changed = dict(zip(names, arrays, strict=True)), names[len(names) - num_changed :]
    capability = compute_capability()
    if launch.hopper and capability == HOPPER and has_roles():
        from ring_jax_gpu import _roles

        found = _roles.run(launch, by_name)
        return [found[name] for name in changed]
    for part in launches_of(launch):
        by_name |= _call_one(part, arrays_of(part, by_name, changed), changed, capability)
    return [by_name[name] for name in changed]


def _call_one(
    launch: Launch, by_name: Arrays, may_change: tuple[str, ...], capability: int
) -> Arrays:
    """Call one kernel of plain Triton; returns what it changed."""
    import jax_triton

    kernel = kernel_of(launch)
    stages = stages_of(launch, by_name["q"].dtype.itemsize, capability)
    arguments = arguments_of(kernel, launch, by_name, has_copy_engine=capability >= HOPPER)
    changed = [name for name in may_change if name in by_name]
    results = [jax.ShapeDtypeStruct(by_name[name].shape, by_name[name].dtype) for name in changed]
    operands = [name for name in kernel.arg_names if not name_is_static(kernel, name)]
    operands = [name for name in operands if arguments[name] is not None]
    with warnings.catch_warnings():
        # References, which are to replace these aliases, cannot be lowered here.
        warnings.filterwarnings("ignore", "input_output_aliases", DeprecationWarning)
        found = jax_triton.triton_call(
            kernel=kernel,
            out_type=results,
            grid=launch.grid,
            name=f"ring_{launch.kernel}",
            num_warps=launch.warps,
            num_stages=stages,
            compute_capability=capability,
            backend_options={"enable_fp_fusion": True},
            input_output_aliases={operands.index(name): n for n, name in enumerate(changed)},
            **arguments,
        )
    return dict(zip(changed, found, strict=True))


def kernel_of(launch: Launch) -> Any:
    """The kernel of plain Triton."""
    from ring_core.triton import backward, forward

    return getattr(forward if launch.kernel == "attend" else backward, launch.kernel)


def arrays_of(launch: Launch, arrays: Arrays, may_change: tuple[str, ...]) -> Arrays:
    """All but what another launch changes, and what kernels for Hopper alone take."""
    known = kernel_of(launch).arg_names
    others = {*may_change, ONLY_HOPPER}
    return {name: x for name, x in arrays.items() if name not in others or name in known}


def name_is_static(kernel: Any, name: str) -> bool:
    """Whether a parameter of a kernel is one it is compiled for."""
    return bool(kernel.params[kernel.arg_names.index(name)].is_constexpr)


def has_roles() -> bool:
    """Whether this Triton has the Gluon that the kernels for Hopper are written in."""
    import triton

    return tuple(int(x) for x in triton.__version__.split(".")[:2]) >= _GLUON


def compute_capability() -> int:
    """Of the first GPU, as in ``sm_90``."""
    major, minor = jax.local_devices(backend="cuda")[0].compute_capability.split(".")
    return 10 * int(major) + int(minor)


def stages_of(launch: Launch, itemsize: int, capability: int) -> int:
    """How many blocks may be on their way at once.

    Raises:
        UnsupportedError: A GPU has no room for a block.
    """
    facts: dict[str, Any] = dict(launch.facts)
    blocks = Blocks(facts["BLOCK_Q"], facts["BLOCK_K"], launch.warps, launch.stages)
    name = "add_to_all" if facts["FUSED"] else launch.kernel
    return stages_that_fit(name, blocks, (facts["D"], facts["DV"]), itemsize, capability)


def arguments_of(
    kernel: Any, launch: Launch, arrays: Arrays, *, has_copy_engine: bool
) -> dict[str, Any]:
    """All arguments of a kernel by name, ``None`` for arrays that the call does not have.

    jax-triton takes a name that it does not know for a constant; here that is an error.
    """
    from ring_core.triton.scores import Facts, as_constants, careful_facts

    copied = has_copy_engine and launch.kernel != "add_to_bias" and _can_be_copied(launch, arrays)
    facts = Facts(**dict(launch.facts), TMA=copied)
    known: dict[str, Any] = {**arrays, **dict(launch.numbers), "facts": as_constants(facts)}
    known["careful"] = as_constants(careful_facts(facts))
    known |= {name: arrays[x] for name, of in _VIEWS.items() for x in of if x in arrays}
    if facts.TMA:
        known |= _descriptors(facts, arrays)
    unknown = set(arrays) | set(dict(launch.numbers))
    unknown -= {*kernel.arg_names, "kv", "k", "v"}
    assert not unknown, f"{launch.kernel} has no parameters {sorted(unknown)}"
    return {name: known.get(name) for name in kernel.arg_names}


def _can_be_copied(launch: Launch, arrays: Arrays) -> bool:
    """Whether tiles can come by the copy engine, which knows no padding inside a row."""
    facts = dict(launch.facts)
    whole = facts["D"] == facts["PADDED"] and facts["DV"] == facts["PADDED_V"]
    return bool(whole and arrays["q"].dtype.itemsize * facts["DV"] % 16 == 0)


def _descriptors(facts: Any, arrays: Arrays) -> dict[str, Any]:
    """Tensors as ``[heads, length, dims]`` for the copy engine, with the tiles that it fetches."""
    from jax_triton import TensorDescriptor

    keys, values = ("kv", "kv") if facts.BESIDE else ("k", "v")
    shapes = {
        "q": ("q", facts.BLOCK_Q, facts.D), "dout": ("dout", facts.BLOCK_Q, facts.DV),
        "k": (keys, facts.BLOCK_K, facts.D), "v": (values, facts.BLOCK_K, facts.DV),
    }  # fmt: skip
    found = {}
    for name, (array, length, dims) in shapes.items():
        if array in arrays:
            x = arrays[array]
            flat = x.reshape(math.prod(x.shape[:2]), *x.shape[2:])
            found[name] = TensorDescriptor.from_array(flat, (1, length, dims))
    return found
