"""Choose the sizes of blocks, and check that they fit on chip.

The sizes are those of a table by TPU generation; :class:`ring_core.KernelConfig` overrides them.
The table was made from compiled machine code, see ``nox -s tpu_static`` and benchmarks/NOTES.md;
nothing was timed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType

from ring_core import KernelConfig, Mask, UnsupportedError
from ring_jax.prepare import device_kind
from ring_jax.records import Array, Direction

Pair = tuple[int, int]  # (queries, keys)

LANES = 128  # lanes of a vector register: sizes of blocks are multiples
NUMBER_BITS = 13  # of a block's number on either side, in a word of a list of blocks
MAX_WORDS = 1 << 17  # of a list in scalar memory; compiles for every generation
# Fraction of the limit that default blocks may take: v4 (16 MiB) cannot compile some kernels that
# the model puts at 13 and 14 MiB.
_VMEM_FRACTION = 0.75
_MIB = 2.0**20
WINDOWED_SPAN = 8192  # for fewer visible keys smaller blocks are faster: see benchmarks/NOTES.md

#: ``(queries, keys)`` of a block by pass, for float32 and for head dims beyond 128.
_WIDE: dict[Direction, Pair] = {"forward": (512, 1024), "backward": (512, 512)}


@dataclass(frozen=True)
class Generation:
    """The block sizes and switches of a TPU generation.

    Attributes:
        name: The generation, as in the names of topologies.
        vmem_mib: On-chip memory that a kernel may use, MiB; the compiler's default is 16.
        forward, backward: Queries and keys of a block if a query sees many keys.
        windowed: Upper limits of these if a query sees few keys: windows, chunks.
        part, windowed_part: Queries and keys of a forward block that are multiplied at once.
        prefetches_scores: The scores of a part are computed before the softmax of the part before.
        separate_kv_fetch: K and V are fetched separately. Their rows lie side by side in main
            memory, and v4 needs time to make full registers of half-filled ones.
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


#: Sizes that fit on every generation.
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

#: Generations by JAX's name of the kind of device.
GENERATIONS = MappingProxyType(
    {kind: generation for generation, kinds in _KINDS.items() for kind in kinds}
)


def generation_of(x: Array) -> Generation:
    """Return the generation that an array's program is compiled for, ``UNKNOWN`` if it is not.

    It is what is known while the program is traced.
    """
    return GENERATIONS.get(device_kind(x), UNKNOWN)


@dataclass(frozen=True)
class Shape:
    """The properties of a call that its need of on-chip memory depends on."""

    head_dim: int
    v_dim: int
    itemsize: int
    has_bias: bool
    has_dropout: bool


@dataclass(frozen=True)
class Blocks:
    """Sizes of blocks of queries and keys, and the lengths of both padded to whole blocks."""

    q: int
    k: int
    q_len: int
    k_len: int

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of blocks of queries and of keys."""
        return self.q_len // self.q, self.k_len // self.k


def choose_blocks(
    config: KernelConfig, direction: Direction, shape: Shape, q_len: int, k_len: int, span: float,
    generation: Generation, lists: int = 1,
) -> Blocks:  # fmt: skip
    """Return the block sizes that a call asks for, else those of the table.

    ``span`` is the largest number of keys that a query sees. ``lists`` is the number of lists of
    blocks: that of batch rows whose visible keys differ, else 1. They share scalar memory, which
    must hold a row or column of blocks of each.

    Raises:
        UnsupportedError: A size is not a multiple of 128, or the blocks do not fit on chip, or are
            too many for a list.
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
    blocks = Blocks(q, k, _rounded(q_len, q), _rounded(k_len, k))
    (num_q_blocks, num_k_blocks), most = blocks.grid, min(1 << NUMBER_BITS, MAX_WORDS // lists)
    if max(num_q_blocks, num_k_blocks) > most:
        raise UnsupportedError(
            f"kernel 'pallas': blocks of {q} queries and {k} keys are {num_q_blocks} x "
            f"{num_k_blocks}, and {most} along a side are the most"
            + (f" with {lists} batch rows that see differently" if lists > 1 else "")
            + ". Instead: choose larger block_q and block_k, or kernel='auto'"
        )
    return blocks


def span_of(mask: Mask) -> float:
    """Return the largest number of keys that a query sees by a mask's band, infinite if open."""
    left, right = mask.band
    return math.inf if left is None or right is None else left + right + 1


def default_sizes(
    direction: Direction, shape: Shape, span: float = math.inf, generation: Generation = UNKNOWN
) -> Pair:
    """Return block sizes by head dim, dtype and ``span``, the most keys that a query sees.

    They are halved until the model says that they fit on chip. float32 and head dims beyond 128
    take twice the memory. Along both sides of a window half of
    each block is masked, so large blocks waste more on small windows.
    """
    wide = max(shape.head_dim, shape.v_dim) > LANES or shape.itemsize > 2
    q, k = _WIDE[direction] if wide else getattr(generation, direction)
    if span < WINDOWED_SPAN:
        q, k = min(q, generation.windowed[0]), min(k, generation.windowed[1])
    most = _VMEM_FRACTION * generation.vmem_mib
    while vmem_mib(direction, shape, q, k) > most and max(q, k) > LANES:
        q, k = (q, k // 2) if k >= q else (q // 2, k)
    return q, k


def use_fused(shape: Shape, blocks: Blocks) -> bool:
    """Return True if a model says that one backward kernel is faster than two; not measured.

    One kernel saves two products and the exponentials of every block, which take about as long as
    products over 256 more dims; it reads and writes dQ in float32 more often. A chip does some 300
    multiply-adds in the time it moves a byte (229 on v4, 240 on v5e, 166 on v5p, 560 on v6e);
    float32 takes six passes.
    """
    passes = 6 if shape.itemsize > 2 else 1
    saved = 2 * blocks.k * (shape.head_dim + shape.v_dim + 256) * passes
    return saved >= 300 * 2 * 4 * shape.head_dim


def vmem_mib(direction: Direction, shape: Shape, q: int, k: int) -> float:
    """Model the on-chip memory of a kernel in MiB: fetched blocks twice, scores in float32.

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


def _size(name: str, requested: int | None, default: int, length: int) -> int:
    """Return the requested size of blocks, or the default, not larger than the padded length."""
    if requested is None:
        return _fitting(default, length)
    if requested % LANES:
        raise UnsupportedError(
            f"kernel 'pallas': {name} must be a multiple of {LANES}, got {requested}. Instead: "
            f"{name}={_rounded(requested, LANES)}"
        )
    return min(requested, _rounded(length, LANES))


def _fitting(default: int, length: int) -> int:
    """Return the largest size from the default down to its half that needs no padding, if any."""
    default = min(default, _rounded(length, LANES))
    sizes = range(default, default // 2 - 1, -LANES)
    return next((size for size in sizes if size > 0 and length % size == 0), default)


def _rounded(length: int, size: int) -> int:
    return -(-length // size) * size
