"""The example that trains a model of transformers on a ring agrees with the whole model."""

from __future__ import annotations

import argparse
import importlib
import io
import math
import os
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ring_torch.local import LocalRanks

OPTIONS = [
    "--compare",
    "--steps=4",
    "--seq-len=301",
    "--layers=1",
    "--layout=contiguous",
    "--strategy=balanced",
]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The example as a module, which ranks find too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "examples")
        yield importlib.import_module("finetune_transformers")


def started(rank: int, ranks: int, port: int) -> tuple[int, str]:
    """The example as one of the processes ``torchrun`` starts: its exit code, what it prints."""
    dist.destroy_process_group()  # the example makes its own
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = importlib.import_module("finetune_transformers").main(OPTIONS)
    return code, printed.getvalue()


@pytest.mark.usefixtures("example")
def test_ring_and_whole_model_agree() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with LocalRanks(2) as ranks:
        (code, printed), other = ranks.run(started, 2, store.port)
    assert (code, *other) == (0, 0, "")
    losses = [line.split() for line in printed.splitlines() if line[:4].strip().isdigit()]
    assert len(losses) == 4
    assert all(float(ring) == pytest.approx(float(whole), rel=1e-5) for _, ring, whole in losses)
    assert float(losses[-1][1]) < float(losses[0][1])


def test_wrong_losses_are_reported(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(dtype="float32")
    assert example.report(options, 2, [5.0, 4.0], [5.0, 4.00001]) == 0
    for wrong in (4.001, math.nan):
        assert example.report(options, 2, [5.0, wrong, 3.0], [5.0, 4.0, 3.0]) == 1
        assert "more than" in capsys.readouterr().err
