"""The launch of a Triton kernel as a JAX primitive, which updates some of its arrays.

The kernel is chosen when a program is lowered for a GPU: only then are Triton and jax-triton
imported, and only then is it known whether the GPU has a copy engine for tiles.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import jax
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ring_core import UnsupportedError
from ring_core.triton.tile_configs import HOPPER
from ring_jax.collectives import match_varying, varying_axes
from ring_jax.kernels import compute_capability
from ring_jax.kernels.absent import wrong_platform
from ring_jax.records import Array
from ring_jax_gpu.launch import (
    IDS_ASCEND,
    Arrays,
    Launch,
    arguments_of,
    arrays_of,
    kernel_of,
    launches_of,
    stages_of,
)

GLUON = (3, 9)  # first version of Triton whose Gluon the kernels for Hopper can be written in
triton_launch_p = Primitive("ring_triton_launch")
triton_launch_p.multiple_results = True


def launch_kernel(launch: Launch, read: Arrays, changed: Arrays) -> Arrays:
    """Launch a kernel that reads the arrays ``read`` and updates those of ``changed``.

    Returns:
        The updated arrays by name. Under ``vmap`` there is one launch an element, in sequence.
    """
    read, changed = match_varying((read, changed), varying_axes((read, changed)))
    bind = partial(
        triton_launch_p.bind, launch=launch, names=(*read, *changed), num_changed=len(changed)
    )
    results = sequential_vmap(bind)(*read.values(), *changed.values())
    return dict(zip(changed, results, strict=True))


def _run(*arrays: Array, **params: Any) -> Any:
    """Run a program of one launch, under ``jax.disable_jit``, too."""
    with jax.disable_jit(disable=False):
        return jax.jit(partial(triton_launch_p.bind, **params))(*arrays)


triton_launch_p.def_impl(_run)
triton_launch_p.def_abstract_eval(
    lambda *types, num_changed, **_: types[len(types) - num_changed :]
)


def _call_triton(
    *arrays: Array, launch: Launch, names: tuple[str, ...], num_changed: int
) -> list[Array]:
    """Lower the primitive: to a kernel for Hopper if it can be one, else to plain Triton.

    Returns:
        The last ``num_changed`` arrays, updated.
    """
    by_name, changed = dict(zip(names, arrays, strict=True)), names[len(names) - num_changed :]
    capability = compute_capability()
    if capability is None:
        raise UnsupportedError(
            "kernel 'triton': is compiled for the GPU of this machine, and JAX finds none. Instead: "
            "lower the program where it runs, or use kernel='xla'"
        )
    by_plain = partial(_run_plain, launch, changed, capability)
    if not (launch.hopper and capability == HOPPER and has_gluon()):
        results = by_plain(by_name)
    elif IDS_ASCEND in by_name:
        ascend = by_name.pop(IDS_ASCEND)
        results = _run_by_ids(ascend, partial(_run_on_hopper, launch, changed), by_plain, by_name)
    else:
        results = _run_on_hopper(launch, changed, by_name)
    return [results[name] for name in changed]


def _run_on_hopper(launch: Launch, changed: tuple[str, ...], arrays: Arrays) -> Arrays:
    """Run a launch by the kernels for Hopper; return the changed arrays."""
    from ring_jax_gpu.hopper.run import run

    arrays = arrays | run(launch, arrays)
    return {name: arrays[name] for name in changed}


def _run_plain(launch: Launch, changed: tuple[str, ...], capability: int, arrays: Arrays) -> Arrays:
    """Run a launch in plain Triton, where one kernel may follow another; return likewise."""
    for plain in launches_of(launch):
        arrays = arrays | _call_plain(plain, arrays_of(plain, arrays, changed), changed, capability)
    return {name: arrays[name] for name in changed}


def _run_by_ids(
    ascend: Array, on_hopper: Callable[[Arrays], Arrays], by_plain: Callable[[Arrays], Arrays],
    arrays: Arrays,
) -> Arrays:  # fmt: skip
    """Run the kernels for Hopper if segment ids ascend, or else plain Triton; the GPU decides.

    Tensors go in and come out as ``[B, T, H, D]``, as they lie in memory: XLA would transpose them
    to the order that plain Triton reads before it knows which branch is taken.
    """

    def turned(arrays: Arrays) -> Arrays:
        return {name: x.swapaxes(1, 2) if x.ndim == 4 else x for name, x in arrays.items()}

    branches = (lambda x, run=run: turned(run(turned(x))) for run in (on_hopper, by_plain))
    return turned(lax.cond(ascend, *branches, turned(arrays)))


def _refuse(*_: Any, **__: Any) -> NoReturn:
    """Raise the error of a program that names a kernel and is lowered for another platform."""
    raise UnsupportedError(wrong_platform("cuda", "triton"))


mlir.register_lowering(triton_launch_p, _refuse)
mlir.register_lowering(triton_launch_p, mlir.lower_fun(_call_triton), platform="cuda")


def _call_plain(
    launch: Launch, by_name: Arrays, all_changed: tuple[str, ...], capability: int
) -> Arrays:
    """Call one kernel in plain Triton; return the arrays that it updated, by name."""
    import jax_triton

    kernel = kernel_of(launch)
    arguments = arguments_of(kernel, launch, by_name, has_tma=capability >= HOPPER)
    changed = [name for name in all_changed if name in by_name]
    results = [jax.ShapeDtypeStruct(by_name[name].shape, by_name[name].dtype) for name in changed]
    operands = [
        x.name for x in kernel.params if not x.is_constexpr and arguments[x.name] is not None
    ]
    # jax-triton asks JAX for each argument's type; strides of 2^31 and more have one of 64 bits.
    with jax.enable_x64(True), warnings.catch_warnings():
        # References, which are to replace these aliases, cannot be lowered here.
        warnings.filterwarnings("ignore", "input_output_aliases", DeprecationWarning)
        updated = jax_triton.triton_call(
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
    return dict(zip(changed, updated, strict=True))


def has_gluon() -> bool:
    """Return True if this Triton has the Gluon that the kernels for Hopper are written in."""
    import triton

    return tuple(int(x) for x in triton.__version__.split(".")[:2]) >= GLUON
