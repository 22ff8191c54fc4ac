"""Meshes of a ``ContextParallel``: checks of their axes, and their form in a pickle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import numpy.typing as npt
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding

from ring_core import UnsupportedError, checks
from ring_jax.collectives import AnyMesh, Axes, is_explicit, size_of


def check_axes(mesh: object, axis_name: object, batch_axis: object, head_axis: object) -> None:
    """Check the axes of a ``ContextParallel``; if one axis of the mesh is explicit, all must be.

    ``batch_axis`` and ``head_axis`` are a name, a tuple of names, or ``None``.

    Raises:
        ValueError: ``mesh`` is no mesh or has no such axis, an axis is named twice, or some axes
            are explicit and others not.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    checks.check_choice("axis_name", axis_name, mesh.axis_names)
    arguments = {"axis_name": axis_name, "batch_axis": batch_axis, "head_axis": head_axis}
    axes_of_all: list[object] = [axis_name]
    for name, axes in (("batch_axis", batch_axis), ("head_axis", head_axis)):
        if axes is not None:
            names = axes if isinstance(axes, tuple) and axes else (axes,)
            for axis in names:
                checks.check_choice(name, axis, mesh.axis_names)
            axes_of_all += names
    if len(set(axes_of_all)) < len(axes_of_all):
        raise ValueError(f"axis_name, batch_axis and head_axis must be three axes, got {arguments}")
    types = {str(axis_type): axis_type for axis_type in mesh.axis_types}
    if AxisType.Explicit in types.values() and len(types) > 1:
        raise ValueError(
            f"the axes of the mesh must be all explicit or all auto, got "
            f"{dict(zip(mesh.axis_names, map(str, mesh.axis_types), strict=True))}; make it with "
            f"jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)})"
        )


def check_surroundings(own: AnyMesh, axis_name: str, *, compiles_here: bool = True) -> None:
    """Refuse calls inside ``shard_map``, and inside ``jax.set_mesh`` of another mesh.

    In a ``shard_map`` arrays are shards along some axes, and JAX cannot differentiate one over
    further axes in there. Another mesh may be set if all axes of both are auto, and both have the
    same devices in the same order.

    Args:
        own: The mesh of the ``ContextParallel``.
        axis_name: Its axis.
        compiles_here: Programs will run on it; else arrays only come to lie there.

    Raises:
        UnsupportedError: This is inside one of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = [
        name
        for name, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if axis_type is AxisType.Manual
    ]
    if manual:
        raise UnsupportedError(
            f"ContextParallel takes global arrays, and this is inside a jax.shard_map over "
            f"{', '.join(manual)}. Instead: let that one split {axis_name!r} too, and call "
            f"ring_jax.ring_attention(axis_name={axis_name!r}) here; or call ContextParallel "
            f"outside of it, with batch_axis or head_axis for the other axes"
        )
    axes, own_axes = (_described(x) for x in (mesh, own))
    explicit = AxisType.Explicit in (*mesh.axis_types, *own.axis_types)
    if explicit and not mesh.empty and axes != own_axes:
        raise UnsupportedError(
            f"the mesh of this ContextParallel has the axes {own_axes}, and jax.set_mesh has set one "
            f"with {axes}: JAX runs all explicit axes on the mesh that is set. Instead: make both the "
            f"same mesh, or leave out jax.set_mesh"
        )
    set_mesh = _concrete_mesh()
    devices, own_devices = (None if x is None else devices_of(x) for x in (set_mesh, own))
    if compiles_here and devices and own_devices is not None and devices != own_devices:
        raise UnsupportedError(
            f"the mesh of this ContextParallel has the devices {own_devices}, and jax.set_mesh has set "
            f"one with {devices}: one program runs on one list of devices. Instead: make both the same "
            f"mesh, or leave out jax.set_mesh"
        )


def _concrete_mesh() -> Mesh | None:
    """Return the mesh of ``jax.set_mesh``, whose abstract one does not tell the devices."""
    from jax._src import mesh  # jax.sharding.get_mesh does not answer while a function is traced

    get = getattr(mesh, "get_concrete_mesh", lambda: None)
    set_mesh = cast("Mesh | None", get())
    return None if set_mesh is None or set_mesh.empty else set_mesh


def _described(mesh: AnyMesh) -> str:
    """Return names, sizes and types of a mesh's axes, as ``data=2 (Auto), cp=4 (Auto)``."""
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return ", ".join(f"{name}={size} ({kind.name})" for name, size, kind in axes)


def check_devices(arrays: Iterable[tuple[str, object]], mesh: AnyMesh) -> None:
    """Refuse arrays that lie on other devices than a mesh, or on the same in another order.

    Where a traced array lies is not known; JAX refuses it when the program is lowered.

    Args:
        arrays: Pairs of an argument's name and its array, or a struct with a sharding; all else is
            skipped.
        mesh: The mesh of the ``ContextParallel``.

    Raises:
        UnsupportedError: An array does.
    """
    own = devices_of(mesh)
    for name, x in arrays:
        sharding = getattr(x, "sharding", None) if not isinstance(x, jax.core.Tracer) else None
        if not isinstance(sharding, Sharding) or own is None:
            continue
        if isinstance(sharding, NamedSharding):
            devices, expected = devices_of(sharding.mesh), own
        elif getattr(x, "committed", True):  # else JAX moves it, as it does numpy's arrays
            on: Any = sharding.device_set
            devices, expected = sorted(device.id for device in on), sorted(own)
        else:
            continue
        if devices is not None and devices != expected:
            raise UnsupportedError(
                f"{name} lies on the devices {devices}, and the mesh of this ContextParallel has "
                f"{own}: one program runs on one list of devices. Instead: make all meshes of the same "
                f"devices in the same order; or move the array first, by jax.device_put, or in layout "
                f"order by relayout(x, to=...) of its own ContextParallel"
            )


def check_gradients(arrays: Iterable[tuple[str, object]], mesh: AnyMesh) -> None:
    """Refuse gradients outside of ``jax.jit`` on explicit axes without ``jax.set_mesh``.

    JAX would end with an error about the "device assignment" of the loss's own gradient.

    Raises:
        UnsupportedError: An array is differentiated there; its tracer knows its value.
    """
    if not is_explicit(mesh) or not jax.sharding.get_abstract_mesh().empty:
        return
    for name, x in arrays:
        if isinstance(x, jax.core.Tracer) and x.to_concrete_value() is not None:
            raise UnsupportedError(
                f"{name} is differentiated outside of jax.jit, the axes of the mesh are explicit, and "
                f"no mesh is set: JAX cannot start the gradient of a loss there. Instead: call jax.grad "
                f"within `with jax.set_mesh(mesh):`, or inside jax.jit"
            )


def refuse_symbolic_dims(
    shape: Sequence[object],
    reason: str = "over a mesh XLA ends the process that runs such an exported program",
) -> None:
    """Refuse symbolic dimensions of ``jax.export``.

    Raises:
        UnsupportedError: There is one.
    """
    symbolic = [str(size) for size in shape if not isinstance(size, int)]
    if symbolic:
        raise UnsupportedError(
            f"an array has the symbolic dimension {symbolic[0]}, and {reason}. Instead: export with "
            f"numbers; or, of one device, with a symbolic batch alone and kernel='xla'"
        )


def check_divides(name: str, x: Array, mesh: AnyMesh, batch: Axes, heads: Axes) -> None:
    """Check that the axes of batch and heads divide these dimensions of ``[B, T, heads, D]``.

    Raises:
        ValueError: One does not; the message says what to do.
        UnsupportedError: A dimension is symbolic.
    """
    refuse_symbolic_dims(x.shape)
    for axis, dim, what in ((batch, 0, "batch"), (heads, 2, "heads")):
        size = size_of(mesh, axis)
        if x.shape[dim] % size:
            raise ValueError(
                f"the {what} of {name}, {x.shape[dim]}, must be a multiple of the {size} "
                f"devices along {axis!r}. Instead: {_advice(what, name)}"
            )


def _advice(what: str, name: str) -> str:
    """Return advice for an axis that does not divide the batch or the heads of an array."""
    if what == "batch":
        return "pad the batch, or leave batch_axis out"
    alone = "leave head_axis out, and devices along that axis compute all heads"
    more = "give each K/V head n times, as jnp.repeat(k, n, axis=2) and v likewise; or "
    return alone if name == "q" else more + alone


def devices_of(mesh: AnyMesh) -> list[int] | None:
    """Return the numbers of a mesh's devices in their order; ``None`` of an abstract mesh."""
    return None if isinstance(mesh, AbstractMesh) else mesh.device_ids.flatten().tolist()


def in_one_process(mesh: AnyMesh, axis: str) -> bool | None:
    """Return True if no line of devices along an axis spans processes; ``None`` if unknown."""
    if isinstance(mesh, AbstractMesh):
        return None
    process = np.vectorize(lambda device: device.process_index, otypes=[np.int64])(mesh.devices)
    # Each line along the axis holds one sequence; other lines may belong to other processes.
    along = np.moveaxis(process, mesh.axis_names.index(axis), 0)
    return bool((along == along[0]).all())


class NumberedMesh(NamedTuple):
    """A :class:`jax.sharding.Mesh` with devices as numbers, which can be pickled."""

    platform: str
    ids: npt.NDArray[np.int64]
    axis_names: tuple[str, ...]
    axis_types: tuple[AxisType, ...]


def numbered(mesh: AnyMesh) -> AbstractMesh | NumberedMesh:
    """Replace the devices of a mesh by their numbers; an abstract mesh has none."""
    if isinstance(mesh, AbstractMesh):
        return mesh
    platform = mesh.devices.flat[0].platform
    return NumberedMesh(platform, mesh.device_ids, mesh.axis_names, mesh.axis_types)


def with_devices(mesh: AbstractMesh | NumberedMesh) -> AnyMesh:
    """Make a mesh of the devices with the given numbers, of all processes of the job.

    Raises:
        ValueError: There is no such device.
    """
    if isinstance(mesh, AbstractMesh):
        return mesh
    devices = {device.id: device for device in jax.devices(mesh.platform)}
    missing = sorted(set(mesh.ids.flatten().tolist()) - devices.keys())
    if missing:
        raise ValueError(
            f"this ContextParallel was made for a mesh with the {mesh.platform} devices {missing}, and this "
            f"process has {sorted(devices)}; make a new one for a mesh of these"
        )
    array = np.empty(mesh.ids.shape, dtype=object)
    array.flat = [devices[number] for number in mesh.ids.flat]
    return Mesh(array, mesh.axis_names, axis_types=mesh.axis_types)
