"""Lines of ``explain`` fit a screen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ring_core import StrategyConfig
from ring_core.tripwire import CAPABILITIES, peak_tflops
from ring_torch import ContextParallel, kernels
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels import fa4
from ring_torch.kernels.api import Kernel
from ring_torch.kernels.flash_attn import FA2, FA3
from ring_torch.local import LocalRanks
from ring_torch.options import CallOptions
from ring_torch.prepare import check_call
from ring_torch.strategies import explained
from ring_torch.tools.cli import main
from ring_torch.transports import TRANSPORTS

WIDTH, HEIGHT = 80, 24


def test_explain_fits_a_screen() -> None:
    x = torch.zeros(1, 4096, 2, 64)
    lines = ContextParallel().explain(x, x, x, causal=True, window=(512, 0)).splitlines()
    assert sum(-(-len(line) // WIDTH) for line in lines) <= HEIGHT
    for word in ("kernel", "strategy", "transport", "layout=zigzag", "balance"):
        assert any(word in line for line in lines)


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
            assert text == ranks.run(_explained, queries, options)[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--cp 0 --seq-len 8 --heads 4", "--cp must be at least 1"),
        ("--cp 2 --seq-len 8 --heads 4 --kernel fa9", "unknown kernel 'fa9'"),
        ("--cp 2 --seq-len 8 --heads 4 --strategy hybrid", "no process group to ask. Instead: "),
        ("--cp 2 --seq-len 8 --heads 4 --device a100 --kernel fa4", "kernel 'fa4'"),
    ],
)
def test_what_cannot_be_explained(
    capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    assert main(["explain", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err


LONG = "--cp 4 --seq-len 64k --heads 32/8"


@pytest.mark.parametrize("size", [LONG, LONG.replace("4", "1", 1), f"{LONG} --strategy ulysses"])
def test_another_device_is_explained_as_on_a_machine_that_has_it(
    size: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is decided by the device is decided by the one that is asked about.

    That is the kernels that run on it and their order, transports and strategies.
    Earlier answers about other devices are not given again.
    """
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


def test_heads_are_a_pair(capsys: pytest.CaptureFixture[str]) -> None:
    for heads in ("8/3", "x", "8/4/2", "0", "-8"):
        with pytest.raises(SystemExit):
            main(["explain", "--cp", "2", "--seq-len", "8", f"--heads={heads}"])
        assert "is no H/K such as 32/8" in capsys.readouterr().err


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
