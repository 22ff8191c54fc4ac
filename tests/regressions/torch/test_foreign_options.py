"""Calls written for other libraries: their options are refused, with the names they have here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ring_core.base.arguments import FOREIGN_OPTIONS
from ring_torch import ContextParallel, ring_attention

CP = ContextParallel()
CALLS: dict[str, Callable[..., Any]] = {
    "ring_attention": ring_attention, "attention": CP.attention, "explain": CP.explain,
}  # fmt: skip
Q = torch.zeros(1, 8, 2, 4)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", FOREIGN_OPTIONS)
def test_each_is_refused_by_its_name_here(name: str, call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=rf"no option is called {name}\. Instead: for {name}, "):
        call(Q, Q, Q, **{name: None})


def test_other_names_stay_a_type_error() -> None:
    for call in CALLS.values():
        with pytest.raises(TypeError, match="nonsense"):
            call(Q, Q, Q, nonsense=1)


def test_a_compiled_call_takes_its_own_options() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(x: torch.Tensor) -> torch.Tensor:
        return CP.attention(x, x, x, causal=True)

    x = torch.randn(1, 8, 2, 4)
    torch.testing.assert_close(attend(x), CP.attention(x, x, x, causal=True))
