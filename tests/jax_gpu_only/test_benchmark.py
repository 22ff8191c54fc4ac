"""The benchmark of JAX on GPUs: layers do all of their work, and it runs end to end."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.common.cases import CAUSAL, Setting
from benchmarks.common.tables import table
from benchmarks.jax import methods, scaling
from benchmarks.jax.columns import both, layered, random_arrays
from benchmarks.jax.methods import RIVALS, mesh_of, ours as over_gpus, sharding_of

SHAPES = [(1, 128, heads, 16) for heads in (4, 2, 2, 4)]


def test_gathered_keys_are_kept_or_gathered_again() -> None:
    mesh = mesh_of(2)
    arrays = [jax.device_put(x, sharding_of(mesh)) for x in random_arrays(SHAPES, 0)]
    counts = [
        str(jax.jit(lambda *x, run=way: both(run, *x)).lower(*arrays).as_text()).count('all_gather"(')
        for way in (
            over_gpus(mesh, CAUSAL, 128, strategy="gather", saved_bytes=n, kernel="xla").attend
            for n in (1 << 40, 0)
        )
    ]  # fmt: skip
    assert counts == [1, 2]


@pytest.mark.nightly(only=["zigzag"])
@pytest.mark.parametrize("name", ["ring", "all-gather", "zigzag"])
def test_layers(name: str) -> None:
    """Layers with equal keys are not merged: each does all of its work."""
    mesh = mesh_of(2)
    method = (
        over_gpus(mesh, CAUSAL, 128, kernel="xla") if name == "ring"
        else RIVALS[name](mesh, CAUSAL, 128, implementation="xla")
    )  # fmt: skip
    q, k, v, _ = (jax.device_put(x, sharding_of(mesh)) for x in random_arrays(SHAPES, 0))
    # On CPUs jaxlib 0.11 removes barriers before it merges equal operations: keep the barriers.
    kept = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    lowered = [jax.jit(layered(method.attend, n)).lower(q, k, v) for n in (1, 3)]
    once, thrice = (x.compile(compiler_options=kept) for x in lowered)
    expected = once(once(once(q, k, v), k, v), k, v)
    np.testing.assert_array_equal(np.asarray(thrice(q, k, v)), np.asarray(expected))
    sent = [
        len(re.findall(r"(?:permute|gather)(?:-start)?\(", str(x.as_text())))
        for x in (once, thrice)
    ]
    assert sent[1] == 3 * sent[0] > 0


@pytest.mark.nightly
def test_the_whole_run_over_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The benchmark runs on host devices with XLA's kernel; a second run keeps the first's rows."""

    def wrong(*args: Any) -> Any:
        method = methods.all_gather(*args, implementation="xla")
        return replace(method, attend=lambda *x: method.attend(*x) * 2)

    ways = {
        "one": partial(methods.one, kernel="xla"), "ring": partial(over_gpus, kernel="xla"),
        "wrong": wrong, "gather": partial(over_gpus, strategy="gather", kernel="xla"),
    }  # fmt: skip
    settings = [Setting(2048, 4, 2, dim=16, mask=mask) for mask in ("causal", "window")]
    for name, value in (("METHODS", ways), ("JAX_SETTINGS", settings), ("GATE_LENGTH", 256)):
        monkeypatch.setattr(scaling, name, value)
    path = tmp_path / "figures.json"
    arguments = ["--json", str(path), "--gpus", "2", "--threads", "2", "--methods"]
    assert scaling.main([*arguments, "one", "ring"]) == 0
    assert scaling.main([*arguments, *ways]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["method"] for row in rows] == ["one", "ring"] * 2 + ["wrong", "gather"] * 2
    assert ["forward" in row for row in rows] == [True] * 4 + [False, True] * 2
    assert {row["auto"] for row in rows if row["method"] == "ring"} == {"ring"}
    assert "`ring` (`auto`)" in table(rows)
    path = tmp_path / "programs.json"
    program = ["--json", str(path), "--gpus", "2", "--program", "1", "2", "--methods", "ring"]
    assert scaling.main([*program, "--settings", settings[0].name]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert rows[1]["megabytes"]["StableHLO"] > rows[0]["megabytes"]["StableHLO"] > 0
    assert table(rows).count("`ring`") == 2
