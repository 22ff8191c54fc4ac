"""Steps of a ring: at which distances ranks have work, and whether it is offloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ring_core.base.arguments import Ints
from ring_core.base.config import RingStrategy
from ring_core.plan.geometry import RectangleTable
from ring_core.plan.tile_mask import Geometry

Offload = Literal["none", "mirror", "half"]
_PAIRS_AT_ONCE = 1 << 15  # pairs of runs that are counted at a time


@dataclass(frozen=True)
class Step:
    """A live step of a ring: rank ``r`` works with the K/V of rank ``r - shift``.

    Attributes:
        shift: Number of ranks that the K/V have moved ahead; 0 is each rank's own block.
        offload: Work that ranks do besides, for the queries of rank ``r - shift``, which travel to
            them by the same shift and meet their own K/V. ``none``: no such work. ``mirror``: all
            that rank ``r - shift`` would compute in the step with shift ``cp_size - shift``, which
            is left out then. ``half``: where the two shifts are equal, half of that, in exchange
            for half of its own.
    """

    shift: int
    offload: Offload = "none"


def active_steps(
    strategy: RingStrategy, geometry: Geometry, cp_size: int, num_runs: int
) -> tuple[tuple[Step, ...], Ints]:
    """Return the steps in which some rank has work, and how much: visible pairs ``[step, rank]``.

    They are in ascending order of their shifts. ``num_runs`` is the number of runs per rank in the
    layout. The step of shift 0, a rank's own block, is always there.
    """
    # A step in which nobody computes is dropped on all ranks alike: K/V then hop over it in one
    # move.
    steps = ring_of(strategy).steps(geometry, cp_size, num_runs)
    live = sorted(
        ((step, pairs) for step, pairs in steps if step.shift == 0 or pairs.any()),
        key=lambda step_and_pairs: step_and_pairs[0].shift,
    )
    return tuple(step for step, _ in live), np.stack([pairs for _, pairs in live])


def step_rectangles(
    offload: Offload, geometry: Geometry, ranks: Ints, kv_ranks: Ints
) -> tuple[RectangleTable, RectangleTable | None]:
    """Return what ``ranks`` compute in a step: for their own queries, and for those they help.

    Args:
        offload: The kind of offload of the step.
        geometry: That of the plan.
        ranks: Ranks that compute.
        kv_ranks: For each of them the rank whose K/V, and offloaded queries, it works with.

    Returns:
        Rectangles of ``ranks``' queries and ``kv_ranks``' keys; and of ``kv_ranks``' queries and
        ``ranks``' keys, or ``None`` where nothing is offloaded.
    """
    # Each of two opposite ranks computes half of its own rows, and the other half of its peer's:
    # together all rows of both, once.
    if offload == "half":
        return geometry.rectangles(ranks, kv_ranks, half=0), geometry.rectangles(
            kv_ranks, ranks, half=1
        )
    remote = geometry.rectangles(kv_ranks, ranks) if offload == "mirror" else None
    return geometry.rectangles(ranks, kv_ranks), remote


def _ring_steps(geometry: Geometry, cp_size: int, num_runs: int) -> Iterator[tuple[Step, Ints]]:
    """Yield a step for every shift, with the visible pairs of each rank in it, ``[cp_size]``."""
    ranks = np.arange(cp_size)
    for shifts in chunks(ranks, cp_size * num_runs**2):
        # [shift, rank]: the rank whose K/V each rank holds after so many hops.
        kv_ranks = (ranks - shifts[:, None]) % cp_size
        yield from zip(map(Step, shifts.tolist()), geometry.count(ranks, kv_ranks), strict=True)


def _balanced_steps(
    geometry: Geometry, cp_size: int, _num_runs: int
) -> Iterator[tuple[Step, Ints]]:
    """Yield steps that fold the far half of the ring onto the near half where that is faster.

    At shift ``s`` rank ``r`` meets the keys of ``r - s``; at shift ``cp_size - s`` rank ``r - s``
    meets those of ``r``. The pair of ranks can do both in one step: ``r`` computes the second for
    ``r - s``, whose queries come along with its K/V. The layout is contiguous, so a rank has one
    run. The steps are not in the order of their shifts.
    """
    ranks = np.arange(cp_size)
    # The own block needs nobody, so there is nothing to fold.
    yield Step(0), geometry.count(ranks, ranks)
    # Half the shifts are enough: shift `cp_size - s` is the mirror of shift `s`, with the roles of
    # each pair of ranks exchanged.
    for shifts in chunks(np.arange(1, cp_size // 2 + 1), cp_size):
        kv_ranks = (ranks - shifts[:, None]) % cp_size
        own, mirrored = geometry.count(ranks, kv_ranks), geometry.count(kv_ranks, ranks)
        for n, shift in enumerate(shifts.tolist()):
            # Opposite ranks: both steps are one and the same, so each rank helps with half of the
            # other's rows, if the busiest has less to do then.
            if 2 * shift == cp_size:
                halves = geometry.count(ranks, kv_ranks[n], half=0) + geometry.count(
                    kv_ranks[n], ranks, half=1
                )
                pays = halves.max() < own[n].max()
                yield Step(shift, "half" if pays else "none"), halves if pays else own[n]
            # One step that lasts as long as the rank with the largest sum, or two steps that last
            # as long as the slowest rank of each?
            elif (own[n] + mirrored[n]).max() < own[n].max() + mirrored[n].max():
                yield Step(shift, "mirror"), own[n] + mirrored[n]
            else:
                yield Step(shift), own[n]
                # ``mirrored[n][r]`` is the work of rank ``r - shift`` when it is not offloaded.
                yield Step(cp_size - shift), np.roll(mirrored[n], -shift)


@dataclass(frozen=True)
class RingSpec:
    """Self-description of a ring strategy.

    Attributes:
        name: The name that ``strategy=`` takes.
        steps: Yields its steps, with the pairs that each rank computes in them, of a geometry,
            a number of ranks and the number of runs per rank.
        layouts: Names of the layouts on which it runs; empty means any.
        is_plain: True for the ring in which ranks compute for their own queries alone: the default,
            which titles do not name.
    """

    name: RingStrategy
    steps: Callable[[Geometry, int, int], Iterator[tuple[Step, Ints]]]
    layouts: tuple[str, ...] = ()
    is_plain: bool = False

    def takes_layout(self, layout: object) -> bool:
        """Return True if it runs on shards of a layout: a name, or a ``ChunkLayout``."""
        return not self.layouts or layout in self.layouts


RINGS = (
    RingSpec("ring", _ring_steps, is_plain=True),
    RingSpec("balanced", _balanced_steps, layouts=("contiguous",)),
)


def ring_of(strategy: RingStrategy) -> RingSpec:
    """Return the description of a ring strategy."""
    (ring,) = (x for x in RINGS if x.name == strategy)
    return ring


def plain_ring() -> RingSpec:
    """Return the description of the plain ring."""
    (ring,) = (x for x in RINGS if x.is_plain)
    return ring


def takes_layout(strategy: str, layout: object) -> bool:
    """Return True if a strategy runs on shards of a layout; all but rings run on every layout."""
    return all(ring.takes_layout(layout) for ring in RINGS if ring.name == strategy)


def pairs_of[Name: str](layouts: Sequence[Name]) -> Iterator[tuple[Name, RingStrategy]]:
    """Yield each layout with each ring strategy that runs on it."""
    return ((layout, x.name) for layout in layouts for x in RINGS if x.takes_layout(layout))


def chunks(shifts: Ints, pairs: int) -> Iterator[Ints]:
    """Yield shifts a few at a time, so that arrays over all their pairs of runs stay in cache.

    ``pairs`` is the number of these that a shift has.
    """
    size = max(1, _PAIRS_AT_ONCE // pairs)
    for start in range(0, shifts.size, size):
        yield shifts[start : start + size]
