"""The Triton kernels compile for GPUs that are not installed, within their limits."""

from __future__ import annotations

import pytest
from backends.torch_compiler import compiled

#: Bytes of shared memory per thread block, by compute capability.
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
BACKWARD = ["bwd_dq", "bwd_dkv"]


@pytest.mark.nightly(unless=["90"])
@pytest.mark.parametrize("arch", SHARED)
def test_causal(arch: int) -> None:
    kernels = compiled(["causal"], arch)
    assert [x["kernel"] for x in kernels] == ["fwd", *BACKWARD]
    assert all(x["shared"] <= SHARED[arch] for x in kernels), kernels
    if arch == 90:
        assert all(x["ptx"] == "wgmma" for x in kernels)
        assert all(x["stack"] <= 256 for x in kernels), kernels  # bytes: addresses, not tiles


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["fused", "wide", "odd", "predicate", "segments", "dropout"])
def test_options(name: str) -> None:
    kernels = compiled([name], 90)
    assert all(x["shared"] <= SHARED[90] for x in kernels), kernels
    assert len(kernels) == (2 if name == "fused" else 3)


@pytest.mark.nightly
def test_bias() -> None:
    kernels = compiled(["bias"], 90)
    assert [x["kernel"] for x in kernels] == ["fwd", *BACKWARD, "bwd_dbias"]
    assert all(x["shared"] <= SHARED[90] for x in kernels), kernels


def test_exchanges() -> None:
    kernels = compiled(["exchanges"], 90)
    keys, others = ["_exchange_keys"] * 2, ["_wait_reusable", "_add_peers", "_assert_words"]
    assert [x["kernel"] for x in kernels] == [*keys, "_finish_reading", *others]
    assert all(x["shared"] <= SHARED[90] for x in kernels), kernels


def test_passes() -> None:
    kernels = compiled(["block_lists", "row_dots", "sink_grads"], 90)
    assert [x["kernel"] for x in kernels] == ["_list_blocks", "_row_dots", "_sum_sinks"]
    assert all(x["stack"] == 0 for x in kernels), kernels


def test_merges_read_lse_before_they_write_it() -> None:
    """A barrier lets all warps read a row's lse before one of them writes it."""
    kernels = compiled(["merges"], 90)
    assert [x["kernel"] for x in kernels] == ["_merge_results"] * 7
    assert all(x["barriers"] > 0 for x in kernels), kernels
