"""Examples: ring and single process agree, and it is reported when they do not.

A rank that dies is restarted with the others, and training continues as if nothing happened.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from operator import ge
from pathlib import Path

import pytest
from on_ranks import be_started
from pages import Page
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from ring_torch.local import LocalRanks

ROOT = Path(__file__).parents[2]
SMALL = [
    "--device=cpu", "--cp=2", "--seq-len=256", "--steps=4", "--layers=1", "--dim=64", "--out=none",
]  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LOOPBACK = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module", autouse=True)
def examples() -> Iterator[None]:
    """Let examples be imported, by their ranks, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        yield


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run an example that succeeds, and return what it prints."""

    def run(name: str, *options: str) -> str:
        assert importlib.import_module(name).main([*options]) == 0
        return capsys.readouterr().out

    return run


def table_of(printed: str) -> list[list[float]]:
    """Return the numbers of lines that have nothing else, of which the first is that of a step."""
    lines = re.findall(r"^ *\d+(?: +[-+.,e\d]+)+ *$", printed, re.MULTILINE)
    return [[float(x.replace(",", "")) for x in line.split()] for line in lines]


def test_documents_of_a_window(run: Callable[..., str]) -> None:
    options = ("--packed", "--window=20", "--layout=contiguous", "--strategy=balanced")
    printed = run("train_bytes", *SMALL, *options)
    assert "largest relative difference" in printed
    assert "In float64 ring and single process agree" in printed
    losses = [row[1:3] for row in table_of(printed)]
    assert len(losses) == 4
    assert all(ring == pytest.approx(one, rel=1e-5) for ring, one in losses)


#: The demonstration, with rank 1 killed at a step of its first run.
KILLED = f"""
import faulthandler, os, signal, sys
faulthandler.enable()
sys.path.insert(0, {str(ROOT / "examples")!r})
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


@pytest.mark.nightly
def test_a_run_restarted_by_torchrun_has_the_losses_of_an_undisturbed_one(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    options = [*SMALL, "--seq-len=128", "--steps=8", "--no-compare"]
    undisturbed = table_of(run("train_bytes", *options))
    assert len(undisturbed) == 8
    program, kept = tmp_path / "killed.py", tmp_path / "kept"
    program.write_text(KILLED)
    done = subprocess.run(
        [
            *TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1", str(program),
            *options, f"--checkpoint={kept}", "--save-every=2",
        ],
        env=LOOPBACK | {"RING_CHECK": "1"}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert table_of(done.stdout) == undisturbed
    assert [file.name for file in kept.iterdir()] == ["2-float32.pt"]


def test_wrong_losses_are_reported() -> None:
    report = sys.modules[importlib.import_module("train_bytes").report.__module__]
    config = report.Config(
        cp=2, layout="zigzag", strategy="auto", seq_len=256, window=None, packed=False, steps=60, dtype="float32",
        device="cpu", layers=1, dim=64, lr=1e-3, seed=0,
    )  # fmt: skip
    falling = tuple(5.0 - n / 30 for n in range(60))
    good = report.Run(losses=falling, seconds=1.0, tokens=1, grown=0, peak=0)
    assert list(report.failures(config, good, good)) == []
    off = replace(good, losses=(falling[0] * (1 + 2e-5), *falling[1:]))
    assert "differ by" in next(report.failures(config, off, good))
    flat = replace(good, losses=(5.0,) * 60)
    assert "the loss fell by 0.000" in next(report.failures(config, flat, flat))


def test_wrong_arguments_get_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for name, option, message in (
        ("train_bytes", "--seq-len=257", "pad to"),
        ("train_bytes", "--window=-1", "--window must be"),
        ("train_bytes", "--dim=65", "--dim"),
        ("generate", "--cp=1", ""),
        ("generate", "--new=0", ""),
        ("generate", "--dim=12", ""),
    ):
        with pytest.raises(SystemExit, match="2"):
            importlib.import_module(name).main([*SMALL, option] if "bytes" in name else [option])
        assert message in capsys.readouterr().err


def test_the_longest_sequence(run: Callable[..., str]) -> None:
    printed = run("long_context", "--device=cpu", "--cp=2", "--first=64", "--most=256")
    last = printed.splitlines()[-1]  # of this process; ranks print their own lines
    assert last == "the longest: 256 tokens on 2 processes. 512: --most 256 was asked for."


@pytest.mark.nightly
def test_the_lines_that_start_jobs_on_several_hosts() -> None:
    page = Page.read(ROOT / "docs" / "launching.md")
    (line,) = (line for line in page.commands if "--nnodes" in line)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    local = re.sub(r"--dtype .*", "--device cpu --first 64 --most 256", line)
    for old, new in (("host0", "127.0.0.1"), ("29500", str(port)), ("per-node 8", "per-node 1")):
        local = local.replace(old, new)
    started = [
        subprocess.Popen(
            [*TORCHRUN, *local.replace("node-rank 0", f"node-rank {n}").split()[1:]],
            cwd=ROOT, env=LOOPBACK, stdout=subprocess.PIPE, text=True,
        )
        for n in range(2)
    ]  # fmt: skip
    printed = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert "the longest: 256 tokens on 2 processes" in printed[0]
    assert printed[1] == ""


def test_the_script_for_slurm_is_bash() -> None:
    page = Page.read(ROOT / "docs" / "launching.md")
    scripts = [block.code for block in page.blocks if block.language == "bash"]
    assert len(scripts) == 2
    (inner,) = re.findall(r"bash -c '(.*?)'", scripts[0], re.DOTALL)
    for script in (*scripts, inner):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_packed_documents_train_alike_on_one_process(run: Callable[..., str]) -> None:
    losses = []
    options = ["--device=cpu", "--steps=3", "--layers=1", "--longest=700", "--out=none"]
    for cp in (2, 1):
        printed = run("train_packed", *options, f"--cp={cp}")
        steps, lines = table_of(printed), [line.split() for line in printed.splitlines()]
        losses.append([step[2] for step in steps])
        # Below them the means, and the step that the picture shows, the worst of zigzag's.
        worst = max(steps, key=lambda step: step[3])
        assert ["step", f"{worst[0]:.0f},", "which", "zigzag", "balances", "worst"] in lines
        waits, means, waits_there, there = (
            [float(x) for x in line[-2:]] for line in lines if line[0] in ("if", "in")
        )
        assert means == pytest.approx([sum(x) / len(steps) for x in zip(*steps)][3:], abs=1e-3)  # noqa: B905 - of equal lengths
        assert there == worst[3:]
        assert all(map(ge, waits + waits_there, means + there))
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)  # three digits are printed
    assert losses[0][2] < losses[0][0]


@pytest.mark.refused_in("5.14")
def test_recurrent_layers_train_alike_on_one_process(run: Callable[..., str]) -> None:
    sizes = ("--cp=2", "--steps=2", "--seq-len=255", "--longest=90", "--dim=32", "--out=none")
    printed = run("train_hybrid", *sizes)
    losses = table_of(printed)
    assert len(losses) == 2
    for _, split, one in losses:
        assert split == pytest.approx(one, rel=1e-5)
    (share,) = re.findall(r"([0-9.]+) of it", printed)
    assert float(share) < 0.6
    assert "gated_delta_rule over 2 ranks, zigzag" in printed


def test_tokens_generated_over_processes_are_those_of_one(run: Callable[..., str]) -> None:
    printed = run("generate", "--cp=2", "--tokens=700", "--new=4", "--chunk=256")
    kept = [float(x) for x in re.findall(r"keeps ([0-9.]+) MiB of keys", printed)]
    assert kept[0] < 0.8 * kept[1]
    assert "the tokens are the same" in printed
    generate = importlib.import_module("generate")
    one, other = (generate.Run(tokens, 1.0, 1, 1) for tokens in ((1, 2), (1, 3)))
    assert generate.report(one, one, generate.arguments([])) == ""
    assert generate.report(other, one, generate.arguments([])) == "the tokens differ"


OPTIONS = [
    "--device=cpu", "--steps=3", "--seq-len=301", "--layers=1", "--layout=contiguous", "--strategy=balanced",
]  # fmt: skip


def started(rank: int, ranks: int, port: int, more: list[str]) -> tuple[int, str]:
    """Run the example as one of ``torchrun``'s processes; return its exit code and output."""
    if ranks > 1:
        be_started(rank, ranks, port)
    else:
        dist.destroy_process_group()
    os.environ["RING_CHECK"] = "1"
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = importlib.import_module("finetune_hf").main([*OPTIONS, *more])
    return code, printed.getvalue()


def test_ring_and_one_process_agree(tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with LocalRanks(1) as one_rank:
        assert one_rank.run(started, 1, store.port, [f"--write={file}"])[0][0] == 0
    losses = json.loads(file.read_text())
    assert len(losses) == 3 and losses[-1] < losses[0]
    with LocalRanks(2) as ranks:
        (code, printed), other = ranks.run(started, 2, store.port, [f"--compare={file}"])
    assert (code, other[0]) == (0, 0) and "largest relative difference" in printed
