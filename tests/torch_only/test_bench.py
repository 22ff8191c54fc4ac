"""``python -m ring_torch bench`` prints a time only where results are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ring_torch import ring_attention
from ring_torch.kernels.measured import OPTIONS, RATES_VARIABLE, measured
from ring_torch.local import LocalRanks
from ring_torch.tools import doctor, rates as torch_rates
from ring_torch.tools.cli import main

SMALL = ("--seq-len", "256", "--heads", "4", "--kv-heads", "2", "--head-dim", "16")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--window", "40,0", "--strategy", "gather", "--kernel", "eager", "--seconds", "0")
    assert main(["bench", *SMALL, *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["setting"]["ranks"] == 2 and report["setting"]["window"] == [40, 0]
    assert [row["name"] for row in report["timings"]] == ["forward", "forward and backward"]
    for row in report["timings"]:
        assert len(row["alone"]) == len(row["ring"]) == len(row["checked"]) == 3
        assert row["work_fraction"] == 0.5 and row["efficiency"] > 0
        assert row["check_cost"] > 0


def test_no_speed_without_right_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = LocalRanks.run

    def wrong(*args: Any) -> list[Any]:
        return [[1.01 * x for x in results] for results in right(*args)]

    monkeypatch.setattr(LocalRanks, "run", wrong)
    assert main(["bench", *SMALL, "--ranks", "1"]) == 1
    text = capsys.readouterr().out
    assert "FAILED" in text and text.endswith("something is wrong\n")
    assert "efficiency" not in text


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("--seq-len 255", "255 is not a positive multiple of 4"),
        ("--ranks 0", "--ranks must be at least 1"),
    ],
)
def test_mistakes(command_line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *command_line.split()]) == 2
    assert message in capsys.readouterr().err


ON_THE_HOST = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="this machine has an accelerator"
)
FEW = (("causal", 16), ("window", 16))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``bench --rates`` time two cases with few heads, in one round."""
    monkeypatch.setattr(torch_rates.renew, "__defaults__", (FEW,))
    monkeypatch.setattr(torch_rates, "ROUNDS", 1)
    monkeypatch.setattr(torch_rates, "HEADS", (4, 2))


def _orders(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], list[str]]:
    monkeypatch.setenv(RATES_VARIABLE, str(path))
    return dict(measured().orders)


@ON_THE_HOST
@pytest.mark.usefixtures("few")
def test_rates_are_written_and_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rates.json"
    path.write_text("of another run")
    assert main(["bench", "--rates", str(path), "--seq-len", "64"]) == 0
    said = capsys.readouterr()
    assert f"RING_RATES={path} uses it" in said.out and "no time" not in said.err
    orders = _orders(path, monkeypatch)
    assert {case: {*names} for case, names in orders.items()} == {
        ("causal", 16): {"sdpa", "eager"}, ("window", 16): {"eager"},
    }  # fmt: skip
    assert measured().device == "cpu"
    for row in json.loads(path.read_text())["rows"]:
        times = [*row["milliseconds"].values()]
        assert times == sorted(times) and times[0] > 0


@ON_THE_HOST
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_can_be_timed(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_rates, "HEADS", (4, 2))
    results: Any = torch_rates._call(option, 16, 64, "cpu")(kernel="eager")
    out, *grads = results
    assert out.shape == (1, 64, 4, 16) and len(grads) == 3
    assert all(x.isfinite().all() for x in (out, *grads))


@ON_THE_HOST
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("fault", ["raises", "rough"])
def test_a_kernel_that_fails_has_no_time(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right: Any = ring_attention

    def wrong(*tensors: Any, kernel: str, **options: Any) -> Any:
        if kernel == "sdpa" and fault == "raises":
            raise RuntimeError("not today\nnor tomorrow")
        return right(*tensors, kernel=kernel, **options) * (1.001 if kernel == "sdpa" else 1)

    # One that raises does so when it is timed; one that errs, in the doctor's test before.
    monkeypatch.setattr(torch_rates if fault == "raises" else doctor, "ring_attention", wrong)
    path = tmp_path / "rates.json"
    assert main(["bench", "--rates", str(path), "--seq-len", "64"]) == 0
    assert ("no time of sdpa: not today\n" in capsys.readouterr().err) is (fault == "raises")
    assert all(names == ["eager"] for names in _orders(path, monkeypatch).values())


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("--seq-len 0", "--seq-len must be at least 1, got 0"),
        ("--heads 4 --json", "--rates takes --seq-len alone; leave out --heads, --json"),
    ],
)
def test_mistakes_about_rates(
    command_line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "--rates", str(tmp_path / "rates.json"), *command_line.split()]
    try:
        code: object = main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and message in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("command", ["bench", "doctor"])
def test_a_launcher_is_refused_once(command: str) -> None:
    """Under ``torchrun`` only rank 0 prints that the command starts its own ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "-m", "ring_torch", command], capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count(f"python -m ring_torch {command} starts its ranks itself") == 1
    assert f"run `python -m ring_torch {command}` once" in done.stderr
