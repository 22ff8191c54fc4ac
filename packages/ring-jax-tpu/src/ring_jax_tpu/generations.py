"""What differs between generations of TPUs: room on chip, and sizes that cost least.

Told from machine code, see ``nox -s tpu_static`` and docs/tried.md; nothing was timed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from ring_jax.prepare import device_kind
from ring_jax.records import Array

Pair = tuple[int, int]  # (queries, keys)


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

_V4 = Generation(
    "v4", backward=(1024, 512), part=(128, 128), windowed_part=(128, 128),
    prefetches_scores=False, separate_kv_fetch=True,
)  # fmt: skip
_LARGER = Generation("", vmem_mib=32.0, backward=(1024, 1024))
_V5E = replace(_LARGER, name="v5e")
_V5P = replace(_LARGER, name="v5p")
_V6E = replace(_LARGER, name="v6e", windowed_part=(512, 256))
_TPU7X = replace(_LARGER, name="tpu7x", windowed_part=(256, 512))

#: By what jax calls a device's kind.
GENERATIONS = MappingProxyType(
    {
        "TPU v4": _V4,
        "TPU v5 lite": _V5E,
        "TPU v5e": _V5E,
        "TPU v5": _V5P,
        "TPU v5p": _V5P,
        "TPU v6 lite": _V6E,
        "TPU v6e": _V6E,
        "TPU7x": _TPU7X,
    }
)


def generation_of(x: Array) -> Generation:
    """What an array's program is compiled for, as far as that is known while it is traced."""
    return GENERATIONS.get(device_kind(x), UNKNOWN)
