"""The commands ``explain``, ``doctor`` and ``bench``, and what they say."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from on_ranks import be_started
from patched import replaced
from torch._C._distributed_c10d import TCPStore

from ring_core import StrategyConfig
from ring_core.base.caches import LengthCaches
from ring_core.tools.doctor import RESULTS
from ring_core.tripwire import CAPABILITIES, peak_tflops
from ring_torch import ContextParallel, cross_entropy, kernels, prepare, ring_attention
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


def right(step: Any = lambda _, loss: loss) -> dict[str, Any]:
    """Return arguments of a preflight that passes; those of the functions below do not."""
    cp, model = ContextParallel(), torch.nn.Linear(8, 5)
    for weight in model.parameters():
        torch.nn.init.constant_(weight, 0.1)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        labels = cp.shard(batch[..., 0].long().abs())
        changed: torch.Tensor = step(cp, cross_entropy(cp, model(cp.shard(batch)), labels))
        return changed

    batch = torch.linspace(-4, 4, 2 * 24 * 8).view(2, 24, 8)
    return {"cp": cp, "step": loss, "model": model, "batch": batch}


wrong = partial(right, lambda cp, loss: cp.cp_size * loss)
failing = partial(right, lambda cp, loss: dict[str, Any]()["mine"] if cp.cp_rank == 1 else loss)


def without_a_batch() -> dict[str, Any]:
    return {name: x for name, x in right().items() if name != "batch"}


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


def under_torchrun(rank: int, port: int, name: str) -> tuple[int, str]:
    """Run the command as one of three processes of ``torchrun``."""
    be_started(rank, 3, port)
    with redirect_stdout(io.StringIO()) as printed:
        code = main(["preflight", name])
    return code, printed.getvalue()


def test_preflight_under_torchrun() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with LocalRanks(3) as ranks:
        results = ranks.run(under_torchrun, store.port, f"{__name__}:failing")
    assert [code for code, printed in results if "KeyError: 'mine'" in printed] == [1, 1, 1]


def _explained(_: int, queries: int, options: dict[str, Any]) -> str:
    q, k = (torch.empty(1, queries, n, 32, requires_grad=True) for n in (3, 1))
    return ContextParallel().explain(q, k, k, causal=True, **options)


def test_the_command_explains_ranks_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    size = "--cp 2 --heads 3/1 --head-dim 32 --dtype float32"
    with LocalRanks(2) as ranks:
        for more, queries, options in (
            ("--seq-len 1k --window 128,0", 512, {"window": (128, 0)}),
            ("--seq-len 1022 --strategy ulysses", 512, {"seq_len": 1022, "strategy": "ulysses"}),
        ):
            assert main(["explain", *size.split(), *more.split()]) == 0
            first, _, text = capsys.readouterr().out.rstrip().partition("\n")
            assert first == (
                f"rank 0 of 2 has queries [1, {queries}, 3, 32] and keys [1, {queries}, 1, 32], "
                f"float32 on cpu; forward and backward"
            )
            assert text == ranks.run(_explained, queries, options)[0].rpartition("\n")[0]
            padded = "3 query heads in 4 places (25% padding), 1 K/V heads in 2"
            assert (padded in text) == ("strategy" in options)


ASKED, TIMED = "explain --cp 2 --seq-len 8", "bench --rates rates.json"
MISTAKES = (
    ("explain --cp 0 --seq-len 8 --heads 4", "--cp must be at least 1"),
    (f"{ASKED} --heads 4 --kernel fa9", "unknown kernel 'fa9'"),
    (f"{ASKED} --heads 4 --strategy hybrid", "no process group to ask. Instead: "),
    (f"{ASKED} --heads 4 --device a100 --kernel fa4", "kernel 'fa4'"),
    *((f"{ASKED} --heads={x}", "is no H/K such as 32/8") for x in ("8/3", "x", "8/4/2", "0", "-8")),
    *((f"{ASKED} --heads 4 --device voodoo2", name) for name in ("cpu", *CAPABILITIES)),
    (f"{TIMED} --seq-len 0", "--seq-len must be at least 1, got 0"),
    (f"{TIMED} --heads 4 --json", "--rates takes --seq-len alone; leave out --heads, --json"),
)


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    for command, words in MISTAKES:
        try:
            code: object = main(command.split())
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        assert (code, printed.out) == (2, "") and words in printed.err, command
    for name in CAPABILITIES:  # those whose peak is known, too
        assert peak_tflops(f"NVIDIA {name.upper()}") is not None


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


_IMBALANCE = "busiest rank's (query, key) pairs over the mean"
_WAITS = "of each step's busiest rank: a ring waits for it"
_EXCHANGES = "exchanges 2 in the forward, 2 in the backward: tokens for heads among 2 ranks"
#: Strategies with options, and the lines of ``explain`` below the plan's.
FIGURES: dict[str, tuple[str | StrategyConfig, dict[str, Any], tuple[str, ...]]] = {
    # A kernel of all bands sees own keys in one launch with the others.
    "gather, eager": ("gather", {"kernel": "eager"}, (
        f"imbalance 1.749 {_IMBALANCE}", "fetches 1 by this rank: 256 keys from 1 of 3 other ranks",
        "launches 1 over gathered keys, 0 over own in place, in the forward",
    )),
    "ulysses, options": (
        "ulysses", {
            "segment_ids": torch.zeros(1, 256, dtype=torch.int32),
            "bias": torch.empty(1, 8, 256, 1024, requires_grad=True),
        }, (
            f"imbalance 1.000 {_IMBALANCE}",
            "exchanges 5 in the forward, 3 in the backward: tokens for heads among 4 ranks",
        ),
    ),
    "hybrid, ring": (StrategyConfig("hybrid", ulysses_size=2), {}, (
        _EXCHANGES, "between groups ring over 2 groups of 2 ranks:",
        f"imbalance 1.500 {_IMBALANCE}", f"imbalance by step 1.500 {_WAITS}",
        "steps with work 2 of 2; others are skipped", "K/V messages 1 per rank in the forward",
    )),
    "hybrid, gather": (StrategyConfig("hybrid", ulysses_size=2, outer="gather"), {}, (
        _EXCHANGES, "between groups gather over 2 groups of 2 ranks:",
        f"imbalance 1.500 {_IMBALANCE}", "fetches none, as no query of this rank sees keys of another",
        "launches 0 over gathered keys, 1 over own in place, in the forward",
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_those_of_the_strategy_that_runs(name: str) -> None:
    """On rank 1 of 4 whose shards are contiguous."""
    strategy, options, figures = FIGURES[name]
    q, k = (torch.empty(1, 256, n, 16, requires_grad=True) for n in (8, 4))
    record = CallOptions(strategy=strategy, causal=True, **options)
    text = explained(*check_call(Ranks(None, 1, 4), 0, "contiguous", q, k, k, record))
    lines = text.partition("\nseq_len=1024 cp_size=4 layout=contiguous ")[2].splitlines()[1:]
    assert tuple(" ".join(line.split()) for line in lines) == figures


EAGER = EagerKernel()


def found_by(capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    """Return what ``doctor --json`` prints, after checking its exit code."""
    assert main(["doctor", "--json"]) == code
    diagnosis: dict[str, Any] = json.loads(capsys.readouterr().out)
    return diagnosis


@ON_THE_HOST
def test_a_machine_without_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """People are told what the page shows."""
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
    copies = ["gather/symm_mem", "ulysses/symm_mem"]
    assert ways == dict.fromkeys(messages, True) | dict.fromkeys(copies, False)
    checks = [(check["name"], check["where"], check["result"]) for check in diagnosis["checks"]]
    tested = [("sdpa", "cpu"), ("eager", "cpu"), *((way, "2 cpu ranks") for way in messages)]
    assert checks == [(*kernel_and_pass, what) for kernel_and_pass in tested for what in RESULTS]
    assert all(0 < check["error"] <= check["limit"] < 1e-4 for check in diagnosis["checks"])
    assert main(["doctor"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for row in (["eager", "any", "available"], ["ring/p2p", "any", "available"]):
        assert row in rows
    assert ["gather/symm_mem", "cuda", "no:"] in [line[:3] for line in rows]
    assert rows[-1] == ["all", "is", "well"]
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    (shown,) = re.findall(r"<!-- of doctor .*? -->\n```text\n(.*?)```", page, re.DOTALL)
    assert [line for line in shown.splitlines() if line.split() not in rows] == []


@pytest.mark.parametrize("reaches", [True, False])
def test_two_gpus(
    reaches: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch reports GPUs that cannot compute: no kernel has yet shown that it runs on them."""
    for name, value in {
        "is_available": True, "device_count": 2, "get_device_name": "H200",
        "get_device_capability": (8, 0), "can_device_access_peer": reaches,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    accelerator = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: accelerator)
    for test in ("self_test", "ring_test"):
        monkeypatch.setattr(doctor, test, lambda *_, **__: iter(()))
    diagnosis = found_by(capsys, code=1)
    reached = ("1", "0") if reaches else ("no other",) * 2
    assert diagnosis["devices"] == [f"H200, compute capability 8.0, reaches {x}" for x in reached]
    assert [kernel["name"] for kernel in diagnosis["kernels"]][:2] == ["fa2", "fa4"]
    assert diagnosis["strategies"][0] == {
        "name": "ulysses/symm_mem", "where": "cuda", "available": reaches, "notes": [],
        "why": "" if reaches else "GPUs do not reach each other's memory: 0 and 1",
    }  # fmt: skip
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("something is wrong\n")


def test_what_fails_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Mock(side_effect=RuntimeError("no such instruction"))
    with replaced(EagerKernel, attend=broken):
        of_kernel = [*doctor.self_test(EAGER, "cpu")]
    of_ring = [*doctor.ring_test([("gather", "symm_mem")], cuda=False)]
    for checks, name, words in (
        (of_kernel, "eager", "no such instruction"),
        (of_ring, "gather/symm_mem", "UnsupportedError"),
    ):
        (check,) = checks
        assert (check.name, check.result, check.passed) == (name, "runs", False)
        assert check.error is None and words in check.trace
    monkeypatch.setattr(FlashKernel, "unavailable_reason", broken)
    why = "looking for it failed: RuntimeError('no such instruction')"
    assert doctor.kernel_report(FA4, "cuda").why == why
    assert "finds no such device" in doctor.kernel_report(FA4, "cpu").why  # not asked


@pytest.mark.parametrize("factor", [1.001, float("nan"), float("inf")])
def test_a_wrong_result_is_found(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = EagerKernel.attend

    def wrong(*args: Any) -> AttentionState:
        result = right(*args)
        result.out.mul_(factor)
        return result

    monkeypatch.setattr(doctor, "in_order", lambda _: (EAGER,))
    monkeypatch.setattr(doctor, "all_ways", lambda: ())
    with replaced(EagerKernel, attend=wrong):
        checks = {check.result: check for check in doctor.self_test(EAGER, "cpu")}
        assert main(["doctor"]) == 1
    assert not checks["out"].passed and checks["dv"].passed
    assert (checks["out"].error is None) == (factor != 1.001)


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
    monkeypatch.setattr(
        LocalRanks, "run", lambda *args: [[1.01 * x for x in y] for y in right(*args)]
    )
    assert main(["bench", *SMALL, "--ranks", "1"]) == 1
    text = capsys.readouterr().out
    assert "FAILED" in text and text.endswith("something is wrong\n")
    assert "efficiency" not in text


@ON_THE_HOST
@pytest.mark.parametrize("fault", ["", "raises", "rough"])
def test_rates_are_written_and_read(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that fails has no time: where it raises, or in the doctor's test before."""
    right: Any = ring_attention

    def wrong(*tensors: Any, kernel: str, **options: Any) -> Any:
        if kernel == "sdpa" and fault == "raises":
            raise RuntimeError("not today\nnor tomorrow")
        return right(*tensors, kernel=kernel, **options) * (1.001 if kernel == "sdpa" else 1)

    if fault:
        module = torch_rates if fault == "raises" else doctor
        monkeypatch.setattr(module, "ring_attention", wrong)
    # Two cases with few heads, in one round.
    monkeypatch.setattr(torch_rates.renew, "__defaults__", ((("causal", 16), ("window", 16)),))
    monkeypatch.setattr(torch_rates, "ROUNDS", 1)
    monkeypatch.setattr(torch_rates, "HEADS", (4, 2))
    path = tmp_path / "rates.json"
    path.write_text("of another run")
    assert main(["bench", "--rates", str(path), "--seq-len", "64"]) == 0
    said = capsys.readouterr()
    assert f"RING_RATES={path} uses it" in said.out
    assert ("no time of sdpa: not today\n" in said.err) is (fault == "raises")
    monkeypatch.setenv(RATES_VARIABLE, str(path))
    assert measured().device == "cpu"
    assert {case: {*names} for case, names in measured().orders.items()} == {
        ("causal", 16): {"eager"} if fault else {"sdpa", "eager"}, ("window", 16): {"eager"},
    }  # fmt: skip
    for row in json.loads(path.read_text())["rows"]:
        times = [*row["milliseconds"].values()]
        assert times == sorted(times) and times[0] > 0
    # From now on calls take the fastest: with a fault it is another one than without the file.
    x, (fastest, *_) = torch.zeros(1, 64, 4, 16), measured().orders["causal", 16]
    monkeypatch.setattr(prepare, "_prepare", LengthCaches(_prepare.__wrapped__))
    assert ContextParallel().explain(x, x, x, causal=True).startswith(f"kernel {fastest}\n")


@ON_THE_HOST
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_can_be_timed(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_rates, "HEADS", (4, 2))
    results: Any = torch_rates._call(option, 16, 64, "cpu")(kernel="eager")
    out, *grads = results
    assert out.shape == (1, 64, 4, 16) and len(grads) == 3
    assert all(x.isfinite().all() for x in (out, *grads))
