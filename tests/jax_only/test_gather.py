"""Strategy ``gather`` is right in every case of the table, or raises UnsupportedError."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Case
from jax.sharding import AxisType, PartitionSpec
from mutants import JAX_GATHERED_MUTANTS
from tolerances import assert_close

import ring_jax
from ring_core import Mask, Request, UnsupportedError
from ring_jax.strategies import named_strategy

REQUEST = Request("cpu", "float32", 8, 8)


def _can_gather(case: Case) -> bool:
    try:
        named_strategy("gather", case.program, REQUEST)
    except UnsupportedError:
        return False
    return True


SPLIT = [case for case in CASES.values() if case.cp_size > 1 and case.strategy == "ring"]
GATHERED = [case for case in SPLIT if _can_gather(case)]
REFUSED = [case for case in SPLIT if case not in GATHERED]


@pytest.mark.nightly(
    unless=["window-both-zigzag-cp3", "keys80-causal-zigzag", "shown-sinks-striped"]
)
@pytest.mark.parametrize("case", GATHERED, ids=[case.name for case in GATHERED])
def test_case(case: Case, backend: Any, request: pytest.FixtureRequest) -> None:
    mutant = request.config.getoption("--mutant")
    assert_close(case, backend.run(case, mutant=mutant, strategy="gather"))


def test_what_is_refused() -> None:
    """Only predicates and documents out of natural order are refused."""
    for case in REFUSED:
        with pytest.raises(UnsupportedError) as error:
            named_strategy("gather", case.program, REQUEST)
        text = str(error.value)
        assert "Instead: use strategy='ring' or 'auto'" in text
        reasons = {
            "predicate": case.mask.predicate is not None,
            "natural order": case.layout != "contiguous"
            and (case.mask.cu_seqlens is not None or case.mask.chunk_size is not None),
        }
        said = {reason for reason in reasons if reason in text}
        assert said and said <= {reason for reason, holds in reasons.items() if holds}
    assert {case.layout for case in GATHERED} >= {"contiguous", "zigzag", "striped"}
    assert any(case.mask.cu_seqlens for case in GATHERED)


@pytest.mark.nightly(only=["window-off-by-one"])
@pytest.mark.parametrize("mutant", [*JAX_GATHERED_MUTANTS, "window-off-by-one"])
def test_suite_goes_red(mutant: str, backend: Any) -> None:
    case = CASES["window-both-zigzag-cp3"]
    results = backend.run(case, mutant=mutant, strategy="gather")
    with pytest.raises(AssertionError):
        assert_close(case, results)


def _ring(layout: Any, strategy: str, size: int = 4, **options: Any) -> Any:
    mesh = jax.make_mesh(
        (size,), ("cp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size]
    )

    def local(q: Any, k: Any, v: Any) -> Any:
        return ring_jax.ring_attention(
            q, k, v, axis_name="cp", layout=layout, strategy=strategy, **options
        )

    spec = PartitionSpec(None, "cp")
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)


def _inputs(length: int = 64) -> list[Any]:
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=(2, length, h, 8)), "float32") for h in (4, 2, 2)]


def test_one_transfer_each_way() -> None:
    x = _inputs()
    ring = _ring("zigzag", "gather", causal=True)
    grads = jax.jit(jax.grad(lambda *x: ring(*x).sum(), argnums=(0, 1, 2)))
    text = grads.lower(*x).as_text()
    counts = {
        name: len(re.findall(rf"stablehlo\.{name}\b", text))
        for name in ("all_gather", "reduce_scatter", "collective_permute", "all_reduce")
    }
    assert counts == {
        "all_gather": 1, "reduce_scatter": 1, "collective_permute": 0, "all_reduce": 0,
    }  # fmt: skip


def test_nothing_is_gathered_where_nobody_sees_others() -> None:
    ring = _ring("contiguous", "gather", mask=Mask(chunk_size=16))
    assert "all_gather" not in jax.jit(ring).lower(*_inputs()).as_text()


def test_under_checkpoint_and_scan() -> None:
    """Gathered keys have the residual name of the ring's keys, for checkpoint policies."""
    x = _inputs()
    policy = jax.checkpoint_policies.save_only_these_names(*ring_jax.RESIDUALS)

    def loss(strategy: str) -> Any:
        layer = jax.checkpoint(_ring("zigzag", strategy, 2, causal=True), policy=policy)

        def of_layers(q: Any, k: Any, v: Any) -> Any:
            return jax.lax.scan(lambda x, _: (layer(x, k, v), None), q, None, length=2)[0].sum()

        return jax.jit(jax.grad(of_layers, (0, 1, 2)))

    gathered = loss("gather")
    for grad, expected in zip(gathered(*x), loss("ring")(*x), strict=True):
        np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-5)
    assert gathered.lower(*x).as_text().count("stablehlo.all_gather") == 1


def test_over_a_mesh_with_other_axes() -> None:
    mesh = jax.make_mesh((2, 2, 2), ("data", "cp", "heads"), axis_types=(AxisType.Explicit,) * 3)
    cp = ring_jax.ContextParallel(
        mesh, axis_name="cp", batch_axis="data", head_axis="heads", layout="zigzag"
    )
    with jax.set_mesh(mesh):
        q, k, v = (cp.shard(x, dim=1) for x in _inputs())
        results, expected = (
            cp.unshard(cp.attention(q, k, v, causal=True, strategy=way), dim=1)
            for way in ("gather", "ring")
        )
    np.testing.assert_allclose(results, expected, rtol=1e-5, atol=1e-6)
