"""TPU schedules of the ring, from programs compiled without a TPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from backends.tpu_compiled import (
    CP,
    DIM,
    KV_HEADS,
    LARGER,
    LOCAL,
    TOPOLOGIES,
    compiled,
    exposed,
    letters,
    loops_of,
    memory_allowed,
    permuted_bytes,
)
from cases import RINGS

from benchmarks.development.tpu_exposed import traffic
from ring_core import KernelConfig, Mask, StrategyConfig, make_plan, ring_program
from ring_jax import ring_attention

CAUSAL: dict[str, Any] = {"causal": True}
KV = LOCAL * KV_HEADS * 2 * DIM * 2  # bytes of a K/V message; dK/dV take twice as many


def transfers(layout: Any, **mask: Any) -> tuple[list[int], list[int]]:
    """Return the bytes of each transfer that the plan has, of the forward and of both passes."""
    program = ring_program(make_plan(Mask(**mask), seq_len=CP * LOCAL, cp_size=CP, layout=layout))
    forward = [KV for stage in program.forward if stage.kv_hop is not None]
    backward = [KV for stage in program.backward if stage.kv_hop is not None]
    backward += [2 * KV for stage in program.backward if stage.grad_hop is not None]
    return forward, sorted(forward + backward)


@pytest.mark.nightly  # per change `test_dead_steps_are_not_run` looks for exposed transfers
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_forward(topology: str) -> None:
    """Every transfer starts before the kernel it hides behind and is waited for after it."""
    program = compiled(topology, "zigzag", backward=False, **CAUSAL)
    assert letters(program) == "SKD" * (CP - 1) + "K"
    assert permuted_bytes(program) == transfers("zigzag", **CAUSAL)[0]
    assert program.memory_analysis().temp_size_in_bytes <= 1.15 * memory_allowed()[0]


@pytest.mark.nightly
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_forward_and_backward(topology: str) -> None:
    """Every transfer of K/V and dK/dV overlaps with a kernel, in both passes."""
    program = compiled(topology, "zigzag", backward=True, **CAUSAL)
    assert exposed(program) == []
    assert sorted(permuted_bytes(program)) == transfers("zigzag", **CAUSAL)[1]
    assert program.memory_analysis().temp_size_in_bytes <= 1.15 * memory_allowed()[1]


@pytest.mark.nightly
@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_where_the_compiler_is_told_to_drop_barriers(topology: str, fused: bool | None) -> None:
    """Transfers overlap with kernels even so, with a fused backward kernel and with two."""
    flags: dict[str, Any] = {"xla_tpu_aggressive_opt_barrier_removal": True}
    kernel = KernelConfig("pallas", fused_backward=fused)
    program = compiled(topology, "zigzag", backward=True, flags=flags, kernel=kernel, **CAUSAL)
    assert letters(program).count("K") == (2 * CP if fused is None else 3 * CP)
    assert exposed(program) == []
    assert sorted(permuted_bytes(program)) == transfers("zigzag", **CAUSAL)[1]
    assert program.memory_analysis().temp_size_in_bytes <= 1.15 * memory_allowed()[1]


@pytest.mark.nightly  # per change `test_loops` runs a loop, and other tests read a schedule
@pytest.mark.parametrize("topology", LARGER)
def test_in_a_loop(topology: str) -> None:
    """An iteration is two stages in the same order, and copies neither K/V nor dK/dV."""
    local = 2048
    program = compiled(topology, "zigzag", backward=True, local=local, many=8, **CAUSAL)
    forward, backward = loops_of(program)
    assert forward[0] == "SKD" * 2
    assert backward[0] == "SSKDD" * 2
    assert max([*forward[1], *backward[1], 0]) < local * KV_HEADS * DIM * 2


TRADED = {"ulysses": "ulysses", "hybrid": StrategyConfig("hybrid", ulysses_size=2)}


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRADED)
@pytest.mark.parametrize("topology", LARGER)
def test_exchanges_of_heads_are_exposed_and_nothing_else(topology: str, name: str) -> None:
    """XLA runs an all-to-all beside no kernel, and hops between groups beside one each."""
    program = compiled(
        topology, "zigzag", backward=True, local=2048, many=8, strategy=TRADED[name], **CAUSAL
    )
    assert len(permuted_bytes(program)) == (0 if name == "ulysses" else 3 + 2 + 3)
    assert exposed(program) == []
    text = str(program.as_text())
    assert " all-to-all(" in text
    assert "all-to-all-start" not in text
    moved, alone = traffic(text, 8 if name == "ulysses" else 2)
    assert moved - alone == sum(permuted_bytes(program))
    assert alone > 0


def test_dead_steps_are_not_run() -> None:
    """A window over a contiguous ring needs one hop, whatever the number of devices."""
    window: dict[str, Any] = {"causal": True, "window": (1023, 0)}
    program = compiled("v5e:2x2", "contiguous", backward=True, **window)
    assert sorted(permuted_bytes(program)) == transfers("contiguous", **window)[1] == [KV, 2 * KV]
    assert exposed(program) == []


@pytest.mark.nightly
@pytest.mark.parametrize("ring", ["contiguous", "striped", "balanced"])
def test_other_layouts_compile(ring: str) -> None:
    layout, strategy = RINGS[ring]
    program = compiled("v6e:2x2", layout, backward=True, local=1024, strategy=strategy, **CAUSAL)
    assert letters(program).count("K") >= 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_traced_with_x64(dtype: type) -> None:
    """Tracing works on a CPU, too: its program holds the kernels of other platforms."""

    def loss(x: jax.Array) -> jax.Array:
        return ring_attention(x, x, x, axis_name=None, causal=True).astype(jnp.float32).sum()

    with jax.enable_x64(True):
        x = jnp.ones((1, 32, 2, 8), dtype)
        assert jax.jit(jax.grad(loss)).lower(x).out_info.dtype == dtype
        assert jax.jit(loss).lower(x).out_info.dtype == jnp.float32
