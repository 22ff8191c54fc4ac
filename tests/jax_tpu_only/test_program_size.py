"""The size of programs for TPUs does not grow with the ring."""

from __future__ import annotations

import pytest
from program_size import size_of

import ring_jax_tpu


@pytest.mark.nightly(unless=["ring"])
@pytest.mark.parametrize("strategy", ["ring", "gather"])
def test_256_devices_take_at_most_twice_the_code_of_4(strategy: str) -> None:
    few, many = (
        size_of(n, package=ring_jax_tpu, platform="tpu", strategy=strategy, causal=True)
        for n in (4, 256)
    )
    assert many.bytes <= 2 * few.bytes
