"""Compiled for GPUs without having one: kernels fit registers and memory, and rings overlap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from backends.triton_compiler import STEPS, compiled

#: Told without importing Triton, which reads while it is imported whether it interprets kernels.
HAS_GLUON = tuple(map(int, version("triton").split(".")[:2])) >= (3, 9)

#: Bytes of shared memory that a block may have.
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}

#: Calls of plain Triton kernels for Hopper.
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"options": {"causal": True}}, "fused": {"options": {"causal": True}, "fused": True}, "wide": {"dims": [256, 256]},
    "odd": {"tokens": [1004, 500], "dims": [80, 24]}, "float32": {"dims": [64, 64], "dtype": "float32"},
    "predicate": {"predicate": True},
    "dropout": {
        "options": {"causal": True, "dropout_p": 0.1, "dropout_seed": 3},
        "arrays": {"alibi_slopes": ["float32", [4]]},
    },
    "predicate-bias": {
        "predicate": True, "dtype": "float32", "dims": [8, 8], "tokens": [12, 16],
        "arrays": {"bias": ["float32", [1, 4, 12, 16]]},
    },
    "bias": {"arrays": {"bias": ["float32", [1, 1, 1024, 1024]]}},
    "last": {"options": {"causal": True, "softcap": 5.0}, "step": "last"},
}  # fmt: skip

#: Calls of the kernels for Hopper. Where all is seen the last tiles are shared.
HOPPER_CALLS: dict[str, dict[str, Any]] = {
    "causal": {"options": {"causal": True}, "tokens": [1024, 2048]},
    "full": {"tokens": [1024, 2048]},
    "documents": {"options": {"cu_seqlens": [0, 100, 1024]}},
    "softcap": {"options": {"causal": True, "softcap": 30.0}},
    "alibi": {"options": {"causal": True}, "arrays": {"alibi_slopes": ["float32", [4]]}},
    "segments": {"options": {"causal": True}, "arrays": {"segment_ids": ["int32", [1, 1024]]}},
    "dropout": {"options": {"causal": True, "dropout_p": 0.1, "dropout_seed": 3}},
}
#: Loads and stores of spilled registers in a loop of some 500 instructions, of others than 8.
SPILLED = {"softcap": 24, "alibi": 16, "dropout": 80}


# For 90 other tests, and torch, compile causal calls per change.
@pytest.mark.nightly(unless=["causal-80", "fused-90"])
@pytest.mark.parametrize(
    ("name", "arch"), [*product(["causal"], SHARED), *((name, 90) for name in CALLS if name != "causal")]
)  # fmt: skip
def test_plain_kernels(name: str, arch: int) -> None:
    kernels = compiled([CALLS[name]], arch)
    assert all(x["shared"] <= SHARED[arch] for x in kernels), kernels
    if name == "causal":
        assert [x["kernel"] for x in kernels] == ["fwd", "bwd_dq", "bwd_dkv"]
        assert all(x["copies"] == (arch >= 90) for x in kernels)
        if arch == 90:
            assert all(x["ptx"] == "wgmma" for x in kernels)
            assert all(x["stack"] <= 32 for x in kernels), kernels  # bytes a thread keeps in memory


def check_roles(kernels: list[dict[str, Any]], mask: str) -> None:
    """Check which kernels a call has for Hopper, and that they fit."""
    by_name = {x["kernel"]: x for x in kernels}
    forward = [] if mask == "dropout" else ["fwd_hopper", "fwd"]
    assert list(by_name) == [*forward, "bwd_hopper", "bwd_dkv"]
    assert all(x["shared"] <= SHARED[90] for x in kernels), kernels
    for name in {"fwd_hopper", "bwd_hopper"} & {*by_name}:
        x = by_name[name]
        assert x["warp_specialised"] and x["copies"] and x["ptx"] == "wgmma", x
        assert x["warps"] == 12 and x["stack"] <= 512, x  # bytes: some addresses, no tile
        assert x["spilled"] <= SPILLED.get(mask, 8), x
        assert x["bare"] == [], x


@pytest.mark.skipif(not HAS_GLUON, reason="without Gluon Hopper gets the kernels of plain Triton")
@pytest.mark.nightly  # per change the next test checks a call
@pytest.mark.parametrize("step", ["only", *STEPS])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", HOPPER_CALLS)
def test_roles_on_hopper(mask: str, dim: int, step: str) -> None:
    call = HOPPER_CALLS[mask] | {"dims": [dim, dim], "hopper": True, "step": step}
    check_roles(compiled([call], 90), mask)


@pytest.mark.skipif(not HAS_GLUON, reason="without Gluon Hopper gets the kernels of plain Triton")
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    # JAX's persistent cache finds a program by its text, in which the PTX stands.
    call = HOPPER_CALLS["full"] | {"dims": [128, 128], "hopper": True, "step": "later"}
    written, kernels = [], []
    for process in ("first", "second"):
        kernels.append(compiled([call], 90, TRITON_CACHE_DIR=str(tmp_path), PROCESS=process))
        written.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")})
    assert len(written[0]) == len(kernels[0]) and written[0] == written[1]
    assert kernels[0] == kernels[1]
    check_roles(kernels[0], "full")


def test_no_roles_for_options() -> None:
    calls: list[dict[str, Any]] = [
        {"options": {"causal": True, "softcap": 2000.0}}, {"predicate": True}, {"dims": [160, 160]},
        {"dtype": "float32"},
    ]  # fmt: skip
    assert compiled([call | {"hopper": True} for call in calls], 90) == []


def test_strides_may_exceed_32_bits() -> None:
    """Both passes of 524,288 tokens of 32 heads are traced, down to jax-triton's call."""
    call = {"tokens": [1 << 19] * 2, "heads": [32, 8], "options": {"causal": True}, "traced": True}
    launches = compiled([call], 80)
    assert [x["largest"] for x in launches] == [1 << 31] * 2 and all(x["shapes"] for x in launches)


def _library() -> Path | None:
    """Find JAX's plug-in for CUDA."""
    spec = find_spec("jax_plugins.xla_cuda13") if find_spec("jax_plugins") else None
    return Path(spec.origin).with_name("xla_cuda_plugin.so") if spec and spec.origin else None


@pytest.mark.skipif(
    _library() is None and "RING_HAS_GPU_COMPILER" not in os.environ,
    reason="needs jax-cuda13-pjrt; nox -s gpu_schedule has it",
)
def test_loops_transfer_beside_attention_and_copy_nothing() -> None:
    """In XLA's GPU schedule a loop iteration is two stages of start, attention, done.

    It swaps slots without copies.
    """
    assert _library() is not None, "this session installs jax-cuda13-pjrt, and it is not there"
    script = Path(__file__).parents[1] / "backends" / "gpu_compiled.py"
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_gpu_autotune_level=0"}
    done = subprocess.run(
        [sys.executable, str(script), str(_library())], env=os.environ | flags, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [["SKDSKD", []]] * 2
