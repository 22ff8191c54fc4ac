"""The training demonstration: ring and single process agree, and it reports when they do not."""

from __future__ import annotations

import importlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from operator import ge
from pathlib import Path
from types import ModuleType

import pytest
from pages import Page

DEMO = Path(__file__).parents[2] / "examples" / "train_bytes.py"
SMALL = [
    "--device=cpu", "--cp=2", "--seq-len=256", "--steps=4", "--layers=1", "--dim=64", "--out=none",
]  # fmt: skip


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    """Return the example as a module that its ranks can import, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DEMO.parent)
        yield importlib.import_module("train_bytes")


def agrees(printed: str) -> None:
    """Check that the printed losses agree as closely as the text says."""
    assert "largest relative difference" in printed
    assert "In float64 ring and single process agree" in printed
    table = [line.split() for line in printed.splitlines()]
    losses = [row for row in table if len(row) == 4 and row[0].isdigit()]
    assert len(losses) == 4
    assert all(
        float(ring) == pytest.approx(float(single), rel=1e-5) for _, ring, single, _ in losses
    )


@pytest.mark.nightly
def test_demonstration_as_a_command() -> None:
    command = [sys.executable, str(DEMO), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    agrees(done.stdout)


def test_documents_of_a_window(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        demo.main([*SMALL, "--packed", "--window=20", "--layout=contiguous", "--strategy=balanced"])
        == 0
    )
    agrees(capsys.readouterr().out)


def test_wrong_losses_are_reported(demo: ModuleType) -> None:
    report = sys.modules[demo.report.__module__]
    config = report.Config(
        cp=2, layout="zigzag", strategy="auto", seq_len=256, window=None, packed=False, steps=60, dtype="float32",
        device="cpu", layers=1, dim=64, lr=1e-3, seed=0,
    )  # fmt: skip
    good = report.Run(
        losses=tuple(5.0 - n / 30 for n in range(60)), seconds=1.0, tokens=1, grown=0, peak=0
    )
    assert list(report.failures(config, good, good)) == []
    off = replace(good, losses=(good.losses[0] * (1 + 2e-5), *good.losses[1:]))
    assert "differ by" in next(report.failures(config, off, good))
    flat = replace(good, losses=(5.0,) * 60)
    assert "the loss fell by 0.000" in next(report.failures(config, flat, flat))


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--seq-len=257"], "pad to"), (["--window=-1"], "--window must be"), (["--dim=65"], "--dim")],
)
def test_wrong_arguments_get_one_line(
    demo: ModuleType, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.main([*SMALL, *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("demo")
def test_the_longest_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        importlib.import_module("long_context").main(
            ["--device=cpu", "--cp=2", "--first=64", "--most=256"]
        )
        == 0
    )
    last = capsys.readouterr().out.splitlines()[-1]  # of this process; ranks print their own lines
    assert last == "the longest: 256 tokens on 2 processes. 512: --most 256 was asked for."


def test_what_ends_the_search(demo: ModuleType) -> None:
    example = importlib.import_module("long_context")
    limits = example.Limits(memory=None, seconds=60.0, tokens=2**20)
    run = demo.Run(losses=(5.0,), seconds=1.0, tokens=1024, grown=0, peak=100)
    longer = replace(run, tokens=2048, peak=150)
    assert example.obstacle([run], 1.0, limits) is None  # one length estimates nothing
    assert example.obstacle([run, longer], 250.0, limits) is None
    assert "it needs" in example.obstacle([run, longer], 249.0, limits)
    assert "--seconds" in example.obstacle([replace(run, seconds=15.1)], 1.0, limits)
    assert "--most" in example.obstacle([replace(run, tokens=2**20)], 1.0, limits)


@pytest.mark.nightly
def test_the_lines_that_start_jobs_on_several_hosts() -> None:
    page = Page.read(DEMO.parents[1] / "docs" / "launching.md")
    (line,) = (line for line in page.commands if "--nnodes" in line)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    local = re.sub(r"--dtype .*", "--device cpu --first 64 --most 256", line)
    for old, new in (("host0", "127.0.0.1"), ("29500", str(port)), ("per-node 8", "per-node 1")):
        local = local.replace(old, new)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    started = [
        subprocess.Popen(
            [*launcher, *local.replace("node-rank 0", f"node-rank {n}").split()[1:]],
            cwd=DEMO.parents[1], env=environment, stdout=subprocess.PIPE, text=True,
        )
        for n in range(2)
    ]  # fmt: skip
    printed = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert "the longest: 256 tokens on 2 processes" in printed[0]
    assert printed[1] == ""


def test_the_script_for_slurm_is_bash() -> None:
    page = Page.read(DEMO.parents[1] / "docs" / "launching.md")
    scripts = [block.code for block in page.blocks if block.language == "bash"]
    assert len(scripts) == 2
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    (inner,) = re.findall(r"bash -c '(.*?)'", scripts[0], re.DOTALL)
    subprocess.run(["bash", "-n"], input=inner, text=True, check=True)


@pytest.mark.usefixtures("demo")
def test_packed_documents_train_alike_on_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    packed = importlib.import_module("train_packed")  # next to the demonstration
    losses = []
    options = ["--device=cpu", "--steps=3", "--layers=1", "--longest=700", "--out=none"]
    for cp in (2, 1):
        assert packed.main([*options, f"--cp={cp}"]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        steps = [[float(x.replace(",", "")) for x in line] for line in lines if line[0].isdigit()]
        losses.append([step[2] for step in steps])
        # Below them the means, and the step that the picture shows, the worst of zigzag's.
        worst = max(steps, key=lambda step: step[3])
        assert ["step", f"{worst[0]:.0f},", "which", "zigzag", "balances", "worst"] in lines
        waits, means, waits_there, there = (
            [float(x) for x in line[-2:]] for line in lines if line[0] in ("if", "in")
        )
        mean = [sum(step[n] for step in steps) / len(steps) for n in (3, 4)]
        assert means == pytest.approx(mean, abs=1e-3)
        assert there == worst[3:]
        assert all(map(ge, waits + waits_there, means + there))
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)  # three digits are printed
    assert losses[0][2] < losses[0][0]


@pytest.mark.refused_in("5.14")
@pytest.mark.usefixtures("demo")
def test_recurrent_layers_train_alike_on_one_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hybrid = importlib.import_module("train_hybrid")  # next to the demonstration
    options = ["--cp=2", "--steps=2", "--seq-len=255", "--longest=90", "--dim=32"]
    assert hybrid.main([*options, "--out=none"]) == 0
    printed = capsys.readouterr().out
    losses = [line.split() for line in printed.splitlines() if line.split()[0].isdigit()]
    assert len(losses) == 2
    for _, split, one in losses:
        assert float(split) == pytest.approx(float(one), rel=1e-5)
    share = re.search(r"([0-9.]+) of it", printed)
    assert share is not None
    assert float(share[1]) < 0.6
    assert "gated_delta_rule over 2 ranks, zigzag" in printed


@pytest.mark.usefixtures("demo")
def test_other_losses_of_recurrent_layers_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    hybrid = importlib.import_module("train_hybrid")
    good = hybrid.Run((5.0, 4.0), 100, "")
    assert hybrid.report(good, good, 2) == ""
    assert "losses differ by" in hybrid.report(hybrid.Run((5.0, 4.1), 100, ""), good, 2)
    with pytest.raises(SystemExit):
        hybrid.main(["--steps=0"])
    assert "--steps must be 1 or more" in capsys.readouterr().err
