"""Strategies that trade tokens for heads, ``ulysses`` and ``hybrid``, are right in every case."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, RANDOM, Case
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
from jax_meshes import mesh_of
from mutants import JAX_HEAD_MUTANTS
from tolerances import assert_close

import ring_jax
from ring_core import Mask, StrategyConfig, UnsupportedError, reference
from ring_jax import ContextParallel, prepare, ring_attention
from ring_jax.records import Devices


def hybrid(outer: Any, size: int | None = 2) -> StrategyConfig:
    """Return the strategy of groups of ``size`` devices."""
    return StrategyConfig("hybrid", ulysses_size=size, outer=outer)


def _with_heads(case: Case) -> Case:
    """Return the case with at least as many query heads as ranks."""
    heads, kv_heads = case.heads
    return replace(case, heads=(heads * -(-case.cp_size // heads), kv_heads))


def _table() -> dict[str, tuple[Case, str | StrategyConfig]]:
    """Return each case under ``ulysses``, and those of groups that may go under ``hybrid``."""
    split = [_with_heads(x) for x in CASES.values() if x.cp_size > 1 and x.strategy == "ring"]
    table: dict[str, tuple[Case, str | StrategyConfig]] = {
        f"{case.name}-ulysses": (case, "ulysses") for case in split
    }
    grouped = [x for x in split if x.cp_size in (4, 8) and x.layout != "striped"]
    for n, case in enumerate(grouped):
        only_rings = case.mask.predicate is not None or case.layout != "contiguous"
        outer = "ring" if only_rings or n % 2 else "gather"
        table[f"{case.name}-{outer}"] = case, hybrid(outer, 2 if n % 3 else case.cp_size // 2)
    return table


TABLE = _table()


@pytest.mark.nightly(unless=["everything-striped-ulysses", "padded45-everything-zigzag-ring"])
@pytest.mark.parametrize("name", TABLE)
def test_case(name: str, backend: Any, request: pytest.FixtureRequest) -> None:
    (case, strategy), mutant = TABLE[name], request.config.getoption("--mutant")
    assert_close(case, backend.run(case, mutant=mutant, strategy=strategy))


#: Query and K/V heads on four ranks: divided, copied, padded, both, or no range of heads.
HEADS = [(8, 4), (4, 1), (7, 7), (12, 3), (14, 2), (15, 5), (5, 1), (6, 3), (9, 3)]
WAYS: dict[str, str | StrategyConfig] = {
    "ulysses": "ulysses", "ring": hybrid("ring"), "gather": hybrid("gather"),
}  # fmt: skip


def _of_heads(heads: tuple[int, int]) -> Case:
    """Return a case with all options of a head."""
    return Case(
        f"heads-{heads[0]}-{heads[1]}", Mask(causal=True), "zigzag", 4, 16, 24, 2, heads, (8, 6),
        softcap=3.0, sinks=2, bias="shared" if heads[0] % 2 else "heads", alibi=2, dropout_p=0.2,
        segments="pair", lse_grad=True,
    )  # fmt: skip


@pytest.mark.nightly(unless=["12-3-ulysses"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "-".join(map(str, heads)))
def test_heads(heads: tuple[int, int], way: str, backend: Any) -> None:
    case = _of_heads(heads)
    assert_close(case, backend.run(case, strategy=WAYS[way]))


@pytest.mark.nightly(unless=["jax-copies-not-summed"])
@pytest.mark.parametrize("mutant", JAX_HEAD_MUTANTS)
def test_suite_goes_red(mutant: str, backend: Any) -> None:
    case = _of_heads((15, 5) if "shared" in mutant or "padding" in mutant else (12, 3))
    if "ids" in mutant:  # else shapes differ
        case = replace(case, kv_seq_len=None)
    results = backend.run(case, mutant=mutant, strategy="ulysses")
    with pytest.raises(AssertionError):
        assert_close(case, results)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float64", marks=pytest.mark.nightly)])
def test_gradients_of_copies_are_rounded_once(dtype: str, backend: Any) -> None:
    """dK/dV of a K/V head that all four ranks use are summed, then rounded once."""
    case = Case(f"copies-{dtype}", Mask(causal=True), "striped", 4, 64, heads=(16, 1), dtype=dtype)
    assert_close(case, backend.run(case, strategy="ulysses"))


@pytest.mark.nightly(unless=["ulysses-4"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_right_calls_pass_the_check(way: str, size: int, backend: Any) -> None:
    """The bytes of the collectives are those that the strategy counts, and sampled rows right."""
    bias: Any = "shared" if way == "ring" else "full"
    case = Case(
        "checked", Mask(causal=True), RANDOM[4], 4, 48, heads=(6, 3), bias=bias, segments="pair",
        dropout_p=0.0 if way == "ulysses" else 0.2,
    )  # fmt: skip
    strategy = WAYS[way] if way == "ulysses" else hybrid(way, size)
    with ring_jax.check():
        assert_close(case, backend.run(case, strategy=strategy))


KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
Q, KV = (2, 16, 8, 8), (2, 16, 4, 8)


def _arrays() -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype("float32") for shape in (Q, KV, KV, Q)]


def _close(results: Any) -> None:
    """Compare ``out``, dQ, dK and dV with those of the oracle."""
    q, k, v, dout = _arrays()
    grads = reference.attention_grads(dout, q, k, v, causal=True)
    expected = (reference.attention(q, k, v, causal=True)[0], *grads[:3])
    for result, exact in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, exact, rtol=2e-5, atol=2e-5)


@pytest.mark.nightly(unless=["explicit-ulysses", "auto-ring"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_over_a_mesh_with_other_axes(kind: str, way: str) -> None:
    sizes = {"cp": 4, "tp": 2} if way != "ulysses" else {"dp": 2, "cp": 2, "tp": 2}
    mesh = mesh_of(KINDS[kind], **sizes)
    axes: dict[str, Any] = {"head_axis": "tp"} | ({"batch_axis": "dp"} if "dp" in sizes else {})
    cp = ContextParallel(mesh, "cp", **axes)
    policy = jax.checkpoint_policies.save_only_these_names(*ring_jax.RESIDUALS)

    def layer(_: Any, x: Any) -> Any:
        call = jax.checkpoint(partial(cp.attention, causal=True, strategy=WAYS[way]), policy=policy)
        return None, cp.unshard(call(*(cp.shard(y) for y in x)))

    def loss(*x: Any) -> Any:
        _, out = jax.lax.scan(layer, None, tuple(y[None] for y in x))
        return (out[0] * _arrays()[3]).sum(), out[0]

    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
        grads, out = step(*_arrays()[:3])
        text = step.lower(*_arrays()[:3]).as_text()
    _close((out, *grads))
    # With the residuals saved nothing is traded again in the backward.
    assert text.count("stablehlo.all_to_all") == 4


@pytest.mark.nightly(unless=["ring"])
@pytest.mark.parametrize("way", WAYS)
def test_manual_axes_and_vmap(way: str) -> None:
    """Groups lie along two axes of a mesh as along one, also where JAX sends in another order."""
    mesh, names = mesh_of(inner=2, outer=2), ("outer", "inner")
    spec = P(None, names)
    call = partial(
        ring_attention, axis_name=names, layout="contiguous", causal=True, strategy=WAYS[way]
    )
    mapped = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    *x, dout = (jax.device_put(y, NamedSharding(mesh, spec)) for y in _arrays())
    out, pull = jax.vjp(mapped, *x)
    _close((out, *pull(dout)))
    several = jax.jit(jax.vmap(mapped))(*(jnp.stack([y, 2 * y]) for y in x))
    np.testing.assert_allclose(several[0], out, rtol=1e-5, atol=1e-5)


PREFIX = Mask(predicate=lambda q_pos, k_pos: (k_pos <= q_pos) | (k_pos < 6))
REFUSED: dict[str, tuple[tuple[int, int], dict[str, Any], str]] = {
    "heads": ((3, 1), {"strategy": "ulysses"}, "at most 3 ranks can split them, not 4; groups of 2"),
    "striped": ((4, 2), {"strategy": hybrid("ring"), "layout": "striped"}, "layout 'striped' gives"),
    "divides": ((4, 2), {"strategy": hybrid("ring", 3)}, "ulysses_size=3: it does not divide 4"),
    "groups": ((2, 2), {"strategy": hybrid("ring", 4)}, "ulysses_size=4: q has 2 heads"),
    "predicate": ((4, 2), {"strategy": hybrid("gather"), "mask": PREFIX}, "outer='gather': a predicate"),
    "hosts": ((4, 2), {"strategy": hybrid("ring", None)}, "say how many devices split heads, by ulysses_size"),
    "bias": ((4, 2), {"strategy": "ulysses", "bias": (1, 1, 20480, 20480)}, "each rank would gather a bias of 1.6 GiB"),
}  # fmt: skip


def _explained(heads: tuple[int, int], length: int = 64, **options: Any) -> str:
    """Return what ``explain`` says of a call over four devices that are not there."""
    mesh: Any = AbstractMesh((4,), ("cp",), axis_types=(AxisType.Auto,))
    cp = ContextParallel(mesh, "cp", layout=options.pop("layout", "zigzag"))
    q, k = (jax.ShapeDtypeStruct((1, length, n, 8), jnp.float32) for n in heads)
    return cp.explain(q, k, k, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    """Before anything is sent, with what to do instead."""
    heads, options, words = REFUSED[name]
    length = 64
    if "bias" in options:
        length = options["bias"][2]
        options = options | {"bias": jax.ShapeDtypeStruct(options["bias"], jnp.float32)}
    several = Devices("cpu", in_one_process=False)
    with (
        patch.object(prepare, "_devices", lambda *_: several),
        pytest.raises(UnsupportedError, match=re.escape(words)) as error,
    ):
        _explained(heads, length, **options)
    assert "Instead: " in str(error.value)


@pytest.mark.parametrize(
    ("heads", "strategy", "words"),
    [
        ((14, 2), "ulysses", ["strategy ulysses,", "tokens for heads among 4 devices",
                              "14 query heads in 16 places (12% padding), 2 K/V heads in 4"]),
        ((8, 4), hybrid("gather"), ["strategy hybrid,", "tokens for heads among 2 devices",
                                    "gather over 2 groups of 2 devices", "1 shard of K/V"]),
    ],
    ids=["ulysses", "hybrid"],
)  # fmt: skip
def test_explain_says_who_trades(heads: Any, strategy: Any, words: list[str]) -> None:
    text = _explained(heads, strategy=strategy, causal=True)
    assert all(x in text for x in words), text
    assert ("places" in text) == (heads == (14, 2))


def test_what_auto_trades() -> None:
    """It trades heads where core's rule allows it, before it gathers."""
    gpus = Devices("gpu", in_one_process=True)
    shape, few = (jax.ShapeDtypeStruct((1, 4096, n, 128), jnp.bfloat16) for n in (32, 8))
    told: list[tuple[Devices, Any, dict[str, Any], str]] = [
        (gpus, shape, {}, "strategy ulysses, transport xla\nprogram"),
        (gpus, few, {}, "strategy gather, transport xla\n  not ulysses: trading heads moves at least 125 %"),
        (gpus, shape, {"window": (99, 0)}, "not ulysses: trading heads moves"),
        (Devices("tpu", in_one_process=True), shape, {}, "not ulysses: it was not measured on tpu"),
        (gpus._replace(in_one_process=False), shape, {}, "not ulysses: between processes"),
    ]  # fmt: skip
    for devices, k, options, words in told:
        mesh: Any = AbstractMesh((4,), ("cp",), axis_types=(AxisType.Auto,))
        with patch.object(prepare, "_devices", lambda *_, devices=devices: devices):
            text = ContextParallel(mesh, "cp").explain(shape, k, k, causal=True, **options)
        assert words in text, text
