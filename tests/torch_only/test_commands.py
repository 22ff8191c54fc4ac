"""The commands ``explain``, ``doctor`` and ``bench``, and what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from patched import replaced

from ring_core import StrategyConfig
from ring_core.tools.doctor import RESULTS, report
from ring_core.tripwire import CAPABILITIES, peak_tflops
from ring_torch import ContextParallel, cross_entropy, kernels, ring_attention
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels import KERNELS, fa4
from ring_torch.kernels.api import Kernel
from ring_torch.kernels.eager import EagerKernel
from ring_torch.kernels.fa4 import FA4
from ring_torch.kernels.flash import FlashKernel
from ring_torch.kernels.flash_attn import FA2, FA3
from ring_torch.kernels.measured import OPTIONS, RATES_VARIABLE, measured
from ring_torch.local import LocalRanks
from ring_torch.options import CallOptions
from ring_torch.prepare import _prepare, check_call
from ring_torch.records import AttentionState
from ring_torch.strategies import explained
from ring_torch.tools import doctor, rates as torch_rates
from ring_torch.tools.cli import main
from ring_torch.transports import TRANSPORTS

WIDTH, HEIGHT = 80, 24
ON_THE_HOST = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="this machine has an accelerator"
)


def test_explain_fits_a_screen() -> None:
    x = torch.zeros(1, 4096, 2, 64)
    lines = ContextParallel().explain(x, x, x, causal=True, window=(512, 0)).splitlines()
    assert sum(-(-len(line) // WIDTH) for line in lines) <= HEIGHT
    for word in ("kernel", "strategy", "transport", "layout=zigzag", "balance"):
        assert any(word in line for line in lines)


def test_explain_counts_calls_that_were_prepared() -> None:
    cp = ContextParallel()
    _prepare.cache_clear()
    for length in (40, 48, 40, 40, 64, 65, 16, 16, 2, 1, 2):
        x = torch.zeros(1, length, 2, 8)
        cp.attention(x, x, x, softcap=7.0)
    *_, line = cp.explain(*[torch.zeros(1, 8, 2, 8)] * 3).splitlines()
    counts = "<=64 2/3, <=2 1/1, <=16 1/1, others 0/2"
    assert line == f"prepared calls     found again/made by length: {counts}"


def right() -> dict[str, Any]:
    """Return arguments of a preflight that passes; those of :func:`wrong` and others do not."""
    cp, model = ContextParallel(), torch.nn.Linear(8, 5)
    for weight in model.parameters():
        torch.nn.init.constant_(weight, 0.1)

    def step(model: Any, batch: Any) -> torch.Tensor:
        logits = model(cp.shard(batch))
        return cross_entropy(cp, logits, cp.shard(batch[..., 0].long().abs()))

    batch = torch.linspace(-4, 4, 2 * 24 * 8).view(2, 24, 8)
    return {"cp": cp, "step": step, "model": model, "batch": batch}


def wrong() -> dict[str, Any]:
    arguments = right()
    return arguments | {"step": lambda *x: arguments["cp"].cp_size * arguments["step"](*x)}


def failing() -> dict[str, Any]:
    arguments = right()

    def step(*x: Any) -> Any:
        if arguments["cp"].cp_rank == 1:
            raise KeyError("mine")
        return arguments["step"](*x)

    return arguments | {"step": step}


def without_a_batch() -> dict[str, Any]:
    arguments = right()
    del arguments["batch"]
    return arguments


#: What the command says of each function, and its exit code.
PREFLIGHTS = {
    "right": (0, "preflight passed: loss"),
    "wrong": (1, "preflight failed: the loss differs by .* the loss is 2 times the whole step's"),
    "failing": (1, r"a split run failed on rank 1: KeyError: 'mine'(.|\n)*test_commands.py"),
    "without_a_batch": (1, r"returns \['cp', 'step', 'model'\], .* missing a required argument: 'batch'"),
    "PREFLIGHTS.nothing": (2, "is no MODULE:FUNCTION"),
}  # fmt: skip


@pytest.mark.parametrize("function", PREFLIGHTS)
def test_preflight_of_a_function(function: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, words = PREFLIGHTS[function]
    assert main(["preflight", f"{__name__}:{function}"]) == code
    printed = capsys.readouterr()
    assert re.search(words, printed.out or printed.err), printed


def test_preflight_under_torchrun() -> None:
    command = "torch.distributed.run --standalone --nproc-per-node 3 -m ring_torch preflight test_commands:failing"
    here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    got = subprocess.run(
        [sys.executable, "-m", *command.split()], env=os.environ | here, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert got.returncode == 1
    assert got.stdout.count("KeyError: 'mine'") == 3, got.stdout + got.stderr


def _explained(_: int, queries: int, options: dict[str, Any]) -> str:
    q, k = (torch.empty(1, queries, n, 32, requires_grad=True) for n in (4, 2))
    return ContextParallel().explain(q, k, k, causal=True, **options)


def test_the_command_explains_ranks_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    size = "--cp 2 --heads 4/2 --head-dim 32 --dtype float32"
    with LocalRanks(2) as ranks:
        for more, queries, options in (
            ("--seq-len 1k --window 128,0", 512, {"window": (128, 0)}),
            ("--seq-len 1022 --strategy ulysses", 512, {"seq_len": 1022, "strategy": "ulysses"}),
        ):
            assert main(["explain", *size.split(), *more.split()]) == 0
            first, _, text = capsys.readouterr().out.rstrip().partition("\n")
            assert first == (
                f"rank 0 of 2 has queries [1, {queries}, 4, 32] and keys [1, {queries}, 2, 32], "
                f"float32 on cpu; forward and backward"
            )
            assert text == ranks.run(_explained, queries, options)[0].rpartition("\n")[0]


ASKED, TIMED = "explain --cp 2 --seq-len 8", "bench --rates rates.json"
MISTAKES = (
    ("explain --cp 0 --seq-len 8 --heads 4", "--cp must be at least 1"),
    (f"{ASKED} --heads 4 --kernel fa9", "unknown kernel 'fa9'"),
    (f"{ASKED} --heads 4 --strategy hybrid", "no process group to ask. Instead: "),
    (f"{ASKED} --heads 4 --device a100 --kernel fa4", "kernel 'fa4'"),
    *((f"{ASKED} --heads={x}", "is no H/K such as 32/8") for x in ("8/3", "x", "8/4/2", "0", "-8")),
    ("bench --seq-len 255", "255 is not a positive multiple of 4"),
    ("bench --ranks 0", "--ranks must be at least 1"),
    (f"{TIMED} --seq-len 0", "--seq-len must be at least 1, got 0"),
    (f"{TIMED} --heads 4 --json", "--rates takes --seq-len alone; leave out --heads, --json"),
)


@pytest.mark.parametrize(("command", "words"), MISTAKES)
def test_mistakes(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(command.split())
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "") and words in printed.err


LONG = "--cp 4 --seq-len 64k --heads 32/8"


@pytest.mark.parametrize("size", [LONG, LONG.replace("4", "1", 1), f"{LONG} --strategy ulysses"])
def test_another_device_is_explained_as_on_a_machine_that_has_it(
    size: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is decided by the device is decided by the one that is asked about."""
    libraries: dict[Kernel, Kernel] = {
        x: replace(x, unavailable=lambda: None) for x in (fa4.FA4, FA2, FA3)
    }
    installed = tuple(libraries.get(kernel, kernel) for kernel in kernels.KERNELS)
    monkeypatch.setattr(kernels, "KERNELS", installed)
    monkeypatch.setattr(fa4.library, "is_known", lambda: True)
    texts = dict[str | None, str]()
    for device in ("h200", "A100", "cpu", "h200", None):
        asked = [] if device is None else ["--device", device]
        assert main(["explain", *size.split(), *asked]) == 0
        text = capsys.readouterr().out
        assert texts.setdefault(device, text) == text
    assert texts["cpu"] == texts[None]  # torch finds no GPU here
    assert "on cuda (h200)" in texts["h200"]
    assert "\nkernel fa4\n" in texts["h200"]
    assert "\nkernel fa2\n" in texts["A100"]
    if "--cp 4" in size:
        assert all("symm_mem, if the ranks' GPUs" in texts[x] for x in ("h200", "A100"))
    # The same by another way: a machine whose torch finds that GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert main(["explain", *size.split()]) == 0
    assert capsys.readouterr().out == texts["h200"].replace(" (h200)", "")


def test_devices_that_are_not_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", *LONG.split(), "--device", "voodoo2"])
    printed = capsys.readouterr().err
    assert all(name in printed for name in ("cpu", *CAPABILITIES))
    for name in CAPABILITIES:  # those whose peak is known, too
        assert peak_tflops(f"NVIDIA {name.upper()}") is not None


def test_gpus_that_are_not_there_are_to_be_asked() -> None:
    absent = Ranks(None, 0, 4)
    by_name = {transport.name: transport for transport in TRANSPORTS}
    assert by_name["symm_mem"].refusals(absent, torch.device("cuda"), False) is None


def _figures(strategy: str | StrategyConfig, **options: Any) -> list[str]:
    """The lines of ``explain`` below the plan's, on rank 1 of 4 whose shards are contiguous."""
    q, k = (torch.empty(1, 256, n, 16, requires_grad=True) for n in (8, 4))
    record = CallOptions(strategy=strategy, causal=True, **options)
    text = explained(*check_call(Ranks(None, 1, 4), 0, "contiguous", q, k, k, record))
    _, _, figures = text.partition("\nseq_len=1024 cp_size=4 layout=contiguous ")
    return figures.splitlines()[1:]


_IMBALANCE = "busiest rank's (query, key) pairs over the mean"
_WAITS = "of each step's busiest rank: a ring waits for it"
_EXCHANGES = "2 in the forward, 2 in the backward: tokens for heads among"


@pytest.mark.parametrize(
    ("strategy", "figures"),
    [
        (
            "ring",
            [
                f"imbalance          1.749  {_IMBALANCE}", f"imbalance by step  1.749  {_WAITS}",
                "steps with work    4 of 4; others are skipped",
                "K/V messages       3 per rank in the forward",
            ],
        ),
        (
            "gather",
            [
                f"imbalance          1.749  {_IMBALANCE}",
                "fetches            1 by this rank: 256 keys from 1 of 3 other ranks",
                "launches           1 over gathered keys, 1 over own in place, in the forward",
            ],
        ),
        (
            "ulysses",
            [f"imbalance          1.000  {_IMBALANCE}", f"exchanges          {_EXCHANGES} 4 ranks"],
        ),
        (
            StrategyConfig("hybrid", ulysses_size=2),
            [
                f"exchanges          {_EXCHANGES} 2 ranks",
                "between groups     ring over 2 groups of 2 ranks:",
                f"imbalance          1.500  {_IMBALANCE}", f"imbalance by step  1.500  {_WAITS}",
                "steps with work    2 of 2; others are skipped",
                "K/V messages       1 per rank in the forward",
            ],
        ),
        (
            StrategyConfig("hybrid", ulysses_size=2, outer="gather"),
            [
                f"exchanges          {_EXCHANGES} 2 ranks",
                "between groups     gather over 2 groups of 2 ranks:",
                f"imbalance          1.500  {_IMBALANCE}",
                "fetches            none, as no query of this rank sees keys of another",
                "launches           0 over gathered keys, 1 over own in place, in the forward",
            ],
        ),
    ],
)  # fmt: skip
def test_figures_are_those_of_the_strategy_that_runs(
    strategy: str | StrategyConfig, figures: list[str]
) -> None:
    assert _figures(strategy) == figures


def test_own_keys_may_be_gathered_too() -> None:
    """A kernel of all bands sees them in one launch with the others."""
    *_, fetches, launches = _figures("gather", kernel="eager")
    assert "1 by this rank: 256 keys" in fetches
    assert "1 over gathered keys, 0 over own in place" in launches


def test_exchanges_are_those_that_run() -> None:
    bias = torch.empty(1, 8, 256, 1024, requires_grad=True)
    ids = torch.zeros(1, 256, dtype=torch.int32)
    _, exchanges = _figures("ulysses", segment_ids=ids, bias=bias)
    assert "5 in the forward, 3 in the backward" in exchanges


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


@ON_THE_HOST
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


@ON_THE_HOST
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


SMALL = ("--seq-len", "256", "--heads", "4", "--kv-heads", "2", "--head-dim", "16")


@ON_THE_HOST
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
