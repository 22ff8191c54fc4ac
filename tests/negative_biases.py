"""Cases with very negative biases in some region, like those of additive masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from cases import VERY_NEGATIVE, Case, diagonals

from ring_core import Mask

#: Regions of queries ``i`` and keys ``j`` with very negative scores.
REGIONS: dict[str, Callable[[Any, Any], Any]] = {
    "part of a row": lambda i, j: (i + j) % 3 == 0,
    "whole rows": lambda i, j: (i >= i.max() * 3 // 4) & (j >= 0),
    "all rows": lambda i, j: (i >= 0) & (j >= 0),
    "left padding": lambda i, j: (j <= j.max() // 3) & (i >= 0),
    "right padding": lambda i, j: (j >= j.max() * 2 // 3) & (i >= 0),
}


@dataclass(frozen=True)
class NegativeCase(Case):
    """Case whose bias is lowered in a region; ``low`` and ``region`` do not count for equality."""

    low: float = field(default=0.0, compare=False)
    region: str = field(default="all rows", compare=False)

    def _bias(self, rng: np.random.Generator) -> npt.NDArray[Any]:
        bias = super()._bias(rng)
        i, j = np.ogrid[: self.seq_len, : self.keys]
        return np.where(REGIONS[self.region](i, j), np.maximum(self.least, bias + self.low), bias)

    @property
    def least(self) -> float:
        """Return the lowest finite number of the dtype."""
        return VERY_NEGATIVE[self.dtype][1]

    def everywhere(self) -> list[NegativeCase]:
        """Return the case with each low number that its dtype holds, in each region."""
        lows = [low for low in (-1e4, -1e6, -1e10, self.least) if low >= self.least]
        return [
            replace(self, name=f"{self.name}: {low:.3g} in {region}", low=low, region=region)
            for low in lows
            for region in REGIONS
        ]


_MIXED = Mask(window=(25, 3), chunk_size=30)
_DOCUMENTS = Mask(causal=True, cu_seqlens=(0, 7, 31, 48), predicate=diagonals)
NEGATIVE = [
    NegativeCase("one device", Mask(causal=True), bias="full", lse_grad=True),
    NegativeCase("zigzag", Mask(causal=True), "zigzag", 2, bias="full", lse_grad=True),
    NegativeCase("full", Mask(), cp_size=4, bias="shared", batch=2, lse_grad=True),
    NegativeCase("sinks", Mask(causal=True), cp_size=2, bias="heads", sinks=0, lse_grad=True),
    NegativeCase("ids", Mask(), "striped", 2, bias="shared", batch=2, segments="scattered"),
    NegativeCase("helpers", Mask(causal=True), cp_size=4, bias="full", strategy="balanced"),
    NegativeCase("mixed", _MIXED, "zigzag", 2, kv_seq_len=80, bias="masked", softcap=5.0, alibi=1),
    NegativeCase("documents", _DOCUMENTS, "zigzag", 2, bias="batch", batch=2, dropout_p=0.3),
    *(
        NegativeCase(dtype, Mask(causal=True), "zigzag", 2, bias="full", dtype=dtype, lse_grad=True)
        for dtype in ("float64", "bfloat16", "float16")
    ),
]
