"""A rank that dies is restarted with the others, and training continues as if nothing happened."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = [
    "--cp=2", "--seq-len=128", "--steps=8", "--layers=1", "--dim=64", "--out=none", "--no-compare",
]  # fmt: skip

#: The demonstration, with rank 1 killed at a step of its first run.
PROGRAM = f"""
import faulthandler, os, signal, sys
faulthandler.enable()
sys.path.insert(0, {str(EXAMPLES)!r})
import train_bytes

drawn = train_bytes.sequence

def sequence(config, step):
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first_life and os.environ["RANK"] == "1" and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return drawn(config, step)

train_bytes.sequence = sequence
sys.exit(train_bytes.main())
"""


def losses(printed: str) -> list[str]:
    """Return the losses that the demonstration printed, as text."""
    rows = [line.split() for line in printed.splitlines()]
    return [row[1] for row in rows if len(row) == 2 and row[0].isdigit()]


@pytest.mark.nightly
def test_a_run_restarted_by_torchrun_has_the_losses_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)  # also for the ranks
    assert importlib.import_module("train_bytes").main(SMALL) == 0
    undisturbed = losses(capsys.readouterr().out)
    assert len(undisturbed) == 8
    program, kept = tmp_path / "killed.py", tmp_path / "kept"
    program.write_text(PROGRAM)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "--max-restarts=1", str(program), *SMALL, f"--checkpoint={kept}", "--save-every=2",
    ]  # fmt: skip
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "RING_CHECK": "1",
    }  # fmt: skip
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == undisturbed
    assert [file.name for file in kept.iterdir()] == ["2-float32.pt"]
