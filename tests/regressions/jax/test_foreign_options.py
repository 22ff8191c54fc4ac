"""Calls written for other libraries: their options are refused, with the names they have here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ring_core.base.arguments import FOREIGN_OPTIONS
from ring_jax import ContextParallel, flax, ring_attention

CP = ContextParallel(jax.make_mesh((1,), ("cp",)), "cp")
CALLS: dict[str, Callable[..., Any]] = {
    "ring_attention": partial(ring_attention, axis_name=None), "attention": CP.attention, "explain": CP.explain,
}  # fmt: skip
Q = jnp.zeros((1, 8, 2, 4))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", FOREIGN_OPTIONS)
def test_each_is_refused_by_its_name_here(name: str, call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=rf"no option is called {name}\. Instead: for {name}, "):
        call(Q, Q, Q, **{name: None})


def test_bound_to_an_adapter() -> None:
    with pytest.raises(ValueError, match="for is_causal, use causal"):
        flax.make_attention_fn(partial(CP.attention, is_causal=True))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (CP.attention, "attention"), (CP.explain, "explain"), (CP.check_agreement, "check_agreement"),
        (CALLS["ring_attention"], "__call__"),
    ],
)  # fmt: skip
def test_a_misspelt_option_is_named_with_the_function_that_was_called(
    call: Callable[..., Any], name: str
) -> None:
    """Methods pass options on to a record, whose own error would name it."""
    said = rf"^{name}\(\) got an unexpected keyword argument 'sofcap'. Did you mean 'softcap'\?"
    with pytest.raises(TypeError, match=said):
        call(Q, Q, Q, sofcap=1.0)
    with pytest.raises(TypeError, match=rf"^{name}\(\) .* argument 'xyz'$"):
        call(Q, Q, Q, softcap=1.0, xyz=2)
