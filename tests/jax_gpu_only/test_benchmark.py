"""The benchmark of JAX on GPUs: its ways in plain JAX are right, and it runs end to end."""

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

from benchmarks.common.cases import CAUSAL, Setting, windowed
from benchmarks.common.tables import table
from benchmarks.jax import methods, scaling
from benchmarks.jax.columns import both, exact, layered, random_arrays
from benchmarks.jax.methods import RIVALS, in_order, mesh_of, ours as over_gpus, sharding_of
from ring_core import Mask
from ring_jax_gpu import fmha

SHAPES = [(1, 128, heads, 16) for heads in (4, 2, 2, 4)]


@pytest.mark.nightly(unless=["xla-zigzag-4"])  # the next test runs the all-gather
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["all-gather", "zigzag"])
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
