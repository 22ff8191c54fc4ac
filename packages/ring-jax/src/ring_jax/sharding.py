"""Move sequences that lie in a layout's order, split along an axis of a mesh, as global arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, cast

import jax
from jax.sharding import PartitionSpec

from ring_core import Layout, LayoutSpec, UnsupportedError, checks
from ring_jax import movement
from ring_jax.collectives import (
    AnyMesh,
    axes_along,
    free,
    is_explicit,
    names_of,
    permute,
    split,
    spread,
    transfer,
)
from ring_jax.global_arrays import global_movement
from ring_jax.meshes import check_not_in_shard_map, devices_of
from ring_jax.records import Array


@dataclass(frozen=True)
class Sharding:
    """The sharding of global arrays whose tokens lie in layout order, along an axis of a mesh.

    Attributes:
        mesh: The mesh.
        axis_name: The axis along which sequences are split.
        layout: Which device along it holds which tokens.
    """

    mesh: AnyMesh
    axis_name: str
    layout: LayoutSpec

    @property
    def cp_size(self) -> int:
        """Number of devices that share a sequence."""
        return int(self.mesh.shape[self.axis_name])

    def layout_of(self, seq_len: int, *, pad: bool = False) -> Layout:
        """Return the layout of ``seq_len`` tokens, with ``pad`` padded to the least length."""
        make = Layout.padded if pad else Layout
        return make(self.layout, seq_len, self.cp_size)

    def check_dim(self, x: Array, dim: int, name: str = "x") -> int:
        """Check that a global array has dimension ``dim``, and return it, not negative.

        Raises:
            ValueError: It has none.
            UnsupportedError: This is inside ``shard_map``, where arrays are shards.
        """
        check_not_in_shard_map(self.axis_name)
        return movement.check_dim(x, dim, name)

    def check_tokens(self, x: Array, dim: int, seq_len: int | None) -> tuple[int, Layout]:
        """Check an array in layout order.

        Returns:
            The dimension of its tokens, not negative; and their layout, padded where there is a
            ``seq_len``.
        """
        dim = self.check_dim(x, dim)
        local_len = self.layout_of(x.shape[dim]).local_len
        return dim, checks.padded_layout(seq_len, local_len, self.layout, self.cp_size)

    def split(self, x: Array, dim: int, *, whole: bool = False) -> Array:
        """Shard a dimension in layout order, or with ``whole`` gather it in natural order."""
        layout = self.layout_of(x.shape[dim])
        if layout.name != "contiguous":
            # The permutation crosses shards, so it is of the gathered dimension.
            x = split(x, self.mesh, dim, self.axis_name, whole=True)
            x = permute(x, layout, dim, inverse=whole)
        return split(x, self.mesh, dim, self.axis_name, whole=whole)

    def spec(self, x: Array, dim: int) -> PartitionSpec:
        """Return the axes of an array whose dimension ``dim`` is split along this axis.

        On explicit axes these are all; others are left to the compiler.
        """
        parts = [
            axes_along(x, self.mesh, n, self.axis_name) if is_explicit(self.mesh) else None
            for n in range(x.ndim)
        ]
        parts[dim] = self.axis_name
        return PartitionSpec(*parts)

    def row_spec(self, spec: PartitionSpec, dim: int) -> PartitionSpec:
        """Return the axes of a halo's rows, which lie by device and then by sequence."""
        if dim == 0:
            return PartitionSpec(self.axis_name, None, *spec[1:])
        parts = [(self.axis_name, *names_of(spec[0])), *spec[1:]]
        parts[dim] = None
        return PartitionSpec(*parts)

    def run(
        self, function: Callable[..., Any], x: Array, dim: int, options: dict[str, Any],
        spec: PartitionSpec, out: Any,
    ) -> Any:  # fmt: skip
        """Run a function of shards over the devices along the axis.

        Args:
            function: The function, called with ``options`` and the axis, layout and dimension.
            x: Its operand, a global array.
            dim: Dimension of the sequence.
            options: Hashable options.
            spec: Axes of the operand.
            out: Axes of the results.
        """
        named = {"axis_name": self.axis_name, "layout": self.layout, "dim": dim, **options}
        explicit = is_explicit(self.mesh)
        manual = frozenset(self.mesh.axis_names if explicit else (self.axis_name,))
        x = spread(x, self.mesh, spec if explicit else free(spec, x, range(x.ndim)))
        return global_movement(function, tuple(named.items()), self.mesh, spec, out, manual)(x)

    def relayout(self, x: Array, dim: int, source: Layout, to: Sharding, *, pad: bool) -> Array:
        """Return an array in the layout of another sharding, maybe of another axis or mesh.

        On the same axis devices exchange rows. Else they do until each piece is one of a device
        there, and the pieces move. Where the numbers of devices differ, pieces of consecutive
        tokens do, and devices there exchange rows.

        Args:
            x: The array in layout order.
            dim: Dimension of its tokens, not negative.
            source: Its layout, with any padding.
            to: The sharding that it gets.
            pad: The new layout is padded to the least length that it can divide.
        """
        target = to.layout_of(source.seq_len, pad=pad)
        is_same_size = to.cp_size == self.cp_size
        if (to.mesh, to.axis_name) == (self.mesh, self.axis_name):
            return self._relaid(x, dim, source, target)
        is_elsewhere = devices_of(to.mesh) != devices_of(self.mesh)
        if is_elsewhere and isinstance(x, jax.core.Tracer) and x.to_concrete_value() is None:
            raise UnsupportedError(
                f"relayout from the devices {devices_of(self.mesh)} to {devices_of(to.mesh)} inside "
                f"jax.jit or jax.vmap: one program runs on one list of devices. Instead: call it "
                f"between two jitted functions; or make both meshes of the same devices in the same "
                f"order"
            )
        # Of as many devices there, pieces already are what each one gets: one exchange here, then
        # a piece a device moves. Else consecutive tokens, padded so that both numbers divide them.
        unit = lcm(self.cp_size, to.cp_size)
        pad_to = -(-source.seq_len // unit) * unit
        between = Layout("contiguous", source.seq_len, self.cp_size, pad_to)
        pieces = self._relaid(x, dim, source, target if is_same_size else between)
        move = split if to.mesh == self.mesh else transfer
        moved = move(pieces, to.mesh, dim, to.axis_name)
        if is_same_size:
            return moved
        return to._relaid(moved, dim, replace(between, cp_size=to.cp_size), target)

    def _relaid(self, x: Array, dim: int, source: Layout, target: Layout) -> Array:
        """Return an array in another layout over this axis."""
        spec, options = self.spec(x, dim), {"layout": source, "to": target}
        return cast("Array", self.run(movement.relaid, x, dim, options, spec, spec))
