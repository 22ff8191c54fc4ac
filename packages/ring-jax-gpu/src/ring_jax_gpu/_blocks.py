"""How large blocks are, how many warps share one and how many are on their way.

:class:`ring_core.KernelConfig` overrides the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ring_core import KernelConfig, UnsupportedError

Pass = Literal["attend", "add_to_queries", "add_to_keys", "add_to_all", "add_to_bias"]

LARGEST = 256
SMALLEST = 16  # what matrix units multiply


@dataclass(frozen=True)
class Blocks:
    """Queries and keys a block, warps a block, stages of the pipeline that fetches blocks."""

    q: int
    k: int
    warps: int = 8
    stages: int = 2


#: By pass, for head dims up to 64, up to 128 and up to 256, of 16-bit numbers.
_NARROW: dict[Pass, tuple[Blocks, Blocks, Blocks]] = {
    "attend": (Blocks(128, 128, 8, 3), Blocks(128, 128, 8, 3), Blocks(64, 64)),
    "add_to_queries": (Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 3), Blocks(64, 32)),
    "add_to_keys": (Blocks(64, 128, 8, 4), Blocks(64, 128, 8, 4), Blocks(32, 64)),
    "add_to_all": (Blocks(64, 128, 8, 3), Blocks(64, 128, 8, 3), Blocks(32, 64)),
    "add_to_bias": (Blocks(64, 64, 4), Blocks(64, 64, 4), Blocks(64, 64)),
}
#: The same of 32-bit numbers, which take three products each.
_WIDE: dict[Pass, tuple[Blocks, Blocks, Blocks]] = {
    "attend": (Blocks(64, 32, 4), Blocks(64, 32, 4), Blocks(32, 32, 4)),
    "add_to_queries": (Blocks(64, 32, 4), Blocks(64, 32, 4), Blocks(32, 32, 4)),
    "add_to_keys": (Blocks(32, 64, 4), Blocks(32, 64, 4), Blocks(32, 32, 4)),
    "add_to_all": (Blocks(32, 64, 4), Blocks(32, 64, 4), Blocks(32, 32, 4)),
    "add_to_bias": (Blocks(32, 32, 4), Blocks(32, 32, 4), Blocks(32, 32, 4)),
}
#: Where each score needs numbers of its own (a bias, tiles of a predicate, dropout), for 16 bits
#: and head dims up to 128.
_CROWDED: dict[Pass, Blocks] = {
    "attend": Blocks(64, 64),
    "add_to_queries": Blocks(64, 64),
    "add_to_keys": Blocks(32, 128),
    "add_to_all": Blocks(32, 128),
    "add_to_bias": Blocks(64, 64),
}


def choose_blocks(
    config: KernelConfig, name: Pass, head_dim: int, itemsize: int, *, crowded: bool
) -> Blocks:
    """The sizes a call asked for, else the table's; ``head_dim`` is the larger one.

    Raises:
        UnsupportedError: A size is no power of two from 16 to 256.
    """
    widths = (_NARROW if itemsize == 2 else _WIDE)[name]
    default = widths[0 if head_dim <= 64 else 1 if head_dim <= 128 else 2]
    if crowded and itemsize == 2 and head_dim <= 128:
        default = _CROWDED[name]
    return Blocks(
        _size("block_q", config.block_q, default.q),
        _size("block_k", config.block_k, default.k),
        default.warps,
        default.stages,
    )


def _size(name: str, wanted: int | None, default: int) -> int:
    if wanted is None:
        return default
    if wanted & (wanted - 1) or not SMALLEST <= wanted <= LARGEST:
        raise UnsupportedError(
            f"kernel 'triton': {name} must be a power of two from {SMALLEST} to {LARGEST}, got "
            f"{wanted}. Instead: leave it out, or choose {name}=64 or 128"
        )
    return wanted


def padded(dim: int) -> int:
    """A head dim as matrix units take it."""
    return max(SMALLEST, 1 << (dim - 1).bit_length())
