"""``hf.parallelize`` with a strategy: the results of one device, computed by that strategy."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from hf_models import build, gradients, on_one_process, run, same, same_gradients, whole

from ring_core import StrategyConfig
from ring_torch import ContextParallel, hf
from ring_torch.call import Strategy
from ring_torch.local import LocalRanks
from ring_torch.strategies.hybrid import Hybrid
from ring_torch.strategies.ulysses import Ulysses

RANKS = 4

WAYS: dict[str, tuple[Any, type[Strategy]]] = {
    "ring-ulysses": ("ulysses", Ulysses),
    "ring-hybrid-2-gather": (StrategyConfig("hybrid", ulysses_size=2, outer="gather"), Hybrid),
}


def _matches(_: int, name: str) -> None:
    batch, cp = whole("packed"), ContextParallel()
    model = build(name)
    loss = run(model, on_one_process(model, batch))[1]
    expected = gradients(model)
    for attention, (strategy, kind) in WAYS.items():
        handle = hf.parallelize(model, cp, strategy=strategy)
        assert hf.parallelize(model, cp, strategy=strategy) is handle
        assert model.config._attn_implementation == attention
        with pytest.raises(ValueError, match="parallelized already, with"):
            hf.parallelize(model, cp)
        with patch.object(kind, "backward", autospec=True, side_effect=kind.backward) as backward:
            ring_loss = run(model, batch)[1]
        assert backward.call_count == model.config.num_hidden_layers
        cp.reduce_gradients(model)
        same(ring_loss, loss, "loss")
        same_gradients(gradients(model), expected, attention)
        handle.remove()
    assert model.config._attn_implementation == "eager"


@pytest.mark.nightly(unless=["Gemma3"])
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GptOss"])
def test_loss_and_gradients_are_one_devices(pool: LocalRanks, name: str) -> None:
    pool.run(_matches, name)


def test_a_strategy_of_the_models_own_attention() -> None:
    """The strategy of a model's registered attention stays, and naming another one is refused."""
    model, cp = build("Llama", hf.register("ring-gather", strategy="gather")), ContextParallel()
    hf.parallelize(model, cp).remove()
    hf.parallelize(model, cp, strategy="gather").remove()
    with pytest.raises(ValueError, match="'ring-gather' was registered with strategy='gather'"):
        hf.parallelize(model, cp, strategy="ulysses")
    with pytest.raises(ValueError, match="strategy name"):
        hf.parallelize(model, cp, strategy="a2a")
    assert model.config._attn_implementation == "ring-gather"
