"""Shift, halo, join and relayout of shards inside ``shard_map``, for layers beside attention.

The plan is :mod:`ring_core.movement`'s, as messages by distance. Messages over one distance are cut
where shorter ones end, and each piece is a ``ppermute`` between the devices whose messages are so
long. Devices run one program, so a device looks its rows up in small tables of slices. JAX derives
the backward: rows go back the same way, and sum where they were copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ring_core import Layout, LayoutSpec, row_checks
from ring_core.base.arguments import numbers_as_python
from ring_core.checks import padded_layout
from ring_core.hops import Hop, RowTable, hops
from ring_core.layouts.layout import check_layout
from ring_core.movement import (
    Movement,
    halo as halo_movement,
    offsets_of_documents,
    relayout as relayout_movement,
    shift as shift_movement,
)
from ring_jax.collectives import Ranks, match_varying, varying_axes
from ring_jax.positions import searchsorted
from ring_jax.prepare import axis_size, described_as
from ring_jax.records import Array
from ring_jax.tripwire import check_movement, checked_every


class Halo(NamedTuple):
    """Runs of consecutive tokens with rows of their neighbours, as :func:`halo` returns.

    Attributes:
        rows: One row for each run, ``[B * R, ..., left + L + right, ...]``; zeros outside of the
            sequence.
        positions: Global position of each token in it, int32 ``[B * R, left + L + right]``; -1
            outside.
        documents: Number of the document of each token, counted without empty ones, likewise; 0
            without ``cu_seqlens``, -1 outside.
    """

    rows: Array
    positions: Array
    documents: Array


@numbers_as_python
def shift(
    x: Array, n: int, *, axis_name: Hashable | None, layout: LayoutSpec = "contiguous",
    dim: int = 1, fill: float = 0, cu_seqlens: Sequence[int] | None = None,
    seq_len: int | None = None,
) -> Array:  # fmt: skip
    """Move tokens ``n`` positions on: ``out[t] = x[t - n]`` over positions of the sequence.

    Called inside ``jax.shard_map`` with this device's shard; sends only rows that change device.

    Args:
        x: ``[..., T_local, ...]``, of any dtype.
        n: How far; negative for tokens that look ahead, as ``n=-1`` gives each the next one's.
        axis_name: The mesh axis along which the sequence is sharded; ``None`` is one device.
        layout: Which device holds which tokens, as in :func:`ring_attention`.
        dim: Dimension of the sequence.
        fill: Number in rows that no token moves to.
        cu_seqlens: ``(0, ..., T)``, global offsets of packed documents, which no token leaves.
        seq_len: ``T``, if there is padding behind it (:meth:`ContextParallel.shard` with
            ``pad=True``), which no token moves to or from: its rows are ``fill``.

    Returns:
        An array like ``x``.

    Raises:
        ValueError: An argument is malformed, or the size of ``x`` is no device's part in this
            layout.
    """
    dim, sequence_layout = _dim_and_layout(x, dim, axis_name, layout, seq_len)
    check_shift(x, n, fill)
    return _moved(
        x,
        dim,
        shift_movement(sequence_layout, n, row_checks.offsets_of(cu_seqlens)),
        axis_name,
        sequence_layout,
        fill,
    )


@numbers_as_python
def halo(
    x: Array, left: int, right: int, *, axis_name: Hashable | None,
    layout: LayoutSpec = "contiguous", dim: int = 1, cu_seqlens: Sequence[int] | None = None,
    seq_len: int | None = None,
) -> Halo:  # fmt: skip
    """Return each run of consecutive tokens with its neighbours, as a row of a batch.

    Called inside ``jax.shard_map``. A device holds ``R`` runs of ``L = T_local / R`` consecutive
    tokens: ``R`` is 2 for ``zigzag``, 1 for ``contiguous``. A layer with a bounded reach, as a
    convolution, computes all rows alike; :func:`join` brings its outputs back.

    Args:
        x: ``[B, ..., T_local, ...]``, of any dtype; ``[T_local, ...]`` with ``dim=0``.
        left: Number of tokens before each run.
        right: Number of tokens behind it.
        axis_name: The mesh axis along which the sequence is sharded; ``None`` is one device.
        layout: Which device holds which tokens, as in :func:`ring_attention`.
        dim: Dimension of the sequence.
        cu_seqlens: ``(0, ..., T)``, global offsets of packed documents. They change ``documents``
            alone: rows of other documents are in ``rows``, for the layer to mask.
        seq_len: ``T``, if there is padding behind it (:meth:`ContextParallel.shard` with
            ``pad=True``), which is outside of the sequence.

    Returns:
        ``(rows, positions, documents)``: rows ``[B * R, ..., left + L + right, ...]``, zeros
        outside of the sequence, or ``[R, left + L + right, ...]`` with ``dim=0``; and int32
        ``[B * R, left + L + right]``, the global position and the document of each token, -1
        outside.

    Raises:
        ValueError: An argument is malformed, or the size of ``x`` is no device's part in this
            layout.
        UnsupportedError: The layout is ``striped``, whose devices, if several, hold no consecutive
            tokens.
    """
    dim, sequence_layout = _dim_and_layout(x, dim, axis_name, layout, seq_len)
    movement = halo_movement(sequence_layout, left, right)
    moved = _moved(x, dim, movement, axis_name, sequence_layout, 0).reshape(
        (*x.shape[:dim], sequence_layout.num_runs, -1, *x.shape[dim + 1 :])
    )
    ids = _halo_ids(
        sequence_layout, left, right, Ranks(axis_name, sequence_layout.cp_size).rank(), cu_seqlens
    )
    batch = 1 if dim == 0 else x.shape[0]
    positions, numbers = (jnp.tile(own, (batch, 1)) for own in ids)
    # [B, ..., R, W, ...], with R at `dim`, becomes [B * R, ..., W, ...].
    rows = moved if dim == 0 else lax.collapse(jnp.moveaxis(moved, dim, 1), 0, 2)
    return Halo(rows, positions, numbers)


def _halo_ids(
    layout: Layout, left: int, right: int, rank: Array, cu_seqlens: Sequence[int] | None
) -> tuple[Array, Array]:
    """Return the position and the document of each row of a device's halo, ``[R, W]`` each.

    The device computes them, as :func:`ring_core.movement.halo_ids` does. As constants of the
    program they would be megabytes.
    """
    offsets = offsets_of_documents(layout, row_checks.offsets_of(cu_seqlens))
    starts = jnp.asarray(layout.run_positions(np.arange(layout.cp_size)), jnp.int32)[rank]
    steps = jnp.arange(layout.run_length + left + right, dtype=jnp.int32) - left
    positions = starts[:, None] + steps[None]
    inside = (positions >= 0) & (positions < layout.seq_len)
    documents = jnp.zeros_like(positions)
    if offsets is not None:
        documents = searchsorted(jnp.asarray(offsets, jnp.int32), positions, "right") - 1
    return jnp.where(inside, positions, -1), jnp.where(inside, documents, -1)


@numbers_as_python
def join(
    y: Array, *, axis_name: Hashable | None, layout: LayoutSpec = "contiguous", dim: int = 1
) -> Array:
    """Bring what a layer made of each run of :func:`halo` back to this device's shard.

    Args:
        y: A row for each run, ``[B * R, ..., L, ...]``; ``[R, L, ...]`` with ``dim=0``.
        axis_name: The mesh axis along which the sequence is sharded; ``None`` is one device.
        layout: Which device holds which tokens, as in :func:`ring_attention`.
        dim: Dimension of the tokens.

    Returns:
        ``[B, ..., R * L, ...]``. Nothing is sent.

    Raises:
        ValueError: ``y`` has no such dimension, or not a row for each run.
        UnsupportedError: The layout is ``striped``, over several devices.
    """
    dim = check_dim(y, dim, "y")
    runs = row_checks.check_rows(y.shape, dim, check_layout(layout), axis_size(axis_name))
    if dim == 0:
        return y.reshape((-1, *y.shape[2:]))
    # Rows of a batch row lie one behind the other: [B, R, ..., L, ...], and R goes before L.
    split = y.reshape((y.shape[0] // runs, runs, *y.shape[1:]))
    return lax.collapse(jnp.moveaxis(split, 1, dim), dim, dim + 2)


@numbers_as_python
def relayout(
    x: Array, *, to: LayoutSpec, axis_name: Hashable | None, layout: LayoutSpec = "contiguous",
    dim: int = 1, seq_len: int | None = None,
) -> Array:  # fmt: skip
    """Return this device's tokens in another layout, for layers that want other tokens on a device.

    Called inside ``jax.shard_map`` with this device's shard; sends only rows that change device.

    Args:
        x: ``[..., T_local, ...]``, of any dtype.
        to: The layout that it gets.
        axis_name: The mesh axis along which the sequence is sharded; ``None`` is one device.
        layout: The layout that it has.
        dim: Dimension of the sequence.
        seq_len: ``T``, if there may be padding behind it in both layouts, each with the least that
            it needs; rows of padding are zeros in the result.

    Returns:
        An array like ``x``.

    Raises:
        ValueError: An argument is malformed, or the size of ``x`` is no device's part in one of
            the layouts.
    """
    dim, sequence_layout = _dim_and_layout(x, dim, axis_name, layout, seq_len)
    make = Layout if seq_len is None else Layout.padded
    target = make(check_layout(to), sequence_layout.seq_len, sequence_layout.cp_size)
    return relaid(x, layout=sequence_layout, to=target, axis_name=axis_name, dim=dim)


def relaid(x: Array, *, layout: Layout, to: Layout, axis_name: Hashable | None, dim: int) -> Array:
    """Return this device's tokens in another layout of the same sequence.

    Args:
        x: ``[..., T_local, ...]``, of any dtype.
        layout: The layout that it has, with any padding.
        to: The layout that it gets, likewise.
        axis_name: The mesh axis along which the sequence is sharded; ``None`` is one device.
        dim: Dimension of the sequence, not negative.
    """
    return _moved(x, dim, relayout_movement(layout, to), axis_name, layout, 0)


def check_shift(x: Array, n: object, fill: object) -> None:
    """Check how far a shift of ``x`` goes, and what it fills with.

    Raises:
        ValueError: ``n`` is no integer, or ``fill`` no number of the dtype.
    """
    row_checks.check_steps(n)
    check_fill(x, fill)


def check_fill(x: Array, fill: object) -> None:
    """Check a number that rows like those of ``x`` are filled with.

    Raises:
        ValueError: It is no number, or not one of the dtype.
    """
    low: float = 0
    high: float = 1
    if jnp.issubdtype(x.dtype, jnp.inexact):
        high = float(jnp.finfo(x.dtype).max)
        low = -high
    elif x.dtype != jnp.bool_:
        limits = jnp.iinfo(x.dtype)  # which knows int4
        low, high = int(limits.min), int(limits.max)
    row_checks.check_fill(fill, str(x.dtype), low, high)


def check_dim(x: Array, dim: object, name: str = "x") -> int:
    """Check that ``dim`` is a dimension of an array, and return it, not negative.

    Raises:
        ValueError: It is no dimension of ``x``.
    """
    described_as(name, x)
    return row_checks.check_dim(x.shape, dim, name)


def _dim_and_layout(
    x: Array, dim: int, axis_name: Hashable | None, layout: LayoutSpec, seq_len: int | None
) -> tuple[int, Layout]:
    """Return the checked dimension, and the layout of the whole sequence."""
    size, dim = axis_size(axis_name), check_dim(x, dim)
    return dim, padded_layout(seq_len, x.shape[dim], check_layout(layout), size)


def _moved(
    x: Array, dim: int, movement: Movement, axis_name: Hashable | None, layout: Layout, fill: float
) -> Array:
    """Move the rows of all devices along a dimension, and return this device's new rows.

    Rows that none moves to are ``fill``. If the job checks calls, the bytes of the movement and of
    its backward are counted while it is traced (:func:`ring_jax.tripwire.check_movement`).
    """
    ranks = Ranks(axis_name, layout.cp_size)
    rows = jnp.moveaxis(x, dim, 0)
    shape = (movement.target_rows, *rows.shape[1:])
    axes = varying_axes((x, ranks.rank()))
    rows, filled = match_varying((rows, jnp.full(shape, fill, x.dtype)), axes)
    run = partial(
        _exchanged, out=filled, movement=movement, every_hop=hops(movement, ranks.size), ranks=ranks
    )
    out = run(rows)
    if ranks.size > 1 and checked_every():
        sent = sum(movement.traffic(rank)[0] for rank in range(ranks.size))
        check_movement(ranks.size, sent, run, rows, out)
    return jnp.moveaxis(out, 0, dim)


def _exchanged(
    rows: Array, out: Array, movement: Movement, every_hop: tuple[Hop, ...], ranks: Ranks
) -> Array:
    """Return ``out`` with the rows that arrive at this device written into it."""
    rank = ranks.rank()
    # Hops of different distances write different rows of `out` and read the old rows only, so their
    # order does not matter, and the compiler may run their messages at once.
    for hop in every_hop:
        # Each device picks what it sends over this distance, up to the longest message ...
        read = _row_numbers(hop.read, rank, hop.rows, movement.source_rows)
        # In the backward rows that were sent twice are added up, so a halo's are not unique.
        message = rows.at[read].get(mode="fill", fill_value=0, unique_indices=not movement.repeats)
        # ... and sends it, cut where shorter messages end. A device that receives a message writes
        # its rows to their places; rows that only fill it up have numbers beyond the end, and are
        # dropped. Over distance 0 a device keeps its own rows, and nothing is sent.
        if hop.distance:
            pieces = [
                ranks.move(message[start:stop], hop.distance, receivers)
                for start, stop, receivers in hop.pieces
            ]
            message = jnp.concatenate(pieces)
        written = _row_numbers(hop.written, rank, hop.rows, movement.target_rows)
        # (With `unique_indices` XLA of jax 0.11 writes rows beyond the end over the last ones.)
        out = out.at[written].set(message, mode="drop")
    return out


def _row_numbers(table: RowTable, rank: Array, rows: int, end: int) -> Array:
    """Return the row numbers of a rank's message, int32 ``[rows]``.

    After the rank's last row, numbers are ``end`` or larger: such rows are not read or written.
    """
    steps = jnp.arange(rows, dtype=jnp.int32)
    start, offset = (jnp.asarray(x, jnp.int32)[rank] for x in (table.start, table.offset))
    # A rank's rows are pieces of equal steps; in a single one nothing has to be searched.
    if len(table.start[0]) == 1:
        numbers = start[0] + table.step * steps
    else:
        piece = searchsorted(offset, steps, "right") - 1
        numbers = start[piece] + table.step * (steps - offset[piece])
    # All ranks have as many rows: no message is filled up.
    if (table.rows == rows).all():
        return numbers
    return jnp.where(steps < jnp.asarray(table.rows, jnp.int32)[rank], numbers, end + steps)
