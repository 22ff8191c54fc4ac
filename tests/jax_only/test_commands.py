"""Commands of the package and examples: they say what is right, and notice what is wrong.

Importing and running open no connections, except those of ``jax.distributed``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax_meshes import context
from offline import run_offline

from ring_core import support_matrix
from ring_jax.kernels.xla import XlaKernel
from ring_jax.tools import cli, doctor


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | environment,
    )  # fmt: skip


@pytest.mark.nightly(only=["2"])  # which make a ring where nothing else is asked for
@pytest.mark.parametrize("devices", [2, 3])  # eight take longer to compile for
def test_a_healthy_machine(devices: int) -> None:
    asked = "" if devices == 2 else f"--xla_force_host_platform_device_count={devices}"
    done = run("-m", "ring_jax", "doctor", "--json", XLA_FLAGS=asked)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["healthy"] and report["device"] == "cpu" and report["devices"]
    names = {"python", "numpy", "ring-core", "ring-jax", "jax", "jaxlib"}
    assert report["versions"].keys() >= names
    assert report["kernels"][-1] == {
        "name": "xla", "where": "ring_jax", "available": True, "why": "", "notes": []
    }  # fmt: skip
    assert [check["result"] for check in report["checks"]] == ["out", "dq", "dk", "dv"]
    assert {check["where"] for check in report["checks"]} == {f"{devices} cpu"}
    assert all(0 < check["error"] <= check["limit"] < 1e-4 for check in report["checks"])


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limit self-tests to two devices, with fresh caches before and after."""
    monkeypatch.setattr(doctor, "MOST_DEVICES", 2)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.nightly
@pytest.mark.usefixtures("two_devices")
def test_wrong_gradients_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = XlaKernel.grads_into

    def off_by_a_little(*args: Any) -> Any:
        grads = right(*args)
        return grads._replace(dq=grads.dq * 1.001)

    monkeypatch.setattr(XlaKernel, "grads_into", off_by_a_little)
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if "limit" in line]
    assert {row[3]: row[4] for row in rows} == {
        "out": "ok", "dq": "FAILED", "dk": "ok", "dv": "ok"
    }  # fmt: skip
    assert "something is wrong" in printed


@pytest.mark.usefixtures("two_devices")
def test_a_kernel_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with rules of its own for 16-bit dtypes is tested in them, too."""

    def fail(*launch: Any) -> None:
        raise RuntimeError(f"no such instruction for {launch[2].q.dtype}")

    monkeypatch.setattr(XlaKernel, "attend_into", fail)
    monkeypatch.setattr(XlaKernel, "notes", lambda *_: ("on some CPUs by kernels of their own",))
    monkeypatch.setattr(doctor, "installed_kernels", lambda: (XlaKernel(),))
    checks = doctor.diagnose().checks
    assert [check.name for check in checks] == ["xla", "xla in bfloat16"]
    for check, dtype in zip(checks, ("float32", "bfloat16"), strict=True):
        assert (check.result, check.passed, check.error) == ("runs", False, None)
        assert f"no such instruction for {dtype}" in check.trace


def test_no_device() -> None:
    done = run("-m", "ring_jax", "doctor", JAX_PLATFORMS="cuda")
    assert done.returncode == 1
    assert "JAX finds no device; JAX_PLATFORMS='cuda'" in done.stderr
    assert "Traceback" not in done.stderr


def test_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix"]) == 0
    assert capsys.readouterr().out == f"{support_matrix([XlaKernel.capabilities])}\n"


@pytest.mark.nightly
def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--seq-len", "128", "--ranks", "2", "--heads", "2", "--kv-heads", "1")
    done = run("-m", "ring_jax", "bench", *sizes, "--head-dim", "8", "--seconds", "0", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["name"] for row in report["timings"]] == ["forward", "forward and backward"]
    assert all(row["work_fraction"] == 1 and row["efficiency"] > 0 for row in report["timings"])
    assert cli.main(["bench", "--seq-len", "101"]) == 2
    assert "101 is not a positive multiple of 16" in capsys.readouterr().err


def test_explain_needs_no_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """It says what ``ContextParallel.explain`` says."""
    q, k = jnp.zeros((1, 64, 4, 16), jnp.bfloat16), jnp.zeros((1, 64, 2, 16), jnp.bfloat16)
    command = ["explain", "--cp=4", "--heads=4/2", "--head-dim=16", "--seq-len"]
    assert cli.main([*command, "64", "--window", "9,0"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    shards = "queries [1, 16, 4, 16] and keys [1, 16, 2, 16]"
    assert first == f"rank 0 of 4 has {shards}, bfloat16 on cpu"
    # The kernels of this platform are listed for default options, as for these.
    text = context(4).explain(q, k, k, causal=True, window=(9, 0))
    assert lines[-7:] == text.splitlines()[-7:]
    assert cli.main([*command, "62"]) == 0
    assert "queries [1, 16, 4, 16]" in capsys.readouterr().out
    assert cli.main([*command, "64k", "--strategy", "x"]) == 2
    assert "ring_jax: error: " in capsys.readouterr().err


EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--seq-len=256", "--steps=4", "--layers=1", "--dim=64", "--cp=2"]


def run_example(name: str, *options: str) -> str:
    """Run an example as a user would, without this suite's host devices; return its output."""
    done = run(str(EXAMPLES / name), *options, XLA_FLAGS="", RING_CHECK="1")
    assert done.returncode == 0, done.stderr
    return done.stdout


PACKED = "--packed --window=20 --layout=contiguous --strategy=balanced --dtype=float64"


@pytest.mark.nightly
@pytest.mark.parametrize("options", ["--cp=4", PACKED])
def test_devices_and_one_device_agree(options: str) -> None:
    printed = run_example("train_bytes_jax.py", *SMALL, *options.split())
    table = [line.split() for line in printed.splitlines()]
    losses = [row for row in table if len(row) == 4 and row[0].isdigit()]
    assert len(losses) == 4
    for _, ring, single, _ in losses:
        assert float(ring) == pytest.approx(float(single), rel=1e-5)
    assert "largest relative difference" in printed


@pytest.mark.nightly  # per change the pages on adapters run_example the same layers
@pytest.mark.parametrize("name", ["flax_nnx.py", "equinox_attention.py"])
def test_frameworks(name: str) -> None:
    last = run_example(name).splitlines()[-1]
    assert last.startswith("largest relative difference of loss and gradients:")
    assert 0 < float(last.split()[-1]) <= 1e-5


def test_jax_stays_offline() -> None:
    run_offline("""
import jax
import jax.numpy as jnp
import ring_jax
x = jnp.ones((1, 8, 2, 8))
call = lambda x: ring_jax.ring_attention(x, x, x, axis_name=None, causal=True).sum()
jax.block_until_ready(jax.jit(jax.grad(call))(x))
""")
