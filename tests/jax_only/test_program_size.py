"""A program does not grow with the ring, nor with equal layers."""

from __future__ import annotations

from typing import Any

import pytest
from program_size import size_of

from ring_core import UnsupportedError

MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": (4000, 0)},
    "chunks": {"causal": True, "chunk_size": 8192},
    "documents": {"causal": True, "cu_seqlens": (0, 5000, 40000, 100000, 131072)},
}


@pytest.mark.parametrize("strategy", ["ring", "gather"])
def test_256_devices(strategy: str) -> None:
    size_of(2, causal=True)  # imports and caches of jax itself
    size = size_of(256, causal=True, strategy=strategy)
    assert size.bytes <= 1_200_000
    assert size.seconds <= 3


@pytest.mark.parametrize("devices", [8, pytest.param(256, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("strategy", ["ring", "gather"])
def test_equal_layers_are_one_function(devices: int, strategy: str) -> None:
    one, four = (
        size_of(devices, layers=layers, causal=True, strategy=strategy) for layers in (1, 4)
    )
    assert four.bytes <= 1.3 * one.bytes


@pytest.mark.nightly(unless=["ring-zigzag-window"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("strategy", ["ring", "gather"])
def test_other_masks(strategy: str, layout: Any, mask: str) -> None:
    """Steps differ in their items alone, whatever the mask."""
    options = {"layout": layout, "strategy": strategy, **MASKS[mask]}
    if strategy == "gather" and layout == "striped" and mask in ("chunks", "documents"):
        with pytest.raises(UnsupportedError, match="documents and chunks have to lie in natural"):
            size_of(256, **options)
    else:
        assert size_of(256, **options).bytes <= 1_200_000
