"""How tokens move: the name of a strategy, and what may be said with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from ring_core.base.arguments import check_choice

StrategyName = Literal["ring", "balanced", "gather", "ulysses"]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)

RingStrategy = Literal["ring", "balanced"]  # those that go round in steps
RING_STRATEGIES: tuple[RingStrategy, ...] = get_args(RingStrategy)

_LAYOUTS = {"balanced": ("contiguous",)}  # the only ones that it is for


def takes_layout(strategy: str, layout: object) -> bool:
    """Whether a strategy can move the tokens of a layout: a name, or a ``ChunkLayout``."""
    return strategy not in _LAYOUTS or layout in _LAYOUTS[strategy]


def pairs_of[Name: str](layouts: Sequence[Name]) -> Iterator[tuple[Name, RingStrategy]]:
    """The layouts, and strategies of a ring, that go together."""
    return (
        (layout, strategy)
        for layout in layouts
        for strategy in RING_STRATEGIES
        if takes_layout(strategy, layout)
    )


@dataclass(frozen=True)
class StrategyConfig:
    """A strategy and its parameters, where a name alone does not say enough.

    Args:
        name: ``auto``, ``ring`` (K/V go round, a step at a time), ``balanced`` (a ring over
            contiguous shards whose idle ranks compute for busy ones), ``gather`` (a rank fetches
            all the K/V shards that its queries see) or ``ulysses`` (ranks exchange tokens for
            heads; PyTorch only).
        ulysses_size: Ranks that split heads rather than tokens. No strategy has it yet, nor the
            next two.
        outer: The strategy between groups of ranks that split heads.
        local_size: Ranks of one host.

    Raises:
        ValueError: No such strategy, or a field that means nothing for it.
    """

    name: str
    ulysses_size: int | None = None
    outer: str = "ring"
    local_size: int | None = None

    def __post_init__(self) -> None:
        check_choice("strategy name", self.name, ("auto", *STRATEGIES))
        for field in fields(self)[1:]:  # no strategy has one of them yet
            given = getattr(self, field.name)
            if type(given) is not type(field.default) or given != field.default:
                raise ValueError(f"strategy {self.name!r} has no {field.name}; leave it out")

    @property
    def ring_strategy(self) -> RingStrategy:
        """How a ring would do it: kernels and times are chosen by the items of its steps."""
        return "balanced" if self.name == "balanced" else "ring"


def strategy_config(strategy: str | StrategyConfig) -> StrategyConfig:
    """What a call's ``strategy`` says.

    Raises:
        ValueError: No such strategy, or neither a name nor a :class:`StrategyConfig`.
    """
    config = StrategyConfig(strategy) if isinstance(strategy, str) else strategy
    if not isinstance(config, StrategyConfig):
        raise ValueError(
            f"strategy must be a name or a StrategyConfig, got {type(strategy).__name__}"
        )
    return config
