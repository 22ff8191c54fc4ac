"""The fine-tuning example, a Trainer on a ring, agrees with itself on one process."""

from __future__ import annotations

import argparse
import importlib
import io
import json
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
    "--device=cpu", "--steps=3", "--seq-len=301", "--layers=1", "--layout=contiguous", "--strategy=balanced",
]  # fmt: skip


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """Return the example as a module that ranks can import, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "examples")
        yield importlib.import_module("finetune_hf")


def started(rank: int, ranks: int, port: int, more: list[str]) -> tuple[int, str]:
    """Run the example as one of ``torchrun``'s processes; return its exit code and output."""
    dist.destroy_process_group()  # the Trainer creates its own
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "RING_CHECK": "1",
        }  # fmt: skip
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = importlib.import_module("finetune_hf").main([*OPTIONS, *more])
    return code, printed.getvalue()


@pytest.mark.usefixtures("example")
def test_ring_and_one_process_agree(tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    with LocalRanks(1) as one_rank:
        assert one_rank.run(started, 1, 0, [f"--write={file}"])[0][0] == 0
    losses = json.loads(file.read_text())
    assert len(losses) == 3 and losses[-1] < losses[0]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with LocalRanks(2) as ranks:
        (code, printed), other = ranks.run(started, 2, store.port, [f"--compare={file}"])
    assert (code, other[0]) == (0, 0) and "largest relative difference" in printed


def test_wrong_losses_are_reported(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(dtype="float32")
    assert example.compare(options, [5.0, 4.0], [5.0, 4.00001]) == 0
    for wrong in (4.001, math.nan):
        assert example.compare(options, [5.0, wrong, 3.0], [5.0, 4.0, 3.0]) == 1
        assert "more than" in capsys.readouterr().err
    assert example.compare(options, [5.0], [5.0, 4.0]) == 1
