"""The ``doctor`` command tells a machine that works from one that does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributions
import jax
import pytest

import ring_jax
from ring_core import support_matrix
from ring_jax.kernels.xla import XlaKernel
from ring_jax.tools import cli, doctor

FOR_TPU = """
from dataclasses import replace
from ring_jax.kernels.xla import XlaKernel

class Unavailable(XlaKernel):
    capabilities = replace(XlaKernel.capabilities, name="pallas", devices=("tpu",))

KERNELS = (Unavailable(),)
"""
OFF_BY_A_LITTLE = """
import sys
from ring_jax.tools import cli
from ring_jax.kernels.xla import XlaKernel

right = XlaKernel.grads_into
def wrong(*args):
    grads = right(*args)
    return grads._replace(dq=grads.dq * 1.001)
XlaKernel.grads_into = wrong
sys.exit(cli.main(["doctor"]))
"""


#: Devices of a process, of which eight take longer to compile for.
THREE = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limit self-tests to two devices, with fresh caches before and after."""
    monkeypatch.setattr(doctor, "MOST_DEVICES", 2)
    jax.clear_caches()
    yield
    jax.clear_caches()


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | environment,
    )  # fmt: skip


def test_a_healthy_machine() -> None:
    done = run("-m", "ring_jax", "doctor", "--json", **THREE)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["healthy"]
    assert report["versions"].keys() >= {
        "python", "numpy", "ring-core", "ring-jax", "jax", "jaxlib",
    }  # fmt: skip
    assert report["device"] == "cpu"
    assert report["devices"]
    assert report["kernels"][-1] == {
        "name": "xla", "where": "ring_jax", "available": True, "why": "", "notes": []
    }  # fmt: skip
    assert [check["result"] for check in report["checks"]] == ["out", "dq", "dk", "dv"]
    assert {check["where"] for check in report["checks"]} == {"3 cpu"}
    assert all(0 < check["error"] <= check["limit"] < 1e-4 for check in report["checks"])


@pytest.mark.nightly
def test_two_host_devices_make_a_ring_where_nothing_else_is_asked_for() -> None:
    done = run("-m", "ring_jax", "doctor", "--json", XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    assert {check["where"] for check in json.loads(done.stdout)["checks"]} == {"2 cpu"}


def test_kernels_for_another_device(tmp_path: Path) -> None:
    """Kernels for other platforms, working or broken, do not make a CPU unhealthy."""
    (tmp_path / "for_tpu.py").write_text(FOR_TPU)
    distributions.write(tmp_path, "ring-jax-tpu", ring_jax.__version__, {"tpu": "for_tpu:KERNELS"})
    distributions.write(tmp_path, "ring-jax-gpu", ring_jax.__version__, {"cuda": "no_such:KERNELS"})
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("-m", "ring_jax", "doctor", PYTHONPATH=path, XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["ring-jax-tpu", ring_jax.__version__] in rows
    assert ["pallas", "for_tpu", "no:", "runs", "on", "tpu,", "not", "on", "cpu"] in rows
    broken = next(line for line in done.stdout.splitlines() if line.startswith("  triton"))
    assert "ModuleNotFoundError: No module named 'no_such'" in broken
    assert "all is well" in done.stdout


@pytest.mark.nightly
def test_wrong_gradients_are_found() -> None:
    done = run("-c", OFF_BY_A_LITTLE, XLA_FLAGS="")
    assert done.returncode == 1, done.stderr
    states = {
        line.split()[3]: line.split()[4] for line in done.stdout.splitlines() if "limit" in line
    }
    assert states == {"out": "ok", "dq": "FAILED", "dk": "ok", "dv": "ok"}
    assert "something is wrong" in done.stdout


@pytest.mark.usefixtures("two_devices")
def test_a_kernel_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with rules of its own for 16-bit dtypes is tested in them, too."""

    def fail(*launch: Any) -> None:
        raise RuntimeError(f"no such instruction for {launch[2].q.dtype}")

    monkeypatch.setattr(XlaKernel, "attend_into", fail)
    monkeypatch.setattr(XlaKernel, "notes", lambda *_: ("on some CPUs by kernels of their own",))
    monkeypatch.setattr(doctor, "installed_kernels", lambda: (XlaKernel(),))
    for check, (name, dtype) in zip(
        doctor.diagnose().checks,
        {"xla": "float32", "xla in bfloat16": "bfloat16"}.items(),
        strict=True,
    ):
        assert (check.name, check.result, check.passed, check.error) == (name, "runs", False, None)
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
