"""Jobs of several processes over loopback: right, agreed, restored, and ended if one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pages import Page
from processes import free_address, run, started

from ring_jax.tripwire.agreement import disagreement

ROOT = Path(__file__).parents[2]
JOB = ROOT / "tests" / "processes_job.py"

FEW = ("agreement", "attend:explicit:ring")
REST = (
    "within", "attend:auto:ring:checked", "attend:auto:gather", "attend:auto:balanced",
    "attend:explicit:gather", "attend:explicit:balanced", "attend:auto:ulysses",
)  # fmt: skip


@pytest.mark.nightly(unless=["2-few"])
@pytest.mark.parametrize("checks", [FEW, REST], ids=["few", "rest"])
@pytest.mark.parametrize("count", [2, 4])
def test_processes_of_two_devices(count: int, checks: tuple[str, ...]) -> None:
    for printed in run(JOB, count, *checks):
        assert [line for line in printed.splitlines() if line.startswith("done")] == [
            f"done {name}" for name in checks
        ]


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 4])
def test_saved_and_restored_on_a_ring_of_another_size(count: int, tmp_path: Path) -> None:
    """An Orbax checkpoint restores on another ring size with the same loss in every process."""
    printed = run(JOB, count, f"checkpoint:{tmp_path}")
    assert len({line for text in printed for line in text.splitlines() if "loss" in line}) == 1


@pytest.mark.nightly
def test_the_line_of_the_page() -> None:
    """Two processes print what the page shows, and the same steps as one process."""
    page = Page.read(ROOT / "docs" / "launching.md")
    (line,) = (line for line in page.commands if "processes_jax.py" in line)
    (shown,) = (block.code for block in page.blocks if "2 processes, 4 devices" in block.code)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    one = [sys.executable, "examples/processes_jax.py", free_address(), "1", "0"]
    printed = [
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=240, cwd=ROOT,
            env=os.environ | {"PATH": path, "XLA_FLAGS": ""},
        ).stdout.splitlines()
        for command in (["bash", "-c", line], one)
    ]  # fmt: skip
    steps = [[text for text in lines if text.startswith("step")] for lines in printed]
    assert steps[0] == steps[1]
    assert [text for text in printed[0] if "Gloo" not in text] == shown.splitlines()


def test_a_long_difference_is_shown_where_it_begins() -> None:
    ends = [str(tuple(range(0, 4000, 8 + n))) for n in range(2)]
    text = disagreement([{"cu_seqlens": ends[n == 1], "mask": "causal"} for n in range(3)])
    assert text is not None and len(text) < 400
    assert "8, 16" in text and "9, 18" in text
    assert "in processes 0, 2; " in text and "mask" not in text
    one_bit = ["x" * 1000 + letter for letter in "ab"]
    assert (text := disagreement([{"layout": x} for x in one_bit])) is not None
    assert "xa in process 0" in text and "xb in process 1" in text
    assert disagreement([{"layout": "zigzag"}] * 3) is None


@pytest.mark.nightly(unless=["SIGKILL"])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_the_other_process_ends_in_time(how: str) -> None:
    """By an error or by JAX itself, if a process is killed or stopped."""
    with started(JOB, 2, f"lose:{how}") as (survivor, lost):
        until = time.monotonic() + 120
        while "lost" not in lost.text and time.monotonic() < until:
            assert lost.process.poll() in (None, -signal.SIGKILL), lost.text
            time.sleep(0.1)
        code = survivor.process.wait(timeout=90)
        text = survivor.text
    steps = [line for line in text.splitlines() if line.startswith("step ")]
    assert steps == ["step 0", "step 1"], text
    assert code != 0
