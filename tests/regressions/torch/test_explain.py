"""Lines of ``explain`` fit a screen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_torch import ContextParallel
from ring_torch.comm.ranks import Ranks
from ring_torch.local import LocalRanks
from ring_torch.tools.cli import main
from ring_torch.transports import TRANSPORTS

WIDTH, HEIGHT = 80, 24


def test_explain_fits_a_screen() -> None:
    x = torch.zeros(1, 4096, 2, 64)
    lines = ContextParallel().explain(x, x, x, causal=True, window=(512, 0)).splitlines()
    assert sum(-(-len(line) // WIDTH) for line in lines) <= HEIGHT
    for word in ("kernel", "strategy", "transport", "layout=zigzag", "balance"):
        assert any(word in line for line in lines)


def _explained(rank: int, queries: int, options: dict[str, Any]) -> str:
    del rank
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
        ("--cp 2 --seq-len 8 --heads 4 --cu-seqlens 0,x", "--cu-seqlens takes integers"),
    ],
)
def test_what_cannot_be_explained(
    capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    assert main(["explain", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err


def test_heads_are_a_pair(capsys: pytest.CaptureFixture[str]) -> None:
    for heads in ("8/3", "x", "8/4/2", "0", "-8"):
        with pytest.raises(SystemExit):
            main(["explain", "--cp", "2", "--seq-len", "8", f"--heads={heads}"])
        assert "is no H/K such as 32/8" in capsys.readouterr().err


def test_gpus_that_are_not_there_are_to_be_asked() -> None:
    absent = Ranks(None, 0, 4)
    by_name = {transport.name: transport for transport in TRANSPORTS}
    assert by_name["symm_mem"].refusals(absent, torch.device("cuda"), False) is None
