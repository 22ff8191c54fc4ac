"""How large blocks are, and whether they fit on chip.

The sizes are those of the generation's table; :class:`ring_core.KernelConfig` overrides them. What
differs between generations is told from machine code, see ``nox -s tpu_static`` and docs/tried.md;
nothing was timed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType

from ring_core import KernelConfig, Mask, UnsupportedError
from ring_jax.prepare import device_kind
from ring_jax.records import Array, Pass

Pair = tuple[int, int]  # (queries, keys)

LANES = 128  # of a vector register: sizes of blocks are multiples
_VMEM_FRACTION = 0.75  # of the limit; v4 (16 MiB) cannot compile some kernels modelled at 13 and 14
_MIB = 2.0**20
_SPAN = 8192  # below this span narrow blocks cost less: see docs/tried.md

#: ``(queries, keys)`` a block by pass where numbers are wide; see :func:`default_sizes`.
_WIDE: dict[Pass, Pair] = {"forward": (512, 1024), "backward": (512, 512)}


@dataclass(frozen=True)
class Generation:
    """A table's row.

    Attributes:
        name: As in the names of topologies.
        vmem_mib: On-chip memory that a kernel asks for, MiB; the compiler's default is 16.
        forward, backward: A block where a query sees many keys.
        narrow: A block where it sees few: windows, chunks.
        part, windowed_part: What of a forward block is multiplied at once.
        prefetches_scores: A part's scores are computed before the softmax of the part before it.
        separate_kv_fetch: K and V are fetched one by one. Their rows lie side by side in main
            memory, and v4 turns half-filled registers into full ones at some cost.
    """

    name: str
    vmem_mib: float = 16.0
    forward: Pair = (1024, 1024)
    backward: Pair = (512, 1024)
    windowed: Pair = (512, 512)
    part: Pair = (256, 128)
    windowed_part: Pair = (256, 128)
    prefetches_scores: bool = True
    separate_kv_fetch: bool = False


#: Fits on every generation.
UNKNOWN = Generation("unknown")

_LARGER = Generation("", vmem_mib=32.0, backward=(1024, 1024))
_V4 = Generation(
    "v4", backward=(1024, 512), part=(128, 128), windowed_part=(128, 128),
    prefetches_scores=False, separate_kv_fetch=True,
)  # fmt: skip
_KINDS: dict[Generation, tuple[str, ...]] = {
    _V4: ("TPU v4",),
    replace(_LARGER, name="v5e"): ("TPU v5 lite", "TPU v5e"),
    replace(_LARGER, name="v5p"): ("TPU v5", "TPU v5p"),
    replace(_LARGER, name="v6e", windowed_part=(512, 256)): ("TPU v6 lite", "TPU v6e"),
    replace(_LARGER, name="tpu7x", windowed_part=(256, 512)): ("TPU7x",),
}

#: By what jax calls a device's kind.
GENERATIONS = MappingProxyType({kind: one for one, kinds in _KINDS.items() for kind in kinds})


def generation_of(x: Array) -> Generation:
    """What an array's program is compiled for, as far as that is known while it is traced."""
    return GENERATIONS.get(device_kind(x), UNKNOWN)


@dataclass(frozen=True)
class Shape:
    """What the need of memory depends on: head dims, bytes an element, options."""

    head_dim: int
    v_dim: int
    itemsize: int
    has_bias: bool
    has_dropout: bool


@dataclass(frozen=True)
class Blocks:
    """Sizes of blocks, and the lengths of queries and keys rounded up to whole blocks."""

    q: int
    k: int
    q_len: int
    k_len: int

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of queries and of keys."""
        return self.q_len // self.q, self.k_len // self.k


def choose_blocks(
    config: KernelConfig, direction: Pass, shape: Shape, q_len: int, k_len: int, span: float,
    generation: Generation,
) -> Blocks:  # fmt: skip
    """The sizes a call asked for, else the table's.

    Raises:
        UnsupportedError: A size is no multiple of 128, or the blocks do not fit on chip.
    """
    q_default, k_default = default_sizes(direction, shape, span, generation)
    q = _size("block_q", config.block_q, q_default, q_len)
    k = _size("block_k", config.block_k, k_default, k_len)
    mib = vmem_mib(direction, shape, q, k)
    if mib > generation.vmem_mib:
        raise UnsupportedError(
            f"kernel 'pallas': the {direction} with blocks of {q} queries and {k} keys needs "
            f"{mib:.1f} MiB of on-chip memory, and {generation.vmem_mib:.0f} MiB is the limit "
            f"(generation: {generation.name}). Instead: choose smaller block_q and block_k, "
            f"leave them out, or kernel='auto'"
        )
    return Blocks(q, k, _rounded(q_len, q), _rounded(k_len, k))


def span_of(mask: Mask) -> float:
    """The most keys that a query sees."""
    left, right = mask.band
    return math.inf if left is None or right is None else left + right + 1


def default_sizes(
    direction: Pass, shape: Shape, span: float = math.inf, generation: Generation = UNKNOWN
) -> Pair:
    """Sizes by head dim, dtype and ``span``, the most keys that a query sees.

    float32 and head dims beyond 128 take twice the room. A window is surrounded by masked halves of
    blocks, as many as a block is large.
    """
    wide = max(shape.head_dim, shape.v_dim) > LANES or shape.itemsize > 2
    q, k = _WIDE[direction] if wide else getattr(generation, direction)
    if span < _SPAN:
        q, k = min(q, generation.windowed[0]), min(k, generation.windowed[1])
    most = _VMEM_FRACTION * generation.vmem_mib
    while vmem_mib(direction, shape, q, k) > most and max(q, k) > LANES:
        q, k = (q, k // 2) if k >= q else (q // 2, k)
    return q, k


def part_sizes(span: float, generation: Generation) -> Pair:
    """What of a forward block is multiplied at once."""
    return generation.windowed_part if span < _SPAN else generation.part


def use_fused(shape: Shape, blocks: Blocks) -> bool:
    """Whether one backward kernel is modelled to be faster than two; not measured.

    It spares two products and the exponentials of every block, which take about as long as products
    over 256 more dims, and pays with dQ read and written in float32. A chip does some 300 products
    and sums in the time it moves a byte (229 on v4, 240 on v5e, 166 on v5p, 560 on v6e); float32
    takes six passes.
    """
    passes = 6 if shape.itemsize > 2 else 1
    saved = 2 * blocks.k * (shape.head_dim + shape.v_dim + 256) * passes
    return saved >= 300 * 2 * 4 * shape.head_dim


def vmem_mib(direction: Pass, shape: Shape, q: int, k: int) -> float:
    """What is needed on chip: what is fetched is there twice, scores live in float32.

    The compiler's own figures for v5e, bfloat16 and head dim 128: 33.5 MiB in the forward with
    blocks of 1024 queries and 4096 keys (this says 31.5), 17.0 with 1024 and 2048 (17.5). In the
    backward blocks of 1024 and 1024 (16.5) are compiled for v5e within 16 MiB, and not for v4.
    """
    dims, scores, wide = shape.head_dim + shape.v_dim, q * k, 4
    fetched = k * dims * shape.itemsize + q * shape.head_dim * shape.itemsize
    if direction == "forward":
        kept = q * shape.v_dim * wide
        fetched += 2 * kept
        live = scores * (wide + shape.itemsize) + kept
    else:
        fetched += q * shape.v_dim * shape.itemsize + 2 * k * dims * wide
        kept = k * dims * wide + 3 * q * shape.head_dim * wide  # the fused kernel's
        live = scores * (3 * wide // 2 + shape.itemsize)
    if shape.has_bias:
        fetched += scores * shape.itemsize + (2 * scores * wide if direction == "backward" else 0)
        live += scores * wide
    if shape.has_dropout:
        live += 2 * scores * wide
    return (2 * fetched + kept + live) / _MIB


def _size(name: str, wanted: int | None, default: int, length: int) -> int:
    if wanted is None:
        return _fitting(default, length)
    if wanted % LANES:
        raise UnsupportedError(
            f"kernel 'pallas': {name} must be a multiple of {LANES}, got {wanted}. Instead: "
            f"{name}={_rounded(wanted, LANES)}"
        )
    return min(wanted, _rounded(length, LANES))


def _fitting(default: int, length: int) -> int:
    """The default; less, down to its half, where that divides the length and spares padding."""
    default = min(default, _rounded(length, LANES))
    sizes = range(default, default // 2 - 1, -LANES)
    return next((size for size in sizes if size > 0 and length % size == 0), default)


def _rounded(length: int, size: int) -> int:
    return -(-length // size) * size
