"""A ring rolled into a loop is exact, and bitwise equal to its unrolled stages."""

from __future__ import annotations

import pytest
from backends.jax_devices import JaxBackend
from backends.tpu_interpreter import InterpretedKernel, interpreted
from loops import CASES, assert_equal_bits, in_loop, in_loop_and_unrolled
from tolerances import assert_close

from ring_jax.attention import RingAttention


@pytest.mark.nightly(unless=["causal"])
@pytest.mark.parametrize("name", CASES)
def test_in_a_loop(name: str) -> None:
    backend = JaxBackend(RingAttention((InterpretedKernel(),)))
    with interpreted():
        assert_close(CASES[name], in_loop(backend, CASES[name], "pallas"))


@pytest.mark.nightly  # it compiles all unrolled stages, too
@pytest.mark.parametrize("name", CASES)
def test_stages_one_by_one(name: str) -> None:
    backend = JaxBackend(RingAttention((InterpretedKernel(),)))
    with interpreted():
        assert_equal_bits(*in_loop_and_unrolled(backend, CASES[name], "pallas"))
