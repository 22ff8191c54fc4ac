"""The GPU benchmark reads traces right, counts pairs right and runs end to end."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from benchmarks.common.cases import CAUSAL, DIM, FULL, HEADS, Setting, pairs_of, windowed
from benchmarks.common.tables import table
from benchmarks.jax import methods, scaling, several
from benchmarks.jax.columns import COLUMNS, Column, both, cudnn, exact, layered, ours, random_arrays
from benchmarks.jax.methods import RIVALS, in_order, mesh_of, ours as over_gpus, sharding_of
from benchmarks.jax.profile import (
    Operation,
    operations_of,
    overlap,
    profiled,
    summary,
    total,
    united,
)
from ring_core import Mask
from ring_jax_gpu import fmha

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
    """Return the benchmark, with little work to do."""
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
    """Shares of busy time equal those counted tick by tick."""
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


SHAPES = [(1, 128, heads, 16) for heads in (4, 2, 2, 4)]


@pytest.mark.nightly(
    unless=[
        "xla-two-stage-4",
        "xla-zigzag-2",  # the next test runs the all-gather
    ]
)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["all-gather", "two-stage", "zigzag"])
@pytest.mark.parametrize("implementation", ["xla", "auto"])
def test_ways_in_plain_jax(name: str, implementation: Any, size: int) -> None:
    _check_way(name, CAUSAL, implementation, size)


@pytest.mark.parametrize("mask", [windowed(32), Mask(causal=True, cu_seqlens=(0, 40, 100, 128))])
def test_contiguous_shards_in_plain_jax(mask: Mask) -> None:
    """Contiguous shards with other masks are right; only with ``xla``, as ``auto`` calls cuDNN."""
    _check_way("all-gather", mask, "xla", 2)


def _check_way(name: str, mask: Mask, implementation: Any, size: int) -> None:
    """Compare the output and the gradients with attention in float32."""
    mesh, arrays = mesh_of(size), random_arrays(SHAPES, 2)
    method = RIVALS[name](mesh, mask, 128, implementation=implementation)
    order = in_order(method.layout, 128, size)
    placed = [jax.device_put(x[:, order], sharding_of(mesh)) for x in arrays]
    results = jax.jit(partial(both, method.attend))(*placed)
    *qkv, dout = arrays
    wide = [x.astype("float32") for x in qkv]
    expected = jax.jit(partial(both, partial(exact, mask=mask)))(*wide, dout)
    for x, y, tolerance in zip(results, expected, (0.02, 0.05, 0.05, 0.05), strict=True):
        error = np.abs(np.asarray(x, "float32") - np.asarray(y, "float32")[:, order])
        assert error.max() < tolerance


def test_gradients_of_cudnns_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lse gradient is right though cuDNN's backward takes none: it is folded into ``out``."""
    q, k, v, dout = (x.astype("float32") for x in random_arrays([(1, 16, 2, 8)] * 4, 0))

    def forward(pattern: Any, q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) * pattern.scale
        lse = jax.nn.logsumexp(scores, axis=-1)
        return jnp.einsum("bhij,bjhd->bihd", jnp.exp(scores - lse[..., None]), v), lse

    def backward(pattern: Any, q: Any, k: Any, v: Any, lse: Any, out: Any, dout: Any) -> Any:
        p = jnp.exp(jnp.einsum("bihd,bjhd->bhij", q, k) * pattern.scale - lse[..., None])
        dp = jnp.einsum("bihd,bjhd->bhij", dout, v)
        ds = p * (dp - (dout * out).sum(-1).swapaxes(1, 2)[..., None]) * pattern.scale
        pairs = (
            ("bhij,bjhd->bihd", ds, k),
            ("bhij,bihd->bjhd", ds, q),
            ("bhij,bihd->bjhd", p, dout),
        )
        return tuple(jnp.einsum(*x) for x in pairs)

    monkeypatch.setattr(fmha, "call_forward", forward)
    monkeypatch.setattr(fmha, "call_backward", backward)
    pattern = fmha.Pattern(0.3, causal=False, window=None)

    def loss(attend: Any, *qkv: Any) -> Any:
        out, lse = attend(pattern, *qkv)
        return (out * dout).sum() + jnp.sin(lse).sum()

    def plain(*args: Any) -> Any:
        out, lse = forward(*args)
        return out, lse.swapaxes(1, 2)

    actual, expected = (jax.grad(loss, (1, 2, 3))(x, q, k, v) for x in (methods._of_cudnn, plain))
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


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
        monkeypatch.setattr(several, name, value)
    path = tmp_path / "figures.json"
    arguments = ["--json", str(path), "--gpus", "2", "--threads", "2", "--methods"]
    assert several.main([*arguments, "one", "ring"]) == 0
    assert several.main([*arguments, *ways]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["method"] for row in rows] == ["one", "ring"] * 2 + ["wrong", "gather"] * 2
    assert ["forward" in row for row in rows] == [True] * 4 + [False, True] * 2
    assert {row["auto"] for row in rows if row["method"] == "ring"} == {"ring"}
    assert "`ring` (`auto`)" in table(rows)
    path = tmp_path / "programs.json"
    program = ["--json", str(path), "--gpus", "2", "--program", "1", "2", "--methods", "ring"]
    assert several.main([*program, "--settings", settings[0].name]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert rows[1]["megabytes"]["StableHLO"] > rows[0]["megabytes"]["StableHLO"] > 0
    assert table(rows).count("`ring`") == 2


@pytest.mark.nightly
def test_the_whole_run(small: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The benchmark runs on host devices, with plain attention in place of GPU kernels."""

    def plain(*qkv: Any, mask: Any) -> Any:
        return exact(*qkv, mask=mask).astype(qkv[0].dtype)

    def wrong(*qkv: Any, mask: Any) -> Any:
        return plain(*qkv, mask=mask) * 1.1

    def broken(*qkv: Any, mask: Any) -> Any:
        raise ValueError(f"no {scaling.name_of(mask)}\nfor {len(qkv)} arrays")

    columns = {"triton": Column(plain), "cudnn": Column(plain), "mosaic": Column(wrong)}
    monkeypatch.setattr(small, "COLUMNS", {**columns, "ejkernel": Column(broken)})
    path = tmp_path / "found" / "figures.json"
    arguments = ["--lengths", "128", "--window-lengths", "256", "--json", str(path)]
    assert small.main(arguments) == 0
    report = json.loads(path.read_text())
    assert set(report["errors"]) == {"causal", "full", "window 32"}
    causal, full, window = report["rows"]
    for row in (causal, full, window):
        assert set(row["triton"]) == set(row["cudnn"]) == {"forward", "both"}
        assert "mosaic" not in row
    assert (full["causal"], window["window"]) == (False, 32)
    reasons = [row["reason"] for row in report["refused"]]
    assert reasons.count("ValueError: no causal") == 2
    assert sum("errors of ('out',)" in reason for reason in reasons) == 3
    assert {COLUMNS["triton"].attend, COLUMNS["cudnn"].attend} == {ours, cudnn}
