"""The launch of a Triton kernel as an operation of JAX that changes some of its arrays.

What it becomes is decided when a program is compiled for a GPU: only then are Triton and jax-triton
imported, and only then is it known whether the GPU has a copy engine for tiles.
"""

from __future__ import annotations

import warnings
from functools import partial

import jax
from jax.custom_batching import sequential_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ring_core.triton.tile_configs import HOPPER
from ring_jax.collectives import match_varying, varying_axes
from ring_jax.records import Array
from ring_jax_gpu.launch import (
    Arrays,
    Launch,
    arguments_of,
    arrays_of,
    kernel_of,
    launches_of,
    stages_of,
)

_GLUON = (3, 9)  # of Triton
triton_launch_p = Primitive("ring_triton_launch")
triton_launch_p.multiple_results = True


def run(launch: Launch, given: Arrays, changed: Arrays) -> Arrays:
    """Launch a kernel that reads ``given`` and updates ``changed``; returns the latter."""
    given, changed = match_varying((given, changed), varying_axes((given, changed)))
    bind = partial(
        triton_launch_p.bind, launch=launch, names=(*given, *changed), num_changed=len(changed)
    )

    # A vmapped axis is run through one by one.
    results = sequential_vmap(bind)(*given.values(), *changed.values())
    return dict(zip(changed, results, strict=True))


triton_launch_p.def_impl(
    lambda *arrays, **params: jax.jit(partial(triton_launch_p.bind, **params))(*arrays)
)
triton_launch_p.def_abstract_eval(
    lambda *types, num_changed, **_: types[len(types) - num_changed :]
)


def _call_triton(
    *arrays: Array, launch: Launch, names: tuple[str, ...], num_changed: int
) -> list[Array]:
    by_name, changed = dict(zip(names, arrays, strict=True)), names[len(names) - num_changed :]
    capability = compute_capability()
    if launch.hopper and capability == HOPPER and has_gluon():
        from ring_jax_gpu.hopper.run import run as run_for_hopper

        found = run_for_hopper(launch, by_name)
        return [found[name] for name in changed]
    for part in launches_of(launch):
        by_name |= _call_one(part, arrays_of(part, by_name, changed), changed, capability)
    return [by_name[name] for name in changed]


mlir.register_lowering(triton_launch_p, mlir.lower_fun(_call_triton), platform="cuda")


def _call_one(
    launch: Launch, by_name: Arrays, all_changed: tuple[str, ...], capability: int
) -> Arrays:
    import jax_triton

    kernel = kernel_of(launch)
    arguments = arguments_of(kernel, launch, by_name, has_tma=capability >= HOPPER)
    changed = [name for name in all_changed if name in by_name]
    results = [jax.ShapeDtypeStruct(by_name[name].shape, by_name[name].dtype) for name in changed]
    operands = [
        x.name for x in kernel.params if not x.is_constexpr and arguments[x.name] is not None
    ]
    with warnings.catch_warnings():
        # References, which are to replace these aliases, cannot be lowered here.
        warnings.filterwarnings("ignore", "input_output_aliases", DeprecationWarning)
        found = jax_triton.triton_call(
            kernel=kernel,
            out_type=results,
            grid=launch.grid,
            name=f"ring_{launch.kernel}",
            num_warps=launch.warps,
            num_stages=stages_of(launch, by_name["q"].dtype.itemsize, capability),
            compute_capability=capability,
            backend_options={"enable_fp_fusion": True},
            input_output_aliases={operands.index(name): n for n, name in enumerate(changed)},
            **arguments,
        )
    return dict(zip(changed, found, strict=True))


def has_gluon() -> bool:
    """Whether this Triton has the Gluon that the kernels for Hopper are written in."""
    import triton

    return tuple(int(x) for x in triton.__version__.split(".")[:2]) >= _GLUON


def compute_capability() -> int:
    """Of the first GPU, as in ``sm_90``."""
    major, minor = jax.local_devices(backend="cuda")[0].compute_capability.split(".")
    return 10 * int(major) + int(minor)
