"""The Triton kernels compile for GPUs that are not installed, within their limits."""

from __future__ import annotations

import pytest
from backends.torch_compiler import compiled

#: Bytes of shared memory per thread block, by compute capability.
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
CALL = ["fwd", "bwd_dq", "bwd_dkv"]
#: Kernels of a call, or of passes, by the names of calls.
KERNELS = {
    "causal": CALL, "fused": ["fwd", "bwd_dkv"], **dict.fromkeys(("wide", "odd", "predicate"), CALL),
    **dict.fromkeys(("segments", "dropout"), CALL), "bias": [*CALL, "bwd_dbias"],
    "passes": ["_list_blocks", "_row_dots", "_sum_sinks"], "merges": ["_merge_results"] * 7,
    "exchanges": [
        *["_exchange_keys"] * 2, "_finish_reading", "_wait_reusable", "_add_peers", "_assert_words",
    ],
}  # fmt: skip


@pytest.mark.nightly(unless=[
    f"{name}-90" for name in ("causal", "exchanges", "passes", "merges")
])  # fmt: skip
@pytest.mark.parametrize(
    ("name", "arch"), [("causal", 80), ("causal", 100), *((name, 90) for name in KERNELS)]
)
def test_kernels(name: str, arch: int) -> None:
    kernels = compiled([name], arch)
    assert [x["kernel"] for x in kernels] == KERNELS[name]
    for x in kernels:
        assert x["shared"] <= SHARED[arch], x
        if name == "causal" and arch == 90:
            assert x["ptx"] == "wgmma"
            assert x["stack"] <= 256, x  # bytes: addresses, not tiles
        if name == "passes":
            assert x["stack"] == 0, x
        # A barrier lets all warps read a row's lse before one of them writes it.
        assert name != "merges" or x["barriers"] > 0, x
