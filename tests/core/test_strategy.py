"""Strategies are names or configs, for layouts that suit them (refusals: `test_bad_input.py`)."""

from __future__ import annotations

from ring_core import LAYOUTS, STRATEGIES, Mask, StrategyConfig, make_plan, ring_program
from ring_core.base.config import strategy_config
from ring_core.programs.steps import pairs_of


def test_a_name_stands_for_its_record() -> None:
    for name in ("auto", *STRATEGIES):
        config = strategy_config(name)
        assert config == StrategyConfig(name, outer="ring") == strategy_config(config)
        assert hash(config) == hash(StrategyConfig(name))
        assert config.ring_strategy == ("balanced" if name == "balanced" else "ring")
    assert strategy_config("rdma", ("auto", "rdma")) == StrategyConfig("rdma")
    config = StrategyConfig("hybrid", ulysses_size=4, outer="gather")
    assert (config.ulysses_size, config.outer, config.ring_strategy) == (4, "gather", "ring")


def test_programs_of_strategies_differ() -> None:
    expected = [("contiguous", "ring"), ("contiguous", "balanced")]
    assert [*pairs_of(LAYOUTS)] == [*expected, *((name, "ring") for name in LAYOUTS[1:])]
    plan = make_plan(Mask(causal=True), seq_len=64, cp_size=4)
    ring, balanced = ring_program(plan), ring_program(plan, "balanced")
    assert ring.steps != balanced.steps and ring.plan is balanced.plan is plan
    assert ring is ring_program(plan, "ring")
