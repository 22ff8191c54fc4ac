"""XLA's GPU schedule of a ring's loops, compiled without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "backends" / "gpu_compiled.py"


def _library() -> Path | None:
    """Find JAX's plug-in for CUDA."""
    spec = find_spec("jax_plugins.xla_cuda13") if find_spec("jax_plugins") else None
    return Path(spec.origin).with_name("xla_cuda_plugin.so") if spec and spec.origin else None


@pytest.mark.skipif(
    _library() is None and "RING_HAS_GPU_COMPILER" not in os.environ,
    reason="needs jax-cuda13-pjrt; nox -s gpu_schedule has it",
)
def test_loops_transfer_beside_attention_and_copy_nothing() -> None:
    """A loop iteration is two stages of start, attention, done, and swaps slots without copies."""
    assert _library() is not None, "this session installs jax-cuda13-pjrt, and it is not there"
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_gpu_autotune_level=0"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(_library())], env=os.environ | flags, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [["SKDSKD", []]] * 2
