"""Orders of kernels that a user has measured, which ``kernel="auto"`` takes in place of Ring's own.

``RING_RATES`` names the file, which ``python -m ring_torch bench --rates FILE`` writes.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ring_core import Mask, Request

RATES_VARIABLE = "RING_RATES"
#: What a call may have beside a causal mask; of several the last one decides.
OPTIONS = (
    "causal", "documents", "window", "segment_ids", "predicate", "alibi", "softcap", "bias", "dropout",
)  # fmt: skip


class Measured(NamedTuple):
    """Names of kernels, the fastest first, by option and head dim; of a device as ``sm_90``."""

    device: str = ""
    orders: Mapping[tuple[str, int], list[str]] = MappingProxyType({})
    digest: str = ""  # by which ranks check that they choose by the same file

    def order(self, device: str, request: Request, mask: Mask) -> list[str]:
        """Return the order for a call; it is empty if nothing was measured on the device."""
        of_mask = {
            "causal": True, "window": mask.window, "predicate": mask.predicate,
            "documents": mask.cu_seqlens or mask.chunk_size,
        }  # fmt: skip
        option = [x for x in OPTIONS if of_mask.get(x) or getattr(request, x, False)][-1]
        dims = [dim for name, dim in self.orders if name == option and device == self.device]
        if not dims:
            return []
        # Kernels compute head dims that they lack at larger ones.
        wanted = max(request.head_dim, request.v_head_dim)
        return self.orders[option, min(dims, key=lambda dim: (dim < wanted, abs(dim - wanted)))]


def measured() -> Measured:
    """Return what the file of ``RING_RATES`` holds, or nothing; refuse what is no table."""
    path = os.environ.get(RATES_VARIABLE)
    return _read(path) if path else Measured()


@lru_cache(maxsize=8)
def _read(path: str) -> Measured:
    try:
        text = Path(path).read_text()
        table = json.loads(text)
        # `index` refuses other names: a row that no call asks for would be a mistake unnoticed.
        orders = {
            (OPTIONS[OPTIONS.index(row["option"])], int(row["head_dim"])): [*row["milliseconds"]]
            for row in table["rows"]
        }
        return Measured(table["device"], orders, hashlib.blake2s(text.encode()).hexdigest()[:16])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is no table of rates: {error}. Write one with 'python -m ring_torch bench "
            f"--rates FILE', or unset {RATES_VARIABLE} for Ring's own order"
        ) from None
