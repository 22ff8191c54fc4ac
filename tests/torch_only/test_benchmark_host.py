"""What benchmarks of the host's time compare with, and say of the machine."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks.torch import host_time


def test_no_other_kernel_takes_the_place_of_flash_attn_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        host_time.main(["--gpus", "2"])
    assert "'by hand' is flash-attn-4's own function" in (said := capsys.readouterr().err)
    assert said.rstrip().endswith("name another one by --by-hand sdpa")
    q, k, v = (torch.randn(1, 8, heads, 4) for heads in (4, 2, 2))
    assert host_time.BY_HAND["sdpa"]()(q, k, v).shape == q.shape


def test_a_file_says_what_ran_and_on_which_processors() -> None:
    environment = host_time.described(4, 0)
    assert {"flash-attn-4", "torch", "triton", "cuda", "cpu", "gpus", "gpu"} <= {*environment}
    assert environment["cpu"].endswith("of them") and environment["processors"] == "not bound"
