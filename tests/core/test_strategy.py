"""Strategies are names or configs; unsuitable layouts and meaningless settings are refused."""

from __future__ import annotations

from typing import Any

import pytest

from ring_core import (
    LAYOUTS,
    STRATEGIES,
    Mask,
    StrategyConfig,
    UnsupportedError,
    make_plan,
    ring_program,
)
from ring_core.base.config import strategy_config
from ring_core.programs.steps import pairs_of


def test_a_name_stands_for_its_record() -> None:
    for name in ("auto", *STRATEGIES):
        config = strategy_config(name)
        assert config == StrategyConfig(name) == strategy_config(config)
        assert hash(config) == hash(StrategyConfig(name))
        assert config.ring_strategy == ("balanced" if name == "balanced" else "ring")
    for wrong in ("rdma", "Ring"):
        with pytest.raises(
            ValueError, match=r"known: auto, ring, balanced, gather, ulysses, hybrid$"
        ):
            strategy_config(wrong)
    with pytest.raises(ValueError, match="name must be that of a strategy, or 'auto', got ''"):
        strategy_config("")
    assert strategy_config("rdma", ("auto", "rdma")) == StrategyConfig("rdma")
    with pytest.raises(ValueError, match=r"unknown strategy name 'ring'; known: auto, rdma$"):
        strategy_config(StrategyConfig("ring"), ("auto", "rdma"))
    strategy: Any = 3
    with pytest.raises(ValueError, match="a name or a StrategyConfig, got int"):
        strategy_config(strategy)


@pytest.mark.parametrize(
    "field", [{"ulysses_size": 2}, {"outer": "gather"}, {"outer": None}], ids=str
)
@pytest.mark.parametrize("name", ["auto", "ring", "balanced", "gather", "ulysses"])
def test_a_field_that_means_nothing_is_refused(name: str, field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^strategy '{name}' has no {next(iter(field))}; leave"):
        StrategyConfig(name, **field)
    assert StrategyConfig(name, outer="ring") == StrategyConfig(name)


def test_fields_of_hybrid_are_checked() -> None:
    config = StrategyConfig("hybrid", ulysses_size=4, outer="gather")
    assert (config.ulysses_size, config.outer, config.ring_strategy) == (4, "gather", "ring")
    for size in (0, -1, True, 2.0):
        wrong_size: Any = size
        with pytest.raises(ValueError, match=r"^ulysses_size must be "):
            StrategyConfig("hybrid", ulysses_size=wrong_size)
    for outer in ("balanced", "ulysses", None):
        wrong_outer: Any = outer
        with pytest.raises(ValueError, match=r"outer .*known: ring, gather"):
            StrategyConfig("hybrid", outer=wrong_outer)


def test_balanced_is_for_contiguous_shards() -> None:
    expected = [("contiguous", "ring"), ("contiguous", "balanced")]
    expected += [(name, "ring") for name in LAYOUTS[1:]]
    assert list(pairs_of(LAYOUTS)) == expected
    sizes: dict[str, Any] = {"seq_len": 64, "cp_size": 4}
    for layout in LAYOUTS[1:]:
        remedies = f"the layout is '{layout}'. Instead: use layout='contiguous', or strategy='ring'"
        with pytest.raises(UnsupportedError, match=remedies):
            ring_program(make_plan(Mask(causal=True), layout=layout, **sizes), "balanced")
    wrong: Any = "gather"
    with pytest.raises(ValueError, match="unknown strategy 'gather'; known: ring, balanced"):
        ring_program(make_plan(Mask(causal=True), **sizes), wrong)


def test_programs_of_strategies_differ() -> None:
    plan = make_plan(Mask(causal=True), seq_len=64, cp_size=4)
    ring, balanced = ring_program(plan), ring_program(plan, "balanced")
    assert ring.steps != balanced.steps and ring.plan is balanced.plan is plan
    assert ring is ring_program(plan, "ring")
