"""What the benchmark reads from a trace, and which pairs it counts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.profiler import ProfileData

from benchmarks.common.cases import CAUSAL, DIM, FULL, HEADS, pairs_of, windowed
from benchmarks.jax import scaling
from benchmarks.jax.columns import COLUMNS, Column, cudnn, exact, layered, ours
from benchmarks.jax.methods import RIVALS, mesh_of, ours as over_gpus
from benchmarks.jax.profile import (
    Operation,
    operations_of,
    overlap,
    profiled,
    summary,
    total,
    united,
)

#: Two GPUs; times in picoseconds. On the first, attention from 10 to 50 ns and from 70 to 90, a
#: kernel of NCCL from 40 to 80, a cast from 95 to 100: 20 ns of transfer beside nothing, 5 idle.
#: On the second, a copy to the first one.
TRACE = """
planes { name: "/host:CPU"
  lines { name: "Stream of thoughts" events { metadata_id: 1 duration_ps: 900000 } }
  event_metadata { key: 1 value { id: 1 name: "ncclAllGather" } } }
planes { name: "/device:GPU:0"
  lines { id: 1 name: "Stream #17(Compute)" timestamp_ns: 10
    events { metadata_id: 1 offset_ps: 0 duration_ps: 40000 }
    events { metadata_id: 1 offset_ps: 60000 duration_ps: 20000 }
    events { metadata_id: 3 offset_ps: 85000 duration_ps: 5000 } }
  lines { id: 2 name: "Stream #19(Compute)" timestamp_ns: 40
    events { metadata_id: 2 offset_ps: 0 duration_ps: 40000 } }
  lines { id: 3 name: "XLA Modules" events { metadata_id: 3 duration_ps: 900000 } }
  event_metadata { key: 1 value { id: 1 name: "fwd_hopper" } }
  event_metadata { key: 2 value { id: 2 name: "ncclDevKernel_SendRecv" } }
  event_metadata { key: 3 value { id: 3 name: "wrapped_convert" } } }
planes { name: "/device:GPU:1"
  lines { id: 1 name: "Stream #17(MemcpyD2D)"
    events { metadata_id: 1 duration_ps: 8000 stats { metadata_id: 1 str_value: "kind_src:device dest:0" } }
    events { metadata_id: 1 offset_ps: 8000 duration_ps: 2000
      stats { metadata_id: 1 str_value: "kind_src:device dest:1" } } }
  event_metadata { key: 1 value { id: 1 name: "MemcpyD2D" } }
  stat_metadata { key: 1 value { id: 1 name: "memcpy_details" } } }
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, with little work."""
    sizes = {"HEADS": 4, "KV_HEADS": 2, "DIM": 16, "GATE_LENGTH": 128}
    for name, size in sizes.items():
        monkeypatch.setattr(scaling, name, size)
    monkeypatch.setitem(scaling.MASKS, "window", windowed(32))
    return scaling


def test_spans() -> None:
    spans = [(4.0, 6.0), (0.0, 1.0), (5.0, 9.0), (1.0, 2.0), (5.5, 5.75)]
    assert united(spans) == [(0, 2), (4, 9)]
    assert united([]) == []
    assert total(spans) == 7
    assert overlap(spans, [(1.5, 4.5), (8.0, 20.0)]) == 2
    assert overlap(spans, []) == 0


def test_shares_of_random_spans() -> None:
    """Against counting them one by one."""
    random = np.random.default_rng(0)
    for _ in range(50):
        begins, lengths = random.integers(0, 40, 12), random.integers(1, 9, 12)
        kinds = random.choice(["nccl", "fwd", "convert"], 12)
        runs: dict[Any, Any] = {kind: np.zeros(50, bool) for kind in ("nccl", "fwd", "convert")}
        for begin, length, kind in zip(begins, lengths, kinds, strict=True):
            runs[kind][begin : begin + length] = True
        operations = [
            Operation(str(kind), (float(begin), float(begin + length)), kind == "nccl")
            for begin, length, kind in zip(begins, lengths, kinds, strict=True)
        ]
        any_runs = runs["nccl"] | runs["fwd"] | runs["convert"]
        (busy_at,) = any_runs.nonzero()
        whole = busy_at[-1] - busy_at[0] + 1
        shares = summary(operations, calls=1)
        assert shares["us"] == pytest.approx(whole / 1e3)
        assert shares["attention"] == pytest.approx(runs["fwd"].sum() / whole)
        assert shares["transfer"] == pytest.approx(runs["nccl"].sum() / whole)
        assert shares["exposed"] == pytest.approx((runs["nccl"] & ~runs["fwd"]).sum() / whole)
        assert shares["idle"] == pytest.approx(1 - any_runs.sum() / whole, abs=1e-12)


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")  # of jaxlib's classes
def test_a_trace() -> None:
    packed = ProfileData.text_proto_to_serialized_xspace(TRACE)
    operations = operations_of(ProfileData.from_serialized_xspace(packed))
    assert set(operations) == {"0", "1"}
    first = summary(operations["0"], calls=2)
    assert first["us"] == pytest.approx(90 / 2e3)
    shares = [first[key] for key in ("attention", "transfer", "exposed", "idle")]
    assert shares == pytest.approx([60 / 90, 40 / 90, 20 / 90, 5 / 90])
    names = [(x["name"], x["us"], x["times"]) for x in first["operations"]]
    assert names[0] == ("fwd_hopper", pytest.approx(0.03), 1)
    assert names[1] == ("ncclDevKernel_SendRecv", pytest.approx(0.02), 0.5)
    assert summary(operations["1"], calls=1)["exposed"] == pytest.approx(0.8)  # to another GPU


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")
def test_a_trace_without_gpus() -> None:
    with pytest.raises(ValueError, match="nothing of GPUs"):
        profiled(lambda: jax.numpy.ones(3) + 1, calls=1)


def test_pairs() -> None:
    x = np.ones((1, 64, 1, 4), np.float32)
    v = np.eye(64, dtype=np.float32).reshape(1, 64, 1, 64)  # the output is the weights
    for mask, expected in (
        (FULL, 64 * 64),
        (windowed(16), pairs_of(windowed(16), 64)),
        (windowed(1), 64),
        (CAUSAL, 64 * 65 // 2),
    ):
        assert (np.asarray(exact(x, x, v, mask=mask)) > 0).sum() == expected
    flops = 4 * HEADS * DIM * 64 * 64 // 2  # as is usual, the diagonal counts half
    assert scaling.teraflops(CAUSAL, 64) == flops / 1e12


@pytest.mark.nightly(
    unless=[
        "xla-all-gather-2",
        "xla-two-stage-4",
        "xla-zigzag-2",
        "auto-two-stage-2",
        "auto-zigzag-4",
    ]
)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["all-gather", "two-stage", "zigzag"])
@pytest.mark.parametrize("implementation", ["xla", "auto"])
def test_ways_in_plain_jax(name: str, implementation: Any, size: int, small: Any) -> None:
    mesh = mesh_of(size)
    assert small.largest_error(mesh, RIVALS[name](mesh, implementation)) < 0.02


@pytest.mark.parametrize("name", ["ring", "all-gather", "zigzag"])
def test_layers(name: str, small: Any) -> None:
    """Each does all of its work, though all have the same keys."""
    make: Any = over_gpus if name == "ring" else RIVALS[name]
    attend = make(mesh_of(2), "xla")
    q, k, v, _ = (small._split(mesh_of(2), x) for x in small.inputs(128, seed=0))
    # For CPUs jaxlib 0.11 takes barriers away before it merges what is equal: here they stay.
    kept = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    lowered = [jax.jit(layered(attend, n)).lower(q, k, v) for n in (1, 3)]
    once, thrice = (x.compile(compiler_options=kept) for x in lowered)
    expected = once(once(once(q, k, v), k, v), k, v)
    np.testing.assert_array_equal(np.asarray(thrice(q, k, v)), np.asarray(expected))
    sent = [
        len(re.findall(r"(?:permute|gather)(?:-start)?\(", str(x.as_text())))
        for x in (once, thrice)
    ]
    assert sent[1] == 3 * sent[0] > 0


@pytest.mark.nightly
def test_the_whole_run(small: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On host devices, with kernels of XLA in place of cuDNN's and ours."""

    def plain(*qkv: Any, mask: Any) -> Any:
        return exact(*qkv, mask=mask).astype(qkv[0].dtype)

    def wrong(*qkv: Any, mask: Any) -> Any:
        return plain(*qkv, mask=mask) * 1.1

    def broken(*qkv: Any, mask: Any) -> Any:
        raise ValueError(f"no {scaling.name_of(mask)}\nfor {len(qkv)} arrays")

    columns = {"triton": Column(plain), "cudnn": Column(plain), "mosaic": Column(wrong)}
    monkeypatch.setattr(small, "COLUMNS", {**columns, "ejkernel": Column(broken)})
    ways = {"triton": (RIVALS["zigzag"], "xla")}
    ways |= {f"{name} {kernel}": (RIVALS[name], kernel)
             for name in RIVALS for kernel in ("xla", "cudnn")}  # fmt: skip
    monkeypatch.setattr(small, "METHODS", ways)
    path = tmp_path / "found" / "figures.json"
    arguments = [
        "--lengths",
        "128",
        "--window-lengths",
        "256",
        "--gpus",
        "2",
        "--split-lengths",
        "256",
    ]
    assert small.main([*arguments, "--layers", "2", "--profile", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert set(report["errors"]) == {"causal", "full", "window 32"}
    causal, full, window, alone, *split = report["rows"]
    for row in (causal, full, window):
        assert set(row["triton"]) == set(row["cudnn"]) == {"forward", "both"}
        assert "mosaic" not in row
    assert (full["causal"], window["window"], alone["alone"]) == (False, 32, True)
    names = ["triton", "all-gather xla", "two-stage xla", "zigzag xla"]
    assert [row["method"] for row in split] == names
    assert [row.get("layers") for row in (causal, alone, *split)] == [None, *[2] * 5]
    assert {"forward", "both", "efficiency forward", "efficiency both"} <= set(split[0])
    reasons = [row["reason"] for row in report["refused"]]
    assert reasons.count("ValueError: no causal") == 2
    assert sum("errors of ('out',)" in reason for reason in reasons) == 3
    assert sum("no trace" in reason for reason in reasons) == 5
    refused = {row["method"] for row in report["refused"] if row.get("gpus") == 2}
    assert {"all-gather cudnn", "two-stage cudnn", "zigzag cudnn"} <= refused
    assert {COLUMNS["triton"].attend, COLUMNS["cudnn"].attend} == {ours, cudnn}
