"""Strategies other than a ring are right in every case, or refuse it; and what ``auto`` chooses."""

from __future__ import annotations

import re
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest
from cases import CASES, RANDOM, Case
from jax.sharding import AbstractMesh, AxisType
from jax_meshes import KINDS, check_passes, context, mesh_of, random
from mutants import JAX_GATHERED_MUTANTS, JAX_HEAD_MUTANTS
from tolerances import assert_close

import ring_jax
from ring_core import Mask, Request, StrategyConfig, UnsupportedError
from ring_core.base.config import OuterName
from ring_jax import ContextParallel, prepare
from ring_jax.records import Devices
from ring_jax.strategies import gather, named_strategy

SPLIT = [case for case in CASES.values() if case.cp_size > 1 and case.strategy == "ring"]
REQUEST = Request("cpu", "float32", 8, 8)


def _with_heads(case: Case) -> Case:
    """Return the case with at least as many query heads as ranks."""
    heads, kv_heads = case.heads
    return replace(case, heads=(heads * -(-case.cp_size // heads), kv_heads))


def _table() -> dict[str, tuple[Case, str | StrategyConfig]]:
    """Return each case under the strategies that can run it."""
    table: dict[str, tuple[Case, str | StrategyConfig]] = {}
    for case in SPLIT:
        table[f"{case.name}-ulysses"] = _with_heads(case), "ulysses"
        with suppress(UnsupportedError):
            named_strategy("gather", case.program, REQUEST)
            table[f"{case.name}-gathered"] = case, "gather"
    grouped = [_with_heads(x) for x in SPLIT if x.cp_size in (4, 8) and x.layout != "striped"]
    for n, case in enumerate(grouped):
        only_rings = case.mask.predicate is not None or case.layout != "contiguous"
        outer: OuterName = "ring" if only_rings or n % 2 else "gather"
        size = 2 if n % 3 else case.cp_size // 2
        table[f"{case.name}-{outer}"] = case, StrategyConfig("hybrid", size, outer)
    return table


TABLE = _table()


@pytest.mark.nightly(unless=[
    "keys80-causal-zigzag-gathered", "shown-sinks-striped-gathered", "everything-striped-ulysses", "padded45-everything-zigzag-ring",
])  # fmt: skip
@pytest.mark.parametrize("name", TABLE)
def test_case(name: str, backend: Any, request: pytest.FixtureRequest) -> None:
    (case, strategy), mutant = TABLE[name], request.config.getoption("--mutant")
    assert_close(case, backend.run(case, mutant=mutant, strategy=strategy))


def test_what_is_not_gathered() -> None:
    """Only predicates and documents out of natural order are refused."""
    for case in SPLIT:
        if f"{case.name}-gathered" not in TABLE:
            reason = "natural order" if case.mask.predicate is None else "predicate"
            words = f"(?s){reason}.*Instead: use strategy='ring' or 'auto'"
            with pytest.raises(UnsupportedError, match=words):
                named_strategy("gather", case.program, REQUEST)


#: Query and K/V heads on four ranks: divided, copied, padded, both, or no range of heads.
HEADS = [(8, 4), (4, 1), (7, 7), (12, 3), (14, 2), (15, 5), (5, 1), (6, 3), (9, 3)]
TRADING: dict[str, str | StrategyConfig] = {
    "ulysses": "ulysses", "ring": StrategyConfig("hybrid", 2, "ring"),
    "gather": StrategyConfig("hybrid", 2, "gather"),
}  # fmt: skip


def _of_heads(heads: tuple[int, int]) -> Case:
    """Return a case with all options of a head."""
    return Case(
        f"heads-{heads[0]}-{heads[1]}", Mask(causal=True), "zigzag", 4, 16, 24, 2, heads, (8, 6),
        softcap=3.0, sinks=2, bias="shared" if heads[0] % 2 else "heads", alibi=2, dropout_p=0.2,
        segments="pair", lse_grad=True,
    )  # fmt: skip


@pytest.mark.nightly(unless=["12-3-ulysses"])
@pytest.mark.parametrize("way", TRADING)
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "-".join(map(str, heads)))
def test_heads(heads: tuple[int, int], way: str, backend: Any) -> None:
    case = _of_heads(heads)
    assert_close(case, backend.run(case, strategy=TRADING[way]))


@pytest.mark.nightly(unless=["jax-copies-not-summed", *JAX_GATHERED_MUTANTS])
@pytest.mark.parametrize("mutant", [*JAX_HEAD_MUTANTS, *JAX_GATHERED_MUTANTS, "window-off-by-one"])
def test_suite_goes_red(mutant: str, backend: Any) -> None:
    case, strategy = CASES["window-both-zigzag-cp3"], "gather"
    if mutant in JAX_HEAD_MUTANTS:
        case = _of_heads((15, 5) if "shared" in mutant or "padding" in mutant else (12, 3))
        strategy = "ulysses"
    if "ids" in mutant:  # else shapes differ
        case = replace(case, kv_seq_len=None)
    results = backend.run(case, mutant=mutant, strategy=strategy)
    with pytest.raises(AssertionError):
        assert_close(case, results)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float64", marks=pytest.mark.nightly)])
def test_gradients_of_copies_are_rounded_once(dtype: str, backend: Any) -> None:
    """dK/dV of a K/V head that all four ranks use are summed, then rounded once."""
    case = Case(f"copies-{dtype}", Mask(causal=True), "striped", 4, 64, heads=(16, 1), dtype=dtype)
    assert_close(case, backend.run(case, strategy="ulysses"))


CHECKED: dict[str, str | StrategyConfig] = {
    **TRADING, "ring of four": StrategyConfig("hybrid", 4, "ring"),
    "gather of four": StrategyConfig("hybrid", 4, "gather"), "gathered": "gather", "balanced": "balanced", "plain ring": "ring",
}  # fmt: skip


@pytest.mark.nightly(unless=["ulysses"])  # other tests check rings
@pytest.mark.parametrize("way", CHECKED)
def test_right_calls_pass_the_check(way: str, backend: Any) -> None:
    """The bytes of the collectives are those that the strategy counts, and sampled rows right."""
    by_heads = way in ("ulysses", "gather", "gather of four")
    case = Case(
        "checked", Mask(causal=True), RANDOM[4], 4, 48, heads=(6, 3), segments="pair", lse_grad=True,
        bias="full" if by_heads else "very-negative", dropout_p=0.0 if way == "ulysses" else 0.2,
    )  # fmt: skip
    if way == "balanced":
        case = replace(case, layout="contiguous", strategy="balanced")
    with ring_jax.check():
        assert_close(case, backend.run(case, strategy=CHECKED[way]))


#: Collectives of a step, forward and backward. With the residuals saved nothing moves again.
COLLECTIVES = {
    **{way: {"all_to_all": 4} for way in TRADING},
    "gathered": {"all_gather": 1, "reduce_scatter": 1, "collective_permute": 0},
    "gathered again": {"all_gather": 2},  # keys that are too many to be saved
}


@pytest.mark.nightly(
    unless=["explicit-ulysses", "auto-ring", "auto-gathered", "explicit-gathered again"]
)
@pytest.mark.parametrize("way", COLLECTIVES)
@pytest.mark.parametrize("kind", KINDS)
def test_over_a_mesh_with_other_axes(kind: str, way: str) -> None:
    sizes = {"cp": 4, "tp": 2} if "ulysses" not in way else {"dp": 2, "cp": 2, "tp": 2}
    axes: dict[str, Any] = {"head_axis": "tp"} | ({"batch_axis": "dp"} if "dp" in sizes else {})
    cp = ContextParallel(mesh_of(KINDS[kind], **sizes), "cp", **axes)
    policy = jax.checkpoint_policies.save_only_these_names(*ring_jax.RESIDUALS)
    attend = partial(cp.attention, causal=True, strategy=TRADING.get(way, "gather"))
    *qkv, dout = (random(2, 16, n, 8, seed=m) for m, n in enumerate((8, 4, 4, 8)))

    def layer(_: Any, x: Any) -> Any:
        call = jax.checkpoint(attend, policy=policy)
        return None, cp.unshard(call(*(cp.shard(y) for y in x)))

    def scanned(*x: Any) -> Any:
        return jax.lax.scan(layer, None, tuple(y[None] for y in x))[1][0]

    jax.clear_caches()
    again = way == "gathered again"
    limited = patch.object(gather, "MAX_SAVED_BYTES", 0) if again else nullcontext()
    with jax.set_mesh(cp.mesh), limited:
        text = check_passes(scanned, qkv, dout, causal=True)[0].as_text()
    jax.clear_caches()
    for name, count in COLLECTIVES[way].items():
        assert text.count(f"stablehlo.{name}") == count


def test_nothing_is_gathered_where_nobody_sees_others() -> None:
    call = partial(context(4, "contiguous").attention, chunk_size=16, strategy="gather")
    x = random(1, 64, 2, 8)
    assert "all_gather" not in jax.jit(call).lower(x, x, x).as_text()


CPUS, GPUS, TPUS = (Devices(name, in_one_process=True) for name in ("cpu", "gpu", "tpu"))
LOCAL = 1024


def _explained(
    size: int, heads: tuple[int, int], *, devices: Devices = CPUS, tokens: int = LOCAL,
    layout: Any = "zigzag", **options: Any,
) -> str:  # fmt: skip
    """Return what ``explain`` says of a call over devices that are not there."""
    mesh: Any = AbstractMesh((size,), ("cp",), axis_types=(AxisType.Auto,))
    cp = ContextParallel(mesh, "cp", layout=layout)
    q, k = (jax.ShapeDtypeStruct((1, size * tokens, n, 128), jnp.bfloat16) for n in heads)
    with patch.object(prepare, "_devices", lambda *_: devices):
        return cp.explain(q, k, k, **options)


PREFIX = Mask(predicate=lambda q_pos, k_pos: (k_pos <= q_pos) | (k_pos < 6))
BIAS = jax.ShapeDtypeStruct((1, 1, 20480, 20480), jnp.float32)
REFUSED: dict[str, tuple[tuple[int, int], dict[str, Any], str]] = {
    "heads": ((3, 1), {"strategy": "ulysses"}, "at most 3 ranks can split them, not 4; groups of 2"),
    "striped": ((4, 2), {"strategy": TRADING["ring"], "layout": "striped"}, "layout 'striped' gives"),
    "divides": ((4, 2), {"strategy": StrategyConfig("hybrid", 3)}, "ulysses_size=3: it does not divide 4"),
    "groups": ((2, 2), {"strategy": StrategyConfig("hybrid", 4)}, "ulysses_size=4: q has 2 heads"),
    "predicate": ((4, 2), {"strategy": TRADING["gather"], "mask": PREFIX}, "outer='gather': a predicate"),
    "hosts": ((4, 2), {"strategy": StrategyConfig("hybrid")}, "say how many devices split heads, by ulysses_size"),
    "bias": ((4, 2), {"strategy": "ulysses", "tokens": 5120, "bias": BIAS}, "each rank would gather a bias of 1.6 GiB"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    """Before anything is sent, with what to do instead."""
    heads, options, words = REFUSED[name]
    several = CPUS._replace(in_one_process=False)
    arguments: Any = {"tokens": 16, **options}
    with pytest.raises(UnsupportedError, match=re.escape(words)) as error:
        _explained(4, heads, devices=several, **arguments)
    assert "Instead: " in str(error.value)


GATHER, RING = "strategy gather, transport xla", "strategy ring, transport xla\n  not gather: "
DOCUMENTS = (0, 900, 2000, 3000, 4096)  # each crosses at most one of the shard borders
FEWER = f"{RING}it fetches 3 shards of K/V, and 1 go round the ring"
MORE_MEMORY = f"{RING}it takes more than 3 times the memory of a ring"
#: Calls on GPUs of one process: their number, options, and what is said of the strategy.
ON_GPUS: dict[str, tuple[int, dict[str, Any], str]] = {
    "three": (3, {}, GATHER),
    "most memory": (11, {}, GATHER),  # (11 + 1) * 12288 bytes a token: 3 times the ring's 49152
    "most memory, heads alike": (8, {"heads": (32, 32)}, GATHER),
    "window of two hops": (4, {"window": (99, 0)}, GATHER),
    "window of all shards": (4, {"window": (3 * LOCAL, 0)}, GATHER),
    "documents": (4, {"layout": "contiguous", "cu_seqlens": (0, 100, 4096)}, GATHER),
    "bias": (4, {"causal": False, "bias": jax.ShapeDtypeStruct((1, 1, 4096, 4096), jnp.bfloat16)}, GATHER),
    "one": (1, {}, f"{RING}on one device nothing travels"),
    "two": (2, {}, f"{RING}on two devices it launches what a ring does, and takes more memory"),
    "memory": (12, {}, MORE_MEMORY),
    "memory, heads alike": (9, {"heads": (32, 32)}, MORE_MEMORY),
    "window": (4, {"layout": "contiguous", "window": (LOCAL - 1, 0)}, FEWER),
    "few documents": (4, {"layout": "contiguous", "cu_seqlens": DOCUMENTS}, FEWER),
    "predicate": (4, {"causal": False, "mask": PREFIX}, f"{RING}a predicate mask is"),
    "by name": (4, {"strategy": "ring"}, "strategy ring, transport xla\nprogram"),
    "heads alike": (16, {"heads": (32, 32)}, "strategy ulysses, transport xla\n  not gather: it takes more than 3"),
    "heads to copy": (16, {}, "not ulysses: a trade would pad or copy heads: 32 and 8 of K/V on 16 ranks"),
    "padded heads": (4, {"heads": (14, 2), "strategy": "ulysses"}, "14 query heads in 16 places (12% padding), 2 K/V heads in 4"),
    "trading": (4, {"heads": (16, 8), "strategy": "ulysses"}, "tokens for heads among 4 devices"),
    "hybrid": (4, {"heads": (8, 4), "strategy": TRADING["gather"]}, "tokens for heads among 2 devices"),
    "groups": (4, {"heads": (8, 4), "strategy": TRADING["gather"]}, "gather over 2 groups of 2 devices"),
    "heads, window": (16, {"heads": (32, 32), "window": (99, 0)}, "not ulysses: trading heads moves"),
}  # fmt: skip
ELSEWHERE = {
    CPUS: (f"{RING}devices of a CPU share", "not ulysses: it was not measured on cpu"),
    TPUS: (f"{RING}on TPUs XLA runs an all-gather beside", "not ulysses: it was not measured on tpu"),
    GPUS._replace(in_one_process=False): (f"{RING}between processes", "not ulysses: between processes"),
}  # fmt: skip


def test_what_auto_takes() -> None:
    """It gathers, or trades heads where a gather takes too much memory and core allows it."""
    for name, (size, options, words) in ON_GPUS.items():
        arguments: Any = {"heads": (32, 8), "causal": True} | options
        text = _explained(size, devices=GPUS, **arguments)
        assert words in text, (name, text)
    for devices, all_words in ELSEWHERE.items():
        text = _explained(16, (32, 32), devices=devices, causal=True)
        assert all(words in text for words in all_words), text
