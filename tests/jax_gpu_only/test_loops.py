"""A ring in a loop launches what its stages do one by one: results are equal bit for bit."""

from __future__ import annotations

import pytest
from backends.triton_interpreter import TritonBackend
from loops import CASES, assert_equal_bits, in_loop_and_unrolled

from ring_core import KernelConfig


@pytest.mark.nightly(unless=["window"])
@pytest.mark.parametrize("name", CASES)
def test_in_a_loop(name: str) -> None:
    config = KernelConfig("triton", block_q=16, block_k=16)
    assert_equal_bits(*in_loop_and_unrolled(TritonBackend(), CASES[name], (config, "ring")))
