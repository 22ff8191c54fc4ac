"""The support matrix on the page agrees with the kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from cases import diagonals
from pages import check_jax_matrix
from predicates import PREDICATES, TRACED, T

from ring_core import Mask, UnsupportedError
from ring_jax import ContextParallel, ring_attention
from ring_jax.tools.cli import main


def test_support_matrix_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix"]) == 0
    check_jax_matrix(capsys.readouterr().out, "pallas")


Q = jnp.ones((1, T, 2, 8))
REASONS = {
    "hash": r"computes numbers up to 1\d{10}, beyond 32 bits",
    "constant": "computes numbers up to 2654435761, beyond 32 bits",
    **dict.fromkeys(("fraction", "tenths", "quotient"), "computes with fractions"),
    **dict.fromkeys(("table", "functions", "divisor", "truths"), "is not made of operators on integers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_others_are_refused_by_name(name: str) -> None:
    mask = Mask(predicate=PREDICATES[name])
    with pytest.raises(
        UnsupportedError, match=rf"^kernel 'pallas': .* this one {REASONS[name]}.*10 \* j"
    ):
        ring_attention(Q, Q, Q, axis_name=None, mask=mask, kernel="pallas")
    text = ContextParallel(jax.make_mesh((1,), ("cp",)), "cp").explain(Q, Q, Q, mask=mask)
    assert text.startswith("kernel xla (any device)\n") and "not pallas (tpu): it evaluates" in text


@pytest.mark.parametrize("name", [*TRACED, "diagonals"])
def test_operators_on_integers_are_compiled(name: str) -> None:
    mask = Mask(predicate={**PREDICATES, "diagonals": diagonals}[name])

    def call(q: jax.Array) -> jax.Array:
        return ring_attention(q, q, q, axis_name=None, mask=mask, kernel="pallas")

    assert "tpu_custom_call" in jax.jit(call).trace(Q).lower(lowering_platforms=("tpu",)).as_text()
