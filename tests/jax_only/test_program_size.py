"""The size of a program does not grow with the ring, nor with equal layers."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest
from program_size import LIMIT, LIMIT_OF_BALANCED, LOCAL, call_over, constants_of, size_of, traced

from ring_core import Mask, StrategyConfig, UnsupportedError, balanced_layout

MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": (4000, 0)},
    "chunks": {"causal": True, "chunk_size": 8192},
    "documents": {"causal": True, "cu_seqlens": (0, 5000, 40000, 100000, 131072)},
}


@pytest.mark.parametrize(
    ("strategy", "heads"),
    [("ring", 8), ("gather", 8), ("balanced", 8), ("ulysses", 256),
     (StrategyConfig("hybrid", ulysses_size=8), 8),
     (StrategyConfig("hybrid", ulysses_size=8, outer="gather"), 8)],
    ids=["ring", "gather", "balanced", "ulysses", "hybrid", "hybrid-gather"],
)  # fmt: skip
def test_256_devices(strategy: str, heads: int) -> None:
    size_of(2, causal=True)  # warms up jax's imports and caches
    layout: Any = "contiguous" if strategy == "balanced" else "zigzag"
    size = size_of(256, layout=layout, causal=True, strategy=strategy, heads=(heads, 2))
    limit = LIMIT_OF_BALANCED if strategy == "balanced" else LIMIT
    assert size.bytes <= limit.bytes
    assert size.seconds <= limit.seconds


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
    options = {"layout": layout, "strategy": strategy, **MASKS[mask]}
    if strategy == "gather" and layout == "striped" and mask in ("chunks", "documents"):
        with pytest.raises(UnsupportedError, match="documents and chunks have to lie in natural"):
            size_of(256, **options)
    else:
        assert size_of(256, **options).bytes <= LIMIT.bytes


TOKENS = 8 * LOCAL
CUTS = (0, *range(700, TOKENS, 130), TOKENS)


def every_third_block(i: Any, j: Any) -> Any:
    return (i - j) % 900 < 300


PREDICATE = Mask(causal=True, predicate=every_third_block)
CONSTANTS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": (1000, 0)},
    "documents": {"causal": True, "cu_seqlens": CUTS},
    "gather": {"causal": True, "cu_seqlens": CUTS, "strategy": "gather", "layout": "contiguous"},
    "predicate": {"mask": PREDICATE},
    "predicate, documents": {"mask": Mask(predicate=every_third_block, cu_seqlens=CUTS)},
    "balanced": {"causal": True, "strategy": "balanced", "layout": "contiguous"},
    "ulysses": {"causal": True, "cu_seqlens": CUTS, "strategy": "ulysses"},
    "hybrid": {
        "causal": True,
        "cu_seqlens": CUTS,
        "strategy": StrategyConfig("hybrid", ulysses_size=4),
    },
    "balanced, predicate": {"mask": PREDICATE, "strategy": "balanced", "layout": "contiguous"},
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_explain_states_all_constants(name: str) -> None:
    options = {"layout": "zigzag", "kernel": "xla", **CONSTANTS[name]}
    tables = [x for x in constants_of(traced(8, **options)) if x.ndim > 1 or x.size == len(CUTS)]
    assert stated(**options) == sum(x.nbytes for x in tables) > 500


def test_explain_states_positions_that_are_looked_up() -> None:
    """``explain`` counts position tables, too; XLA may drop some, so the counts are close."""
    mask = Mask(causal=True, cu_seqlens=CUTS)
    options: dict[str, Any] = {"layout": balanced_layout(mask, seq_len=TOKENS, cp_size=8)}
    options |= {"mask": mask, "kernel": "xla"}
    held = sum(x.nbytes for x in constants_of(traced(8, **options)) if x.ndim > 0)
    assert 0.9 * held <= stated(**options) <= 1.2 * held
    assert "positions of all ranks" in explained(**options)


def stated(**options: Any) -> int:
    """Return the bytes of constants that ``explain`` states."""
    found = re.search(r"([\d,]+) bytes of constants", explained(**options))
    assert found is not None
    return int(found[1].replace(",", ""))


def explained(*, layout: Any, **options: Any) -> str:
    cp, shapes = call_over(8, layout)
    lines: list[str] = []
    jax.eval_shape(lambda q, k, v: lines.append(cp.explain(q, k, v, **options)), *shapes)
    return lines[0]
