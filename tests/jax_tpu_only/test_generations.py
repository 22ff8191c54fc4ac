"""TPU generations: detection for a program, block sizes and limits, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends.tpu_compiled import TOPOLOGIES, devices
from cases import diagonals
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pages import check_jax_matrix
from predicates import PREDICATES, TRACED, T

from ring_core import KernelConfig, Mask, UnsupportedError
from ring_jax.records import Direction
from ring_jax.tools.cli import main
from ring_jax_tpu import ContextParallel, block_sizes as sizes, ring_attention

ROWS = {row.name: row for row in (sizes.UNKNOWN, *sizes.GENERATIONS.values())}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("inside_shard_map", [True, False])
def test_a_call_knows_its_generation(topology: str, *, inside_shard_map: bool) -> None:
    """A function and its gradient see it while they are traced."""
    mesh, tokens = Mesh(np.array(devices(topology, 4)), ("cp",)), PartitionSpec("cp")
    seen = []

    @jax.custom_vjp
    def note(x: Any) -> Any:
        seen.append(sizes.generation_of(x.reshape(-1, 2).swapaxes(0, 1)).name)
        return x

    def note_gradient(x: Any, dx: Any) -> tuple[Any]:
        seen.append(sizes.generation_of(x).name)
        return (dx,)

    note.defvjp(lambda x: (note(x), x), note_gradient)
    function = note
    if inside_shard_map:
        function = jax.shard_map(note, mesh=mesh, in_specs=tokens, out_specs=tokens)
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, tokens))
    jax.jit(lambda x: jax.vjp(function, x)[1](x)).lower(x)
    assert seen == [topology.partition(":")[0]] * 2
    assert sizes.generation_of(jnp.zeros(3)) is sizes.UNKNOWN  # on this machine, which has no TPU


@pytest.mark.parametrize("name", ROWS)
def test_default_blocks_fit(name: str) -> None:
    options = ((False, False), (True, False), (True, True))  # a bias, dropout
    dims, spans = (64, 128, 192, 256, 512), (1024, 1 << 20)
    for dim, itemsize, more, span in product(dims, (2, 4), options, spans):
        shape = sizes.Shape(dim, dim, itemsize, *more)
        for direction in get_args(Direction):
            blocks = sizes.default_sizes(direction, shape, span, ROWS[name])
            assert sizes.vmem_mib(direction, shape, *blocks) <= ROWS[name].vmem_mib


def test_an_override_is_held_against_the_generation() -> None:
    config = KernelConfig("pallas", block_q=1024, block_k=1024)
    shape = sizes.Shape(128, 128, 2, has_bias=False, has_dropout=False)
    choose = partial(sizes.choose_blocks, config, "backward", shape, 8192, 8192, 1 << 20)
    blocks = choose(ROWS["v5p"])
    assert (blocks.q, blocks.k) == (1024, 1024)
    message = r"16\.5 MiB of on-chip .* 16 MiB .*\(generation: v4"
    with pytest.raises(UnsupportedError, match=message):
        choose(ROWS["v4"])


@pytest.mark.parametrize(
    ("dtype", "config", "message"),
    [
        ("bfloat16", KernelConfig("pallas", block_q=100), "block_q=128"),
        ("bfloat16", KernelConfig("pallas", block_q=2048, block_k=2048),
         r"MiB of on-chip memory, and 16 MiB is the limit \(generation: unknown\)"),
        ("float16", KernelConfig("pallas"), "not float16"),
    ],
)  # fmt: skip
def test_refusals_say_what_would_work(dtype: str, config: KernelConfig, message: str) -> None:
    q = jnp.zeros((1, 8192, 2, 128), dtype)
    with pytest.raises(UnsupportedError, match=message):
        ring_attention(q, q, q, axis_name=None, kernel=config)


LARGE = KernelConfig(block_q=2048, block_k=2048)
SMALL = KernelConfig(block_q=128, block_k=128)


@pytest.mark.parametrize(
    ("config", "tokens", "kernels", "reasons"),
    [
        (KernelConfig(), 8192, 2, ()),
        (SMALL, 65536, 3, ()),  # runs in pieces
        (KernelConfig(block_q=1024, block_k=1024), 8192, 1,
         ("not the backward of pallas: the backward with blocks of 1024",)),
        (LARGE, 8192, 0, ("not pallas (tpu): the forward with blocks of 2048 queries and 2048",
                          "16 MiB is the limit (generation: v4)")),
        (SMALL, 1 << 21, 0, ("are 16384 x 16384, and 8192 along a side are the most",)),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_left_to_xla(
    config: KernelConfig, tokens: int, kernels: int, reasons: tuple[str, ...]
) -> None:
    """``explain`` says so, and a named kernel is refused before it is traced."""
    mesh = Mesh(np.array(devices("v4:2x2x1", 1)), ("cp",))
    sharding = NamedSharding(mesh, PartitionSpec())
    cp = ContextParallel(mesh, "cp", layout="contiguous")
    x = jax.ShapeDtypeStruct((1, tokens, 1, 128), jnp.bfloat16, sharding=sharding)

    def lowered(config: KernelConfig) -> tuple[str, str]:
        said: list[str] = []

        def both(q: Any) -> Any:
            said.append(cp.explain(q, q, q, causal=True, kernel=config))
            attend = partial(ring_attention, axis_name=None, causal=True, kernel=config)
            return jax.vjp(lambda q: attend(q, q, q), q)[1](q)

        text = jax.jit(both).lower(x).as_text()
        return text, said[0]

    text, said = lowered(config)
    assert text.count("tpu_custom_call") == kernels
    lines = ["kernel pallas (tpu)", "kernel xla (any other device)"]
    assert (
        said.splitlines()[:2] == lines if kernels else said.startswith("kernel xla (any device)\n")
    )
    assert all(reason in said for reason in reasons)
    assert ("\n  not the backward of pallas" in said) == (kernels == 1)
    if kernels == 0:
        with pytest.raises(UnsupportedError, match=r"^kernel 'pallas': .*kernel='auto'"):
            lowered(replace(config, name="pallas"))


REASONS = {
    "hash": r"computes numbers up to 1\d{10}, beyond 32 bits",
    "constant": "computes numbers up to 2654435761, beyond 32 bits",
    **dict.fromkeys(("fraction", "tenths", "quotient"), "computes with fractions"),
    **dict.fromkeys(("table", "functions", "divisor", "truths"), "is not made of operators on integers"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*REASONS, *TRACED, "diagonals"])
def test_predicates_are_compiled_or_refused_by_name(name: str) -> None:
    """Operators on integers are compiled."""
    q, mask = jnp.ones((1, T, 2, 8)), Mask(predicate={**PREDICATES, "diagonals": diagonals}[name])

    def call(q: jax.Array) -> jax.Array:
        return ring_attention(q, q, q, axis_name=None, mask=mask, kernel="pallas")

    if name not in REASONS:
        text = jax.jit(call).trace(q).lower(lowering_platforms=("tpu",)).as_text()
        assert "tpu_custom_call" in text
        return
    message = rf"^kernel 'pallas': .* this one {REASONS[name]}.*10 \* j"
    with pytest.raises(UnsupportedError, match=message):
        call(q)
    text = ContextParallel(jax.make_mesh((1,), ("cp",)), "cp").explain(q, q, q, mask=mask)
    assert text.startswith("kernel xla (any device)\n") and "not pallas (tpu): it evaluates" in text


def test_support_matrix_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix"]) == 0
    check_jax_matrix(capsys.readouterr().out, "pallas")
