"""A ring in a loop launches what its stages do one by one: results are equal bit for bit."""

from __future__ import annotations

import pytest
from backends.jax_devices import JaxBackend
from backends.tpu_interpreter import InterpretedKernel, interpreted
from loops import CASES, assert_equal_bits, in_loop_and_unrolled

from ring_jax.attention import RingAttention


@pytest.mark.nightly(unless=["causal"])
@pytest.mark.parametrize("name", CASES)
def test_in_a_loop(name: str) -> None:
    backend = JaxBackend(RingAttention((InterpretedKernel(),)))
    with interpreted():
        assert_equal_bits(*in_loop_and_unrolled(backend, CASES[name], ("pallas", "ring")))
