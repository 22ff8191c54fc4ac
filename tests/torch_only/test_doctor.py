"""The doctor command reports what works and what does not, and why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from patched import replaced

from ring_core.tools.doctor import RESULTS, report
from ring_torch.kernels import KERNELS
from ring_torch.kernels.eager import EagerKernel
from ring_torch.kernels.fa4 import FA4
from ring_torch.kernels.flash import FlashKernel
from ring_torch.records import AttentionState
from ring_torch.tools import doctor
from ring_torch.tools.cli import main

EAGER = EagerKernel()


def found_by(capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    """Return what ``doctor --json`` prints, after checking its exit code."""
    assert main(["doctor", "--json"]) == code
    diagnosis: dict[str, Any] = json.loads(capsys.readouterr().out)
    return diagnosis


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let torch report two GPUs, which cannot compute."""

    def show(*, reach: bool = True, capability: tuple[int, int] = (9, 0)) -> None:
        for name, value in {
            "is_available": True, "device_count": 2, "get_device_name": "H200",
            "get_device_capability": capability, "can_device_access_peer": reach,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        monkeypatch.setattr(doctor, "accelerator", lambda: "cuda")
        for test in ("self_test", "ring_test"):
            monkeypatch.setattr(doctor, test, lambda *_, **__: iter(()))

    return show


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_machine_without_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    diagnosis = found_by(capsys)
    assert diagnosis["healthy"]
    assert (diagnosis["device"], diagnosis["devices"]) == ("cpu", [])
    assert diagnosis["versions"].keys() >= {"python", "numpy", "ring-core", "ring-torch", "torch"}
    names = [kernel.capabilities.name for kernel in KERNELS]
    assert [kernel["name"] for kernel in diagnosis["kernels"]] == names
    for kernel in diagnosis["kernels"]:
        if kernel["where"] == "cuda":
            assert kernel["why"] == "runs on cuda; torch finds no such device here"
        else:
            assert kernel["available"] and not kernel["why"]
    ways = {way["name"]: way["available"] for way in diagnosis["strategies"]}
    messages = ["ulysses/p2p", "gather/p2p", "ring/p2p", "balanced/p2p", "hybrid/p2p"]
    assert ways == {
        "gather/symm_mem": False,
        "ulysses/symm_mem": False,
        **dict.fromkeys(messages, True),
    }
    checks = [(check["name"], check["where"], check["result"]) for check in diagnosis["checks"]]
    tested = [("sdpa", "cpu"), ("eager", "cpu"), *((way, "2 cpu ranks") for way in messages)]
    assert checks == [(*kernel_and_pass, what) for kernel_and_pass in tested for what in RESULTS]
    assert all(0 < check["error"] <= check["limit"] < 1e-4 for check in diagnosis["checks"])


def _check_text(printed: str) -> None:
    """Check the printed text against the documentation page."""
    rows = [line.split() for line in printed.splitlines()]
    assert ["eager", "any", "available"] in rows
    assert ["ring/p2p", "any", "available"] in rows
    assert ["gather/symm_mem", "cuda", "no:"] in [line[:3] for line in rows]
    assert rows[-1] == ["all", "is", "well"]
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    (shown,) = re.findall(r"<!-- of doctor .*? -->\n```text\n(.*?)```", page, re.DOTALL)
    assert [line for line in shown.splitlines() if line.split() not in rows] == []


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_what_people_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    _check_text(capsys.readouterr().out)


def test_gpus_and_the_order_of_kernels(two_gpus: Any, capsys: pytest.CaptureFixture[str]) -> None:
    two_gpus(capability=(8, 0))
    diagnosis = found_by(capsys, code=1)  # no kernel has yet shown that it runs on these GPUs
    assert diagnosis["devices"] == [
        f"H200, compute capability 8.0, reaches {other}" for other in (1, 0)
    ]
    assert [kernel["name"] for kernel in diagnosis["kernels"]][:2] == ["fa2", "fa4"]
    assert diagnosis["strategies"][0] == {
        "name": "ulysses/symm_mem", "where": "cuda", "available": True, "why": "", "notes": []
    }  # fmt: skip


def test_gpus_that_do_not_reach_each_other(two_gpus: Any) -> None:
    two_gpus(reach=False)
    diagnosis = doctor.diagnose()
    assert diagnosis.strategies[0].why == "GPUs do not reach each other's memory: 0 and 1"
    text = report(diagnosis, as_json=False)
    assert "H200, compute capability 9.0, reaches no other" in text
    assert text.endswith("something is wrong")


def test_a_kernel_that_cannot_even_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("undefined symbol")

    monkeypatch.setattr(FlashKernel, "unavailable_reason", broken)
    assert doctor.kernel_report(FA4, "cuda").why == (
        "looking for it failed: RuntimeError('undefined symbol')"
    )
    assert "finds no such device" in doctor.kernel_report(FA4, "cpu").why  # not asked


def test_a_kernel_that_fails() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such instruction")

    with replaced(EagerKernel, attend=fail):
        (check,) = doctor.self_test(EAGER, "cpu")
    assert (check.result, check.passed, check.error) == ("runs", False, None)
    assert "no such instruction" in check.trace


@pytest.mark.parametrize("factor", [1.001, float("nan"), float("inf")])
def test_a_wrong_result_is_found(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = EagerKernel.attend

    def wrong(*args: Any) -> AttentionState:
        result = right(*args)
        result.out.mul_(factor)
        return result

    with replaced(EagerKernel, attend=wrong):
        checks = {check.result: check for check in doctor.self_test(EAGER, "cpu")}
    assert not checks["out"].passed
    assert (checks["out"].error is None) == (factor != 1.001)
    assert checks["dv"].passed
    monkeypatch.setattr(doctor, "in_order", lambda _: (EAGER,))
    monkeypatch.setattr(doctor, "all_ways", lambda: ())
    with replaced(EagerKernel, attend=wrong):
        assert main(["doctor"]) == 1


def test_a_ring_that_fails() -> None:
    (check,) = doctor.ring_test([("gather", "symm_mem")], cuda=False)
    assert (check.name, check.result, check.passed) == ("gather/symm_mem", "runs", False)
    assert "UnsupportedError" in check.trace
