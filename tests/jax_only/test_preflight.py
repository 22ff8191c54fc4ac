"""``preflight`` passes right steps, and names what is wrong in others."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
from jax_meshes import mesh_of

from ring_core import UnsupportedError
from ring_jax import ContextParallel, preflight

T, H, D, WORDS = 16, 2, 8, 11
TOKENS = np.random.default_rng(0).integers(0, WORDS, (2, T))
BATCH = {"tokens": TOKENS, "labels": np.roll(TOKENS, -1, 1)}
PARAMS = {
    name: jax.random.normal(jax.random.key(n), shape)
    for n, (name, shape) in enumerate(
        {"words": (WORDS, H * D), "places": (T, H * D), "head": (H * D, WORDS)}.items()
    )
}


def step(cp: Any, params: Any, batch: Any, fault: str = "") -> Any:
    """Return the loss of a model of one layer, with one of the faults."""
    labels, positions = cp.shard(batch["labels"]), cp.positions(T)
    if fault == "labels":
        labels = jnp.asarray(batch["labels"])
    elif fault == "positions":
        positions = jnp.arange(T)
    elif fault == "shift":
        labels = jnp.roll(cp.shard(batch["tokens"]), -1, 1)
    words = jax.nn.one_hot(cp.shard(batch["tokens"]), WORDS) @ params["words"]
    x = words + jax.nn.one_hot(positions, T)[None] @ params["places"]
    if fault == "edges":
        tokens = P(None, cp.axis_name)
        roll = partial(jnp.roll, shift=1, axis=1)
        x = x + jax.shard_map(roll, mesh=cp.mesh, in_specs=tokens, out_specs=tokens)(x)
    elif fault == "noise":
        x = x * jnp.where(params["head"][0, 0] == PARAMS["head"][0, 0], 1.0, 2.0)
    heads = x.reshape(*x.shape[:2], H, D)
    logits = cp.attention(heads, heads, heads, causal=True).reshape(x.shape) @ params["head"]
    losses = -(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, WORDS)).sum(-1)
    return losses if fault == "vector" else losses.mean()


NATURAL = "in the layout 'contiguous' it is right, so something is in natural order"
EDGES = "may not see the next device's tokens"
FOUND: dict[str, tuple[str, str]] = {
    "labels": ("zigzag", NATURAL),
    "positions": ("striped", NATURAL),
    "shift": ("zigzag", NATURAL),
    "edges": ("contiguous", EDGES),
}


@pytest.mark.nightly(unless=["auto-zigzag"])
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_right_steps_pass(kind: str, layout: Any) -> None:
    mesh = mesh_of(AxisType.Auto if kind == "auto" else AxisType.Explicit, dp=2, cp=2)
    report = preflight(
        ContextParallel(mesh, "cp", "dp", layout=layout), step, params=PARAMS, batch=BATCH
    )
    assert report.passed, str(report)
    assert [*report.gradients] == ["['head']", "['places']", "['words']"]
    assert "preflight passed: loss" in str(report)


@pytest.mark.nightly(unless=["edges", "positions"])
@pytest.mark.parametrize("fault", FOUND)
def test_wrong_steps_are_named(fault: str) -> None:
    layout, words = FOUND[fault]
    cp = ContextParallel(mesh_of(cp=4), "cp", layout=layout)  # type: ignore[arg-type]
    report = preflight(cp, partial(step, fault=fault), params=PARAMS, batch=BATCH)
    assert not report.passed
    assert "3 of 3 gradients differ, first that of params['head']" in report.findings[0]
    assert words in report.findings[1]
    assert str(report) == "preflight failed: " + ". ".join(report.findings)
    if fault == "labels":
        assert preflight(
            cp, partial(step, fault=fault), params=PARAMS, batch=BATCH, rtol=1e3
        ).passed


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "vector": (
        {"step": partial(step, fault="vector")},
        "a floating-point scalar, got float32 [2, 16]",
    ),
    "noise": (
        {"step": partial(step, fault="noise")},
        "a unit in the last place turn them into others",
    ),
    "devices": (
        {"cp": ContextParallel(AbstractMesh((2,), ("cp",)), "cp")},  # type: ignore[arg-type]
        "devices of other processes, or none. Instead:",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    wrong, words = REFUSED[name]
    cp = ContextParallel(mesh_of(cp=2), "cp")
    arguments: dict[str, Any] = {"cp": cp, "step": step, "params": PARAMS, "batch": BATCH}
    kind = UnsupportedError if name == "devices" else ValueError
    with pytest.raises(kind, match=re.escape(words)):
        preflight(**arguments | wrong)
