"""TPU generations: detection for a program, and the table of block sizes and limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ring_core import KernelConfig, UnsupportedError
from ring_jax.records import Direction
from ring_jax_tpu import ring_attention
from ring_jax_tpu.block_sizes import (
    GENERATIONS,
    UNKNOWN,
    Generation,
    Shape,
    choose_blocks,
    default_sizes,
    generation_of,
    vmem_mib,
)

TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
ROWS = {row.name: row for row in (UNKNOWN, *GENERATIONS.values())}
PASSES: tuple[Direction, Direction] = ("forward", "backward")
NARROW = Shape(128, 128, 2, has_bias=False, has_dropout=False)


def traced(topology: str, *, inside_shard_map: bool) -> list[str]:
    """Return the generations that a function and its gradient see while they are traced."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh, tokens = Mesh(np.array(devices[:4]), ("cp",)), PartitionSpec("cp")
    kernels_traced = []

    @jax.custom_vjp
    def note(x: Any) -> Any:
        kernels_traced.append(generation_of(x.reshape(-1, 2).swapaxes(0, 1)).name)
        return x

    def note_gradient(x: Any, dx: Any) -> tuple[Any]:
        kernels_traced.append(generation_of(x).name)
        return (dx,)

    note.defvjp(lambda x: (note(x), x), note_gradient)
    function = note
    if inside_shard_map:
        function = jax.shard_map(note, mesh=mesh, in_specs=tokens, out_specs=tokens)
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, tokens))
    jax.jit(lambda x: jax.vjp(function, x)[1](x)).lower(x)
    return kernels_traced


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("inside_shard_map", [True, False])
def test_a_call_knows_its_generation(topology: str, *, inside_shard_map: bool) -> None:
    name = topology.partition(":")[0]
    assert traced(topology, inside_shard_map=inside_shard_map) == [name, name]


def test_a_machine_without_tpu_is_unknown() -> None:
    assert generation_of(jnp.zeros(3)) is UNKNOWN


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_default_blocks_fit(name: str, head_dim: int, itemsize: int) -> None:
    for has_bias, has_dropout in ((False, False), (True, False), (True, True)):
        shape = Shape(head_dim, head_dim, itemsize, has_bias, has_dropout)
        for direction in PASSES:
            for span in (1024, 1 << 20):
                sizes = default_sizes(direction, shape, span, ROWS[name])
                assert vmem_mib(direction, shape, *sizes) <= ROWS[name].vmem_mib


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("unknown", (1024, 1024), (512, 1024)),
        ("v4", (1024, 1024), (1024, 512)),
        ("v5e", (1024, 1024), (1024, 1024)),
        ("v5p", (1024, 1024), (1024, 1024)),
        ("v6e", (1024, 1024), (1024, 1024)),
        ("tpu7x", (1024, 1024), (1024, 1024)),
    ],
)
def test_the_table(name: str, forward: tuple[int, int], backward: tuple[int, int]) -> None:
    for direction, sizes in zip(PASSES, (forward, backward), strict=True):
        assert default_sizes(direction, NARROW, generation=ROWS[name]) == sizes
        assert default_sizes(direction, NARROW, 1024, ROWS[name]) == (512, 512)


def choose(row: Generation, q: int, k: int) -> tuple[int, int]:
    config = KernelConfig("pallas", block_q=q, block_k=k)
    blocks = choose_blocks(config, "backward", NARROW, 8192, 8192, 1 << 20, row)
    return blocks.q, blocks.k


def test_an_override_is_held_against_the_generation() -> None:
    assert choose(ROWS["v5p"], 1024, 1024) == (1024, 1024)
    with pytest.raises(
        UnsupportedError, match=r"16\.5 MiB of on-chip .* 16 MiB .*\(generation: v4"
    ):
        choose(ROWS["v4"], 1024, 1024)


def test_refusals_say_what_would_work() -> None:
    def refused(dtype: str, kernel: KernelConfig) -> str:
        q = jnp.zeros((1, 8192, 2, 128), dtype)
        with pytest.raises(UnsupportedError) as error:
            ring_attention(q, q, q, axis_name=None, kernel=kernel)
        return str(error.value)

    assert "block_q=128" in refused("bfloat16", KernelConfig("pallas", block_q=100))
    large = refused("bfloat16", KernelConfig("pallas", block_q=2048, block_k=2048))
    assert "MiB of on-chip memory, and 16 MiB is the limit (generation: unknown)" in large
    assert "not float16" in refused("float16", KernelConfig("pallas"))


@pytest.mark.parametrize(
    ("config", "seq_len", "kernels"),
    [
        (KernelConfig(), 2048, 2),
        (KernelConfig(block_q=2048, block_k=2048), 2048, 0),  # too large for the chip
        (KernelConfig(block_q=128, block_k=128), 65536, 3),  # runs in pieces
        (KernelConfig(block_q=128, block_k=128), 1 << 21, 0),  # too many blocks
    ],
)
def test_auto_leaves_what_does_not_fit_to_xla(
    config: KernelConfig, seq_len: int, kernels: int
) -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v4:2x2x1").devices
    everywhere = NamedSharding(Mesh(np.array(devices[:1]), ("x",)), PartitionSpec())
    q = jax.ShapeDtypeStruct((1, seq_len, 1, 128), jnp.bfloat16, sharding=everywhere)

    def both(kernel: KernelConfig) -> Any:
        def attend(q: Any) -> Any:
            return ring_attention(q, q, q, axis_name=None, kernel=kernel)

        return jax.jit(lambda q: jax.vjp(attend, q)[1](q)).lower(q).as_text()

    assert both(config).count("tpu_custom_call") == kernels
    if kernels == 0:
        with pytest.raises(UnsupportedError, match="kernel='auto'"):
            both(replace(config, name="pallas"))


@pytest.mark.parametrize("platforms", [("cpu",), ("cuda",), ("tpu",), ("cpu", "tpu")])
@pytest.mark.parametrize("kernel", ["pallas", "auto"])
def test_exports(kernel: str, platforms: tuple[str, ...]) -> None:
    """Exports with ``pallas`` raise unless for TPUs alone; ``auto`` has each platform's kernel."""
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), "float32")
    call = jax.jit(lambda q: ring_attention(q, q, q, axis_name=None, kernel=kernel))
    for function in (call, jax.jit(jax.grad(lambda q: call(q).sum()))):
        export = jax.export.export(function, platforms=platforms)
        if kernel == "pallas" and platforms != ("tpu",):
            with pytest.raises(UnsupportedError, match="lower it for each platform alone"):
                export(x)
            continue
        exported = export(x)
        assert exported.platforms == platforms
        assert ("tpu_custom_call" in exported.mlir_module()) == ("tpu" in platforms)
        if "cpu" in platforms:
            q = jax.random.normal(jax.random.key(0), x.shape)
            np.testing.assert_allclose(exported.call(q), function(q), rtol=1e-5, atol=1e-6)
