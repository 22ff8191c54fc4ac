"""Programs compiled without a TPU: what Mosaic accepts, schedules, copies, memory and size.

The generation that a program is for decides its blocks and limits, and what is refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, get_args

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from backends import tpu_compiled as tpu
from cases import RINGS, diagonals
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pages import check_jax_matrix
from predicates import PREDICATES, TRACED, T
from refused import refused

from benchmarks.development.tpu_exposed import traffic
from ring_core import KernelConfig, Mask, StrategyConfig, UnsupportedError, make_plan, ring_program
from ring_jax.records import Direction
from ring_jax.tools.cli import main
from ring_jax_tpu import ContextParallel, block_sizes, ring_attention

CAUSAL: dict[str, Any] = {"causal": True}
KV = tpu.LOCAL * tpu.KV_HEADS * 2 * tpu.DIM * 2  # bytes of a K/V message; dK/dV take twice as many


def transfers(layout: Any, **mask: Any) -> tuple[int, int]:
    """Return the bytes of the transfers that the plan has, of the forward and of both passes."""
    program = ring_program(
        make_plan(Mask(**mask), seq_len=tpu.CP * tpu.LOCAL, cp_size=tpu.CP, layout=layout)
    )
    hops = [sum(x.kv_hop is not None for x in y) for y in (program.forward, program.backward)]
    grad_hops = sum(stage.grad_hop is not None for stage in program.backward)
    return KV * hops[0], KV * (sum(hops) + 2 * grad_hops)


@pytest.mark.nightly  # per change `test_dead_steps_are_not_run` looks for exposed transfers
@pytest.mark.parametrize("way", ["forward", "both", "fused", "two kernels"])
@pytest.mark.parametrize("topology", tpu.TOPOLOGIES)
def test_schedule(topology: str, way: str) -> None:
    """Every transfer starts before the kernel it hides behind and is waited for after it.

    Even where the compiler is told to drop barriers, with a fused backward kernel and with two.
    """
    more: dict[str, Any] = {} if way in ("forward", "both") else {
        "flags": {"xla_tpu_aggressive_opt_barrier_removal": True},
        "kernel": KernelConfig("pallas", fused_backward=None if way == "fused" else False),
    }  # fmt: skip
    backward = way != "forward"
    program = tpu.compiled(topology, "zigzag", backward=backward, **more, **CAUSAL)
    letters = tpu.letters(program)
    assert backward or letters == "SKD" * (tpu.CP - 1) + "K"
    assert letters.count("K") == {"forward": 1, "two kernels": 3}.get(way, 2) * tpu.CP
    assert traffic(program.as_text(), 1) == (transfers("zigzag", **CAUSAL)[backward], 0)
    # Memory is two K/V slots and accumulators, those of dK/dV for three slots.
    rows, grads = tpu.LOCAL * tpu.HEADS * tpu.DIM * 4, 3 * 2 * KV
    temporary = program.memory_analysis().temp_size_in_bytes
    assert temporary <= 1.15 * (2 * KV + rows + grads * backward)


@pytest.mark.nightly  # per change `test_in_a_loop` runs one, and other tests read a schedule
@pytest.mark.parametrize("topology", tpu.LARGER)
def test_loops(topology: str) -> None:
    """An iteration is two stages in the same order, and copies neither K/V nor dK/dV."""
    program = tpu.compiled(topology, "zigzag", local=2048, many=8, **CAUSAL)
    forward, backward = [x for x in tpu.schedules_of(program)[:-1] if "S" in x[0]]
    assert (forward[0], backward[0]) == ("SKD" * 2, "SSKDD" * 2)
    assert max([*forward[1], *backward[1], 0]) < 2048 * tpu.KV_HEADS * tpu.DIM * 2


TRADED = {"ulysses": "ulysses", "hybrid": StrategyConfig("hybrid", ulysses_size=2)}


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRADED)
@pytest.mark.parametrize("topology", tpu.LARGER)
def test_exchanges_of_heads_are_exposed_and_nothing_else(topology: str, name: str) -> None:
    """XLA runs an all-to-all beside no kernel, and hops between groups beside one each."""
    program = tpu.compiled(topology, "zigzag", local=2048, many=8, strategy=TRADED[name], **CAUSAL)
    text = str(program.as_text())
    assert " all-to-all(" in text
    assert "all-to-all-start" not in text
    hops, exposed = traffic(text, 1)  # without exchanges of heads, of which all is each one's own
    assert (hops > 0, exposed) == (name == "hybrid", 0)


def test_dead_steps_are_not_run() -> None:
    """A window over a contiguous ring needs one hop, whatever the number of tpu.devices."""
    window: dict[str, Any] = {"causal": True, "window": (1023, 0)}
    program = tpu.compiled("v5e:2x2", **window)
    assert traffic(program.as_text(), 1) == (transfers("contiguous", **window)[1], 0) == (3 * KV, 0)


#: Programs that Mosaic has to accept: of other layouts, and on one device of all options.
OPTIONS: dict[str, dict[str, Any]] = {
    "narrow": {"dims": (64, 64)}, "v-dim": {"dims": (192, 128)},
    "float32": {"dims": (256, 256), "dtype": "float32"}, "odd": {"local": 2004, "keys": 1000},
    "tiny": {"local": 6, "keys": 6, "dims": (8, 8)},
    "documents": {"mask": Mask(causal=True, cu_seqlens=(0, 5, 700, 2048))},
    "predicate": {"mask": Mask(causal=True, predicate=diagonals)},
    "segments": {"softcap": 30.0, "arrays": {"segment_ids": ("int32", (1, 2048))}},
    "dropout": {"dropout_p": 0.1, "dropout_seed": 3, "arrays": {"alibi_slopes": ("float32", (8,))}},
    "bias": {"arrays": {"bias": ("float32", (1, 1, 2048, 2048))}},
    "mask": {"arrays": {"mask": ("bool", (2048, 2048))}},
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["contiguous", "striped", "balanced", *OPTIONS])
def test_accepted(name: str) -> None:
    if name in OPTIONS:
        call: dict[str, Any] = {"local": 2048, "many": 1, "kernel": "pallas"} | OPTIONS[name]
        assert "tpu_custom_call" in tpu.compiled("v5e:2x2", **call).as_text()
        return
    layout, strategy = RINGS[name]
    program = tpu.compiled("v6e:2x2", layout, local=1024, strategy=strategy, **CAUSAL)
    assert tpu.letters(program).count("K") >= 2


#: Shards of more blocks than a list holds: tokens per device, devices, batch, True for segment ids,
#: and options.
LONG: dict[str, tuple[int, int, int, bool, dict[str, Any]]] = {
    "causal": (1 << 19, 1, 1, False, CAUSAL),
    "window": (1 << 20, 1, 1, False, CAUSAL | {"window": (4095, 0)}),
    "large-batch": (1 << 17, 1, 16, True, CAUSAL),
    "larger-batch": (1 << 15, 1, 64, True, CAUSAL | {"window": (1023, 0)}),
    "gather": (1 << 17, 4, 1, False, CAUSAL | {"window": (4095, 0), "strategy": "gather"}),
}


def lowered(name: str, topology: str, *, backward: bool) -> tuple[Any, str]:
    """Return a long call's program, and what ``explain`` says of it."""
    local, size, batch, has_ids, options = LONG[name]
    mesh = Mesh(np.array(tpu.devices(topology, size)), ("cp",))
    tokens = NamedSharding(mesh, PartitionSpec(None, "cp"))
    spec = partial(jax.ShapeDtypeStruct, sharding=tokens)
    arrays = [spec((batch, local * size, heads, 128), jnp.bfloat16) for heads in (2, 1, 1)]
    arrays += [spec((batch, local * size), jnp.int32)] if has_ids else []
    cp = ContextParallel(mesh, "cp", layout="contiguous")
    said: list[str] = []

    def attend(q: Any, k: Any, v: Any, ids: Any = None) -> Any:
        said.append(cp.explain(q, k, v, segment_ids=ids, **options))
        return cp.attention(q, k, v, segment_ids=ids, **options)

    def both(q: Any, k: Any, v: Any, *ids: Any) -> Any:
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, *ids), q, k, v)
        return out, pull(out)

    return jax.jit(both if backward else attend).lower(*arrays), said[0]


@pytest.mark.nightly(unless=[
    "causal-v5e:2x2", "window-tpu7x:2x2x1", "large-batch-v5e:2x2", "larger-batch-tpu7x:2x2x1",
    "gather-v5e:2x2",
])  # fmt: skip
@pytest.mark.parametrize("topology", ["v5e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("name", LONG)
def test_long_shards_run_in_pallas(name: str, topology: str) -> None:
    """A long call has one Pallas kernel per pass and part of the keys, however many pieces.

    It used to fall back to XLA silently, by the number of all blocks, visible or not.
    """
    program, said = lowered(name, topology, backward=True)
    assert said.startswith("kernel pallas (tpu)\nkernel xla (any other device)\n")
    assert "not the backward" not in said
    assert program.as_text().count("tpu_custom_call") == 2 * (2 if name == "gather" else 1)


@pytest.mark.nightly
@pytest.mark.parametrize("topology", ["v5e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("name", ["causal", "window"])
@pytest.mark.parametrize("backward", [False, True])
def test_long_shards_compile(name: str, topology: str, *, backward: bool) -> None:
    """Compiled programs do not copy the buffers that a loop of launches works on."""
    program = lowered(name, topology, backward=backward)[0].compile().as_text()
    assert program.count("tpu_custom_call") >= 1 + backward
    wide = f"f32[1,2,{LONG[name][0]},128]"
    assert not [line for line in program.splitlines() if " copy(" in line and f"= {wide}" in line]


@pytest.mark.nightly
@pytest.mark.parametrize("backward", [False, True])
def test_transfers_beside_pieces(monkeypatch: pytest.MonkeyPatch, *, backward: bool) -> None:
    """K/V are sent while a loop of launches runs, as they are with a single launch."""
    jax.clear_caches()  # programs traced with another limit
    monkeypatch.setattr(block_sizes, "MAX_WORDS", 32)
    program = tpu.compiled("v5e:2x2", "zigzag", backward=backward, **CAUSAL)
    jax.clear_caches()
    assert tpu.letters(program).count("K") == (8 if backward else 4)
    assert " while(" in program.as_text()
    assert traffic(program.as_text(), 1)[1] == 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_traced_with_x64(dtype: type) -> None:
    """Tracing works on a CPU, too: its program holds the kernels of other platforms."""

    def loss(x: jax.Array) -> jax.Array:
        return ring_attention(x, x, x, axis_name=None, causal=True).astype(jnp.float32).sum()

    with jax.enable_x64(True):
        x = jnp.ones((1, 32, 2, 8), dtype)
        assert jax.jit(jax.grad(loss)).lower(x).out_info.dtype == dtype
        assert jax.jit(loss).lower(x).out_info.dtype == jnp.float32


def test_a_program_keeps_no_arrays_of_its_trace() -> None:
    """Tracing leaks no arrays: the cached function for ``vmap`` must not hold those around it."""
    x = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, 1, 256, 256), jnp.float32)

    def loss(x: jax.Array, bias: jax.Array) -> jax.Array:
        return ring_attention(x, x, x, axis_name=None, kernel="pallas", bias=bias).sum()

    with jax.checking_leaks():
        assert jax.eval_shape(jax.grad(loss), x, bias).shape == x.shape


@pytest.mark.parametrize("platforms", [("cpu",), ("cuda",), ("tpu",), ("cpu", "tpu")])
@pytest.mark.parametrize("kernel", ["pallas", "auto"])
def test_exports(kernel: str, platforms: tuple[str, ...]) -> None:
    """Exports with ``pallas`` raise unless for TPUs alone; ``auto`` has each platform's kernel."""
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), "float32")
    call = jax.jit(lambda q: ring_attention(q, q, q, axis_name=None, kernel=kernel))
    for function in (call, jax.jit(jax.grad(lambda q: call(q).sum()))):
        export = jax.export.export(function, platforms=platforms)
        if kernel == "pallas" and platforms != ("tpu",):
            refused("lower it for each platform alone", export, x, error=UnsupportedError)
            continue
        exported = export(x)
        assert exported.platforms == platforms
        assert ("tpu_custom_call" in exported.mlir_module()) == ("tpu" in platforms)
        if platforms == ("cpu", "tpu"):
            q = jax.random.normal(jax.random.key(0), x.shape)
            np.testing.assert_allclose(exported.call(q), function(q), rtol=1e-5, atol=1e-6)


ROWS = {row.name: row for row in (block_sizes.UNKNOWN, *block_sizes.GENERATIONS.values())}


@pytest.mark.parametrize("topology", tpu.TOPOLOGIES)
@pytest.mark.parametrize("inside_shard_map", [True, False])
def test_a_call_knows_its_generation(topology: str, *, inside_shard_map: bool) -> None:
    """A function and its gradient see it while they are traced."""
    mesh, tokens = Mesh(np.array(tpu.devices(topology, 4)), ("cp",)), PartitionSpec("cp")
    seen = []

    @jax.custom_vjp
    def note(x: Any) -> Any:
        seen.append(block_sizes.generation_of(x.reshape(-1, 2).swapaxes(0, 1)).name)
        return x

    def note_gradient(x: Any, dx: Any) -> tuple[Any]:
        seen.append(block_sizes.generation_of(x).name)
        return (dx,)

    note.defvjp(lambda x: (note(x), x), note_gradient)
    function = note
    if inside_shard_map:
        function = jax.shard_map(note, mesh=mesh, in_specs=tokens, out_specs=tokens)
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, tokens))
    jax.jit(lambda x: jax.vjp(function, x)[1](x)).lower(x)
    assert seen == [topology.partition(":")[0]] * 2
    assert (
        block_sizes.generation_of(jnp.zeros(3)) is block_sizes.UNKNOWN
    )  # on this machine, which has no TPU


@pytest.mark.parametrize("name", ROWS)
def test_default_blocks_fit(name: str) -> None:
    options = ((False, False), (True, False), (True, True))  # a bias, dropout
    dims, spans = (64, 128, 192, 256, 512), (1024, 1 << 20)
    for dim, itemsize, more, span in product(dims, (2, 4), options, spans):
        shape = block_sizes.Shape(dim, dim, itemsize, *more)
        for direction in get_args(Direction):
            blocks = block_sizes.default_sizes(direction, shape, span, ROWS[name])
            assert block_sizes.vmem_mib(direction, shape, *blocks) <= ROWS[name].vmem_mib


def test_an_override_is_held_against_the_generation() -> None:
    config = KernelConfig("pallas", block_q=1024, block_k=1024)
    shape = block_sizes.Shape(128, 128, 2, has_bias=False, has_dropout=False)
    choose = partial(block_sizes.choose_blocks, config, "backward", shape, 8192, 8192, 1 << 20)
    blocks = choose(ROWS["v5p"])
    assert (blocks.q, blocks.k) == (1024, 1024)
    message = r"16\.5 MiB of on-chip .* 16 MiB .*\(generation: v4"
    refused(message, choose, ROWS["v4"], error=UnsupportedError)


def test_refusals_say_what_would_work() -> None:
    def call(dtype: str, **blocks: Any) -> Any:
        q = jnp.zeros((1, 8192, 2, 128), dtype)
        return ring_attention(q, q, q, axis_name=None, kernel=KernelConfig("pallas", **blocks))

    refused("block_q=128", call, "bfloat16", block_q=100, error=UnsupportedError)
    words = r"MiB of on-chip memory, and 16 MiB is the limit \(generation: unknown\)"
    refused(words, call, "bfloat16", block_q=2048, block_k=2048, error=UnsupportedError)
    refused("not float16", call, "float16", error=UnsupportedError)


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
    mesh = Mesh(np.array(tpu.devices("v4:2x2x1", 1)), ("cp",))
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
    refused(message, call, q, error=UnsupportedError)
    text = ContextParallel(jax.make_mesh((1,), ("cp",)), "cp").explain(q, q, q, mask=mask)
    assert text.startswith("kernel xla (any device)\n") and "not pallas (tpu): it evaluates" in text


def test_support_matrix_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix"]) == 0
    check_jax_matrix(capsys.readouterr().out, "pallas")
