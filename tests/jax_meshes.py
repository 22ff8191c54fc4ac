"""Meshes of host devices."""

from __future__ import annotations

from math import prod

import jax
from jax.sharding import AxisType, Mesh


def mesh_of(kind: AxisType = AxisType.Auto, **axes: int) -> Mesh:
    """Make a mesh of as many devices as its axes need, all axes of one type."""
    devices = jax.devices()[: prod(axes.values())]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (kind,) * len(axes), devices=devices)
