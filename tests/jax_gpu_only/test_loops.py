"""A ring rolled into a loop is exact, and bitwise equal to its unrolled stages."""

from __future__ import annotations

import pytest
from backends.triton_interpreter import TritonBackend
from loops import CASES, assert_equal_bits, in_loop, in_loop_and_unrolled
from tolerances import assert_close

from ring_core import KernelConfig

KERNEL = KernelConfig("triton", block_q=16, block_k=16)


@pytest.mark.nightly(unless=["window"])
@pytest.mark.parametrize("name", CASES)
def test_in_a_loop(name: str) -> None:
    assert_close(CASES[name], in_loop(TritonBackend(), CASES[name], KERNEL))


@pytest.mark.nightly  # it compiles all unrolled stages, too
@pytest.mark.parametrize("name", CASES)
def test_stages_one_by_one(name: str) -> None:
    assert_equal_bits(*in_loop_and_unrolled(TritonBackend(), CASES[name], KERNEL))
