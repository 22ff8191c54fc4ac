"""Transfers, memory and size of programs, read from the programs themselves."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from backends.jax_devices import JaxBackend
from jax.sharding import NamedSharding
from jax_meshes import TOKENS, context, in_ring, mesh_of
from loops import CASES, in_loop
from program_size import (
    LIMIT,
    LIMIT_OF_BALANCED,
    LOCAL,
    call_over,
    constants_of,
    size_of,
    traced,
)
from tolerances import assert_close

from ring_core import (
    Mask,
    StrategyConfig,
    balanced_layout,
    make_plan,
    ring_program,
)
from ring_jax import ring_attention
from ring_jax.rank_view import Launches, step_table

CP, DIM = 8, 16


def passes(length: int, layout: Any, **options: Any) -> Any:
    """Return a call over 8 host devices, its forward and backward, and shapes of q, k and v."""
    call = partial(ring_attention, axis_name="cp", layout=layout, **options)
    ring, sharding = in_ring(call, CP), NamedSharding(mesh_of(cp=CP), TOKENS)
    spec = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16, sharding=sharding)
    q, k = (spec((1, length, heads, DIM)) for heads in (4, 2))

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(ring, q, k, v)
        return out, pull(dout)

    return ring, both, (q, k, k)


def test_helpers_alone_receive() -> None:
    ring, _, x = passes(1024, "contiguous", strategy="balanced", causal=True)
    text = jax.jit(ring).lower(*x).as_text()
    pairs = re.findall(r"source_target_pairs = dense<(\[\[.*?\]\])>", text)
    sizes = {len(re.findall(r"\[\d+, \d+\]", pair)) for pair in pairs}
    assert sizes == {CP, 1, 2, 3, 4}


def test_steps_of_a_causal_ring_are_rectangles() -> None:
    """After the first step kernels have no mask to apply."""
    program = ring_program(make_plan(Mask(causal=True), seq_len=64, cp_size=4, layout="zigzag"))
    parts = [step_table(program, step) for step in range(4)]
    assert [part.has_rectangles for part in parts] == [False, True, True, True]
    items = Launches.of(*parts[1:]).items or ()
    assert {tuple(x)[:4] for x in items} == {(8, 16, 0, 16), (0, 16, 0, 8)}


@pytest.mark.nightly
def test_memory_is_linear_in_the_length() -> None:
    sizes = []
    for length in (1 << 14, 1 << 15):
        _, both, x = passes(length, "zigzag", causal=True)
        memory: Any = jax.jit(both).lower(*x, x[0]).compile().memory_analysis()
        sizes.append(memory.temp_size_in_bytes)
    assert sizes[1] < 2.2 * sizes[0]
    assert sizes[1] < (1 << 12) ** 2 * 4 * 4 / 2  # of the scores of a rank


@pytest.mark.parametrize("x64", [True, False])
def test_strict_promotion(x64: bool) -> None:
    cp = context()
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        x = jnp.ones((1, 16, 2, 8), jnp.float32)

        def loss(x: jax.Array) -> jax.Array:
            return cp.attention(x, x, x, causal=True, dropout_p=0.1, dropout_seed=3).sum()

        jax.jit(jax.grad(loss)).lower(x)


DOCUMENTS = (0, 5000, 40000, 100000, 131072)
#: Programs over 256 devices, of each strategy, then of other layouts and masks.
SIZED: dict[str, dict[str, Any]] = {
    "ring": {}, "gather": {"strategy": "gather"},
    "balanced": {"strategy": "balanced", "layout": "contiguous"},
    "ulysses": {"strategy": "ulysses", "heads": (256, 2)},
    "hybrid": {"strategy": StrategyConfig("hybrid", 8)},
    "hybrid-gather": {"strategy": StrategyConfig("hybrid", 8, "gather")},
    "window": {"window": (4000, 0)}, "striped": {"layout": "striped"}, "full": {"causal": False},
    "chunks": {"chunk_size": 8192}, "documents": {"cu_seqlens": DOCUMENTS},
    "documents-striped": {"cu_seqlens": DOCUMENTS, "layout": "striped"},
    "gather-documents": {"strategy": "gather", "cu_seqlens": DOCUMENTS, "layout": "contiguous"},
    "gather-window": {"strategy": "gather", "window": (4000, 0), "layout": "striped"},
}  # fmt: skip


@cache
def warmed_up() -> None:
    """Let jax import what it needs and fill its caches."""
    size_of(2, causal=True)


@pytest.mark.nightly(unless=[*SIZED][:5])
@pytest.mark.parametrize("name", SIZED)
def test_256_devices(name: str) -> None:
    warmed_up()
    size = size_of(256, **{"causal": True, **SIZED[name]})
    limit = LIMIT_OF_BALANCED if name == "balanced" else LIMIT
    assert size.bytes <= limit.bytes
    assert size.seconds <= limit.seconds


@pytest.mark.parametrize("devices", [8, pytest.param(256, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("strategy", ["ring", "gather"])
def test_equal_layers_are_one_function(devices: int, strategy: str) -> None:
    one, four = (
        size_of(devices, layers=layers, causal=True, strategy=strategy) for layers in (1, 4)
    )
    assert four.bytes <= 1.3 * one.bytes


LENGTH = 8 * LOCAL
CUTS = (0, *range(700, LENGTH, 130), LENGTH)


def every_third_block(i: Any, j: Any) -> Any:
    return (i - j) % 900 < 300


PREDICATE = Mask(causal=True, predicate=every_third_block)
CONSTANTS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "documents": {"causal": True, "cu_seqlens": CUTS},
    "gather": {"causal": True, "cu_seqlens": CUTS, "strategy": "gather", "layout": "contiguous"},
    "predicate": {"mask": PREDICATE},
    "predicate, documents": {"mask": Mask(predicate=every_third_block, cu_seqlens=CUTS)},
    "balanced": {"causal": True, "strategy": "balanced", "layout": "contiguous"},
    "hybrid": {"causal": True, "cu_seqlens": CUTS, "strategy": StrategyConfig("hybrid", 4)},
    "balanced, predicate": {"mask": PREDICATE, "strategy": "balanced", "layout": "contiguous"},
}


def explained(*, layout: Any, **options: Any) -> tuple[int, str]:
    """Return the bytes of constants that ``explain`` states, and all that it says."""
    cp, shapes = call_over(8, layout)
    text = cp.explain(*shapes, **options)
    stated = re.search(r"([\d,]+) bytes of constants", text)
    assert stated is not None
    return int(stated[1].replace(",", "")), text


@pytest.mark.parametrize("name", CONSTANTS)
def test_explain_states_all_constants(name: str) -> None:
    options = {"layout": "zigzag", "kernel": "xla", **CONSTANTS[name]}
    tables = [x for x in constants_of(traced(8, **options)) if x.ndim > 1 or x.size == len(CUTS)]
    assert explained(**options)[0] == sum(x.nbytes for x in tables) > 500


def test_explain_states_positions_that_are_looked_up() -> None:
    """``explain`` counts position tables, too; XLA may drop some, so the counts are close."""
    mask = Mask(causal=True, cu_seqlens=CUTS)
    options: dict[str, Any] = {"layout": balanced_layout(mask, seq_len=LENGTH, cp_size=8)}
    options |= {"mask": mask, "kernel": "xla"}
    held = sum(x.nbytes for x in constants_of(traced(8, **options)) if x.ndim > 0)
    stated, text = explained(**options)
    assert 0.9 * held <= stated <= 1.2 * held
    assert "positions of all ranks" in text


@pytest.mark.nightly(unless=["everything", "helpers"])
@pytest.mark.parametrize("name", CASES)
def test_in_a_loop(name: str) -> None:
    assert_close(CASES[name], in_loop(JaxBackend(), CASES[name], "auto"))
