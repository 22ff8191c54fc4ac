"""The training demonstration: ring and single process agree, and it reports when they do not."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from operator import ge
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from pages import Page
from torch._C._distributed_c10d import TCPStore

from ring_torch.local import LocalRanks

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
def test_tokens_generated_over_processes_are_those_of_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    generate = importlib.import_module("generate")  # next to the demonstration
    assert generate.main(["--cp=2", "--tokens=700", "--new=4", "--chunk=256"]) == 0
    printed = capsys.readouterr().out
    kept = [float(x) for x in re.findall(r"keeps ([0-9.]+) MiB of keys", printed)]
    assert kept[0] < 0.8 * kept[1]
    assert "the tokens are the same" in printed
    run = generate.Run((1, 2), 1.0, 1, 1)
    options = generate.arguments([])
    assert generate.report(run, run, options) == ""
    assert generate.report(generate.Run((1, 3), 1.0, 1, 1), run, options) == "the tokens differ"
    for wrong in ("--cp=1", "--new=0", "--dim=12"):
        with pytest.raises(SystemExit):
            generate.main([wrong])


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
