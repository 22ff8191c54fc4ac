"""The autotuner, on interpreted kernels, the benchmarks of JAX on GPUs, and XLA's flags.

Benchmarks time right results alone: what is wrong has no time.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import backends.triton_interpreter  # noqa: F401 - imported for its effect: it interprets the kernels
import pytest

from benchmarks.common.cases import JAX_ROWS, Rival, Setting
from benchmarks.common.harness import passing
from benchmarks.common.pages import table
from benchmarks.jax import options, scaling
from benchmarks.jax.scaling import exact, on_one
from ring_core.triton import tile_configs
from ring_core.triton.tile_configs import Row
from ring_jax_gpu import tune
from ring_jax_gpu.tune import main
from ring_jax_gpu.xla_flags import XLA_FLAGS

ROW = Row("fwd", 2, 64, per_score_inputs=False, q=128, k=128, warps=8, stages=3)


@pytest.fixture(autouse=True)
def _few_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_all(monkeypatch, tune, {"HEADS": 4, "KV_HEADS": 1})


def replace_all(patched: pytest.MonkeyPatch, module: Any, values: dict[str, Any]) -> None:
    """Replace attributes of a module."""
    for name, value in values.items():
        patched.setattr(module, name, value)


def test_sizes_first_then_stages() -> None:
    asked: list[Row] = []

    def seconds(row: Row) -> float:
        asked.append(row)
        if row.q * row.k > 64 * 64:
            return math.inf  # no room
        return abs(row.q - 64) + abs(row.k - 32) + 10 / row.warps + row.stages

    best = replace(ROW, q=64, k=32, stages=1)
    assert tune.tuned(ROW, seconds) == (best, math.inf)
    assert len(asked) == 18 + len(tune.STAGES) + 2
    assert asked[0] == ROW and asked[-2:] == [ROW, best]


@pytest.mark.parametrize(
    ("own", "others", "gain"),
    [
        ([1.0] * 9, 1.0, 1.0), ([1.0] * 9, math.inf, 1.0),
        # What is there was slow once, by chance or not: a winner has to win twice.
        ([3.0, 1.0], 1.0, 1.0), ([3.0, 0.5], 1.0, 1.0), ([3.0, 2.5], 1.0, 2.5),
    ],
)  # fmt: skip
def test_what_is_there_stays_where_nothing_is_faster(
    own: list[float], others: float, gain: float
) -> None:
    times = iter(own)
    best, faster = tune.tuned(ROW, lambda row: next(times) if row == ROW else others)
    assert (best == ROW, faster) == (gain == 1.0, gain)


KERNELS = [row for row in tile_configs.default_table() if row.itemsize == 2 and row.head_dim == 128]


@pytest.mark.nightly(unless=["fwd, 2 bytes, head dims up to 128, per-score inputs"])
@pytest.mark.parametrize("row", KERNELS, ids=tune.name_of)
def test_calls_of_each_kernel_use_their_row(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(tune, "_seconds", lambda *_: 1.0)
    seconds = tune.timer(tile_configs.default_table(), row, 48, 1, said.append)
    assert seconds(replace(row, q=16, k=32)) == 1.0
    assert seconds(replace(row, q=7)) == math.inf
    assert "16 x 32" in said[0] and "1000.000 ms" in said[0]


def test_wrong_results_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    call, said = tune._call, list[str]()

    def broken(known: Any, row: Row, tokens: int) -> Any:
        run = call(known, row, tokens)
        wrong = any(x.q == 16 for x in known)
        return (lambda: tuple(2 * x for x in run())) if wrong else run

    monkeypatch.setattr(tune, "_call", broken)
    seconds = tune.timer(tile_configs.default_table(), ROW, 48, 1, said.append)
    assert seconds(replace(ROW, q=32)) < math.inf
    assert seconds(replace(ROW, q=16)) == math.inf
    assert "wrong by 1 of the norm" in said[-1]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path, timer = tmp_path / "blocks.json", tune.timer
    values = {"SIZES": (16, 32), "WARPS": (4,), "STAGES": (2,), "_seconds": lambda *_: 2.0}
    replace_all(monkeypatch, tune, values | {"device": lambda: "a GPU"})
    arguments = ["tune", str(path), "--kernels", "fwd", "--tokens", "32", "--head-dims"]
    assert main([*arguments, "64", "--verbose"]) == 0
    assert tile_configs.read_table(str(path)) == tile_configs.default_table(), "nothing was faster"
    out = capsys.readouterr().out
    assert "fwd, 2 bytes, head dims up to 64, on a GPU" in out
    assert "16 x 32, 4 warps" in out and f"RING_TRITON_BLOCKS={path}" in out

    def timed(*args: Any) -> Any:
        seconds = timer(*args)
        return lambda row: seconds(row) * (1.0 if row.q == row.k == 16 else 1.5)

    monkeypatch.setattr(tune, "timer", timed)
    assert main([*arguments, "64"]) == 0
    assert "1.50 times as fast" in capsys.readouterr().out
    before = path.read_text()
    changed = [x for x in json.loads(before) if x["q"] == x["k"] == 16]
    assert [(x["kernel"], x["head_dim"]) for x in changed] == [("fwd", 64)]
    monkeypatch.setattr(tune, "timer", timer)
    assert main([*arguments, "128"]) == 0
    assert path.read_text() == before, "what was tuned before stays"


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("none/x.json", (), "No such file"), ("x.json", ("--head-dims", "96"), "no such rows"),
        ("mine.txt", (), "is no table of blocks"), ("x.json", ("--rounds", "0"), "at least 1, got 0"),
        ("x.json", (), "jax runs on cpu here"),
    ],
)  # fmt: skip
def test_refusals(
    path: str, options: tuple[str, ...], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: Any,
) -> None:  # fmt: skip
    if message != "jax runs on cpu here":
        monkeypatch.setattr(tune, "device", lambda: "a GPU")
    (tmp_path / "mine.txt").write_text("not a table")
    try:
        assert main(["tune", str(tmp_path / path), *options]) == 2
    except SystemExit as error:
        assert error.code == 2  # noqa: PT017 - of the parser of arguments
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()
    assert (tmp_path / "mine.txt").read_text() == "not a table"


@pytest.mark.nightly
def test_the_benchmark_of_rings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The benchmark runs on host devices with XLA's kernel; a second run keeps the first's rows."""

    def wrong(*args: Any) -> Any:
        method = scaling.all_gather(*args, implementation="xla")
        return method._replace(attend=lambda *x: method.attend(*x) * 2)

    ways = {
        "one": partial(scaling.one, kernel="xla"), "ring": partial(scaling.ours, kernel="xla"),
        "wrong": wrong, "gather": partial(scaling.ours, strategy="gather", kernel="xla"),
        "all-gather": partial(scaling.all_gather, implementation="xla"),
        "zigzag": partial(scaling.zigzag, implementation="xla"),
    }  # fmt: skip
    settings = [Setting(2048, 4, 2, dim=16, mask=mask) for mask in ("causal", "window")]
    values = {"METHODS": ways, "JAX_SETTINGS": settings, "GATE_LENGTH": 256}
    replace_all(monkeypatch, scaling, values)
    path = tmp_path / "figures.json"
    arguments = ["--json", str(path), "--gpus", "2", "--methods"]
    assert scaling.main([*arguments, "one", "ring"]) == 0
    assert scaling.main([*arguments, *ways]) == 0
    rows = json.loads(path.read_text())["rows"]
    # What is wrong or refused has its row at once, and all others when they are timed.
    assert [row["method"] for row in rows] == [
        *["one", "ring"] * 2, "wrong", "gather", "all-gather", "zigzag", "wrong", "zigzag",
        "gather", "all-gather",
    ]  # fmt: skip
    without = [n for n, row in enumerate(rows) if "forward" not in row]
    assert without == [4, 8, 9] and "causal masks" in rows[9]["failed"]
    assert {row["auto"] for row in rows if row["method"] == "ring"} == {"ring"}
    assert "`ring` (`auto`)" in table(rows)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a small benchmark of methods that are right, wrong, and refuse."""

    def right(q: Any, *x: Any, mask: Any) -> Any:
        return exact(*(y.astype("float32") for y in (q, *x)), mask=mask).astype(q.dtype)

    def forgets_the_scale(q: Any, *x: Any, mask: Any) -> Any:
        return right(2 * q, *x, mask=mask)

    def refuses(*_: Any, mask: Any) -> Any:
        raise ValueError(f"no such head dims\nfor {mask}")

    ring = partial(on_one, name="xla")
    ways = {"ring": ring, "triton": right, "cudnn": forgets_the_scale, "other": refuses}
    rivals = tuple(Rival(name, name) for name in ways if name != "ring")
    rows = tuple(
        replace(x, heads=4, kv_heads=2, dim=x.dim // 8, v_dim=x.v_dim // 8, rivals=rivals)
        for x in JAX_ROWS
    )
    values = {"METHODS": ways, "JAX_ROWS": rows, "WINDOW": 20, "GATE_LENGTH": 96}
    replace_all(monkeypatch, options, values)
    return options


def test_what_is_wrong_is_not_timed(small: Any) -> None:
    (row,) = (row for row in small.JAX_ROWS if row.name == "window")
    wrong = small.errors(row)
    assert wrong["other"] == "ValueError: no such head dims"
    assert passing(wrong) == ["ring", "triton"]
    assert passing({**wrong, "other": float("nan")}) == ["ring", "triton"]


@pytest.mark.nightly
def test_the_benchmark_of_options(small: Any, tmp_path: Path) -> None:
    path = tmp_path / "found" / "figures.json"
    rows = ["192/128, 32/8", "bias"]
    assert small.main(["--length=64", "--rounds=3", "--json", str(path), "--rows", *rows]) == 0
    report = json.loads(path.read_text())
    assert report["environment"]["length"] == 64
    assert [row["row"] for row in report["rows"]] == rows
    for row in report["rows"]:
        assert set(row["milliseconds"]["both"]) == {"ring", "triton"}
        assert set(row["ratio"]["forward"]) == {"triton"}
        assert row["kernel"] == "triton"


MODE, LIMIT = XLA_FLAGS
WRITTEN = " ".join(f"--{name}={value}" for name, value in XLA_FLAGS.items())
OF_USER = f"--xla_force_host_platform_device_count=2 --{LIMIT}=3"

#: XLA_FLAGS before a call, what it adds or the words of its error, and XLA_FLAGS after it.
FLAGS: list[tuple[str | None, Any, str]] = [
    (f" --{MODE}=private --{LIMIT}=2 ", {}, f" --{MODE}=private --{LIMIT}=2 "),
    ("flags.txt", "'flags.txt' names a file", "flags.txt"),
    (None, XLA_FLAGS, WRITTEN),
    (WRITTEN, {}, WRITTEN),
    (OF_USER, {MODE: "peer"}, f"{OF_USER} --{MODE}=peer"),
]
#: Makes the calls in turn, then starts JAX, and makes one more.
REPORT = """
import json, os, sys
import jax
import ring_jax_gpu
assert "XLA_FLAGS" not in os.environ, "importing sets none"

def called(flags):
    os.environ.pop("XLA_FLAGS", None)
    if flags is not None:
        os.environ["XLA_FLAGS"] = flags
    try:
        added = ring_jax_gpu.set_xla_flags()
    except ValueError as error:
        added = str(error)
    return added, os.environ.get("XLA_FLAGS")

results = [called(flags) for flags in json.loads(sys.argv[1])]
assert len(jax.devices()) == 2  # an unknown flag would end the process
print(json.dumps([*results, called(None)]))
"""


def test_flags() -> None:
    """A call returns what it adds to XLA_FLAGS, or raises an error that says why it cannot."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    before = json.dumps([flags for flags, *_ in FLAGS])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", REPORT, before], capture_output=True, text=True,
        env=environment | {"JAX_PLATFORMS": "cpu"}, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *results, (late, after) = json.loads(done.stdout.splitlines()[-1])
    for (_, expected, written), (added, in_environment) in zip(FLAGS, results, strict=True):
        assert expected in added if isinstance(expected, str) else added == expected
        assert in_environment == written
    assert "JAX has started" in late and WRITTEN in late and after is None
