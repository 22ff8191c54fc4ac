"""The Pallas kernels: interpreted against the oracle, and compiled without a TPU."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from backends import jax_devices
from backends.jax_devices import JaxBackend
from backends.tpu_interpreter import interpreted
from cases import Case, crossed, diagonals, prefix
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from negative_biases import NegativeCase
from tolerances import assert_close

import ring_jax
from ring_core import KernelConfig, Mask
from ring_core.base.arguments import EMPTY, FULL, PARTIAL
from ring_core.programs.ring import TABLE_COLUMNS
from ring_jax.attention import RingAttention
from ring_jax.kernels.xla import XlaKernel
from ring_jax.records import Item, ItemTable, KeyBlock, QueryBlock
from ring_jax_tpu import PallasKernel, operands
from ring_jax_tpu.block_index import (
    NONFINITE,
    block_kinds,
    k_major,
    q_major,
    unpack,
    with_nonfinite,
)
from ring_jax_tpu.block_sizes import GENERATIONS, Blocks

ring_attention = RingAttention((PallasKernel(), XlaKernel()))
TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
SMALL = KernelConfig("pallas", block_q=128, block_k=128)
CAUSAL = Mask(causal=True)
LOW: dict[str, Any] = {"low": -1e10, "batch": 2, "lse_grad": True}


# Cases of several blocks on one device, with lengths that no block size divides.
_CASES = [
    Case("causal", CAUSAL),
    Case("full", Mask(), heads=(2, 2)),
    Case("window", Mask(causal=True, window=(40, 0)), lse_grad=True),
    Case("window-both", Mask(window=(100, 33))),
    Case("chunks", Mask(causal=True, chunk_size=77)),
    Case("documents", Mask(cu_seqlens=(0, 1, 100, 102, 151, 300))),
    Case("predicate", Mask(causal=True, predicate=diagonals)),
    Case("predicate-documents", Mask(predicate=prefix, cu_seqlens=(0, 153, 300))),
    Case("predicate-bits", Mask(predicate=crossed)),
    Case("keys", CAUSAL, seq_len=130, kv_seq_len=300),
    Case("fewer-keys", CAUSAL, kv_seq_len=140),
    Case("gqa", CAUSAL, heads=(6, 2), batch=2, dims=(24, 8)),
    Case("bfloat16", CAUSAL, dtype="bfloat16", dims=(64, 64)),
    Case("softcap", CAUSAL, softcap=1.5, softmax_scale=0.7, sinks=0),
    Case("segments", CAUSAL, segments="padded", batch=2),
    Case("segments-pair", Mask(), segments="pair"),
    Case("alibi", CAUSAL, alibi=2, batch=2),
    Case("dropout", CAUSAL, dropout_p=0.3, batch=2),
    Case("bias", CAUSAL, bias="masked", batch=2),
    Case("bias-shared", CAUSAL, bias="shared", batch=2),
    Case("bias-very-negative", CAUSAL, bias="very-negative", segments="padded", batch=2),
    Case("shown-heads", Mask(), shown="by-head", poison="k", lse_grad=True),
    Case("shown-rows", Mask(), shown="by-sequence", batch=2, bias="full"),
    NegativeCase("negative-left", CAUSAL, bias="shared", region="left padding", segments="documents", **LOW),
    NegativeCase("negative-part", CAUSAL, bias="heads", region="part of a row", **LOW),
    NegativeCase("negative-rows", CAUSAL, bias="batch", region="whole rows", segments="documents", **LOW),
    Case("poison-v", CAUSAL, poison="v"),
    Case("poison-padding", Mask(), segments="padded", poison="padding"),
    Case(
        "everything", CAUSAL, softcap=2.0, sinks=0, bias="masked", alibi=1, dropout_p=0.1,
        segments="padded", softmax_scale=0.4, heads=(4, 2), dims=(8, 6), batch=2, lse_grad=True,
    ),
]  # fmt: skip
SEVERAL_BLOCKS = [case if case.seq_len == 130 else replace(case, seq_len=300) for case in _CASES]


def alone(case: Case, config: KernelConfig) -> dict[str, npt.NDArray[Any]]:
    """Run a case on one device, without a ring."""
    with interpreted():
        return jax_devices.alone(case, config, ring_attention)


@pytest.mark.nightly(unless=["bias-shared", "shown-heads", "negative-left"])
@pytest.mark.parametrize("case", SEVERAL_BLOCKS, ids=lambda case: case.name)
def test_two_backward_kernels(case: Case) -> None:
    assert_close(case, alone(case, replace(SMALL, fused_backward=False)))


def test_vmap() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 1, 256, 1, 8)), jnp.float32) for _ in range(3))
    ids = jnp.asarray(rng.integers(0, 2, (2, 1, 256)).cumsum(axis=2) // 60, jnp.int32)
    config = replace(SMALL, fused_backward=True)

    def loss(q: Any, k: Any, v: Any, ids: Any, kernel: KernelConfig) -> Any:
        out = ring_attention(q, k, v, axis_name=None, segment_ids=ids, causal=True, kernel=kernel)
        return (out * jnp.cos(v)).sum()

    grads = jax.vmap(jax.grad(loss, (0, 1, 2)), in_axes=(0, 0, 0, 0, None))
    with interpreted():
        actual = jax.block_until_ready(grads(q, k, v, ids, config))
    for a, b in zip(actual, grads(q, k, v, ids, KernelConfig("xla")), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.nightly(unless=["causal"])
@pytest.mark.parametrize(
    "name",
    [
        "causal", "gqa", "segments", "shown-heads", "negative-left", "negative-rows", "poison-v",
        "everything",
    ],
)  # fmt: skip
def test_fused_backward_kernel(name: str) -> None:
    (case,) = (case for case in SEVERAL_BLOCKS if case.name == name)
    assert_close(case, alone(case, replace(SMALL, fused_backward=True)))


@pytest.mark.nightly(unless=["TPU v6e"])
@pytest.mark.parametrize("name", ["TPU v4", "TPU v6e", "TPU7x"])
def test_ways_of_generations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "generation_of", lambda _: GENERATIONS[name])
    jax.clear_caches()  # programs traced for other generations
    mask = Mask(causal=True, window=(400, 0))
    case = Case("parts", mask, seq_len=600, dims=(256, 128), dtype="bfloat16", softcap=1.5)
    config = KernelConfig("pallas", block_q=512, block_k=512, fused_backward=True)
    assert_close(case, alone(case, config))


@pytest.mark.nightly(unless=["heads1-300"])
@pytest.mark.parametrize("seq_len", [100, 200, 300])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1)])
def test_blocks_of_dq_that_come_back_at_once(seq_len: int, heads: tuple[int, int]) -> None:
    """Blocks of dQ are right if fetched again while their write-back is still under way.

    A column has one to six visits.
    """
    case = Case("few-rows", Mask(), seq_len=seq_len, kv_seq_len=500, heads=heads)
    assert_close(case, alone(case, replace(SMALL, fused_backward=True)))


def test_several_blocks_in_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_jax, "ring_attention", ring_attention)
    monkeypatch.setattr(jax, "shard_map", partial(jax.shard_map, check_vma=False))
    case = Case("blocks-zigzag-cp2", Mask(causal=True, window=(200, 0)), "zigzag", 2, 512)
    with interpreted():
        config: Any = SMALL
        results = JaxBackend().run(case, kernel=config)
    assert_close(case, results)


@pytest.mark.parametrize(
    "mask",
    [
        Mask(), CAUSAL, Mask(causal=True, window=(300, 0)), Mask(window=(10, 200)),
        Mask(causal=True, chunk_size=256), Mask(causal=True, cu_seqlens=(0, 130, 600, 1024)),
    ],
    ids=lambda mask: mask.describe(),
)  # fmt: skip
@pytest.mark.parametrize("shift", [0, 1])
def test_kinds_of_blocks(mask: Mask, shift: int) -> None:
    """Full blocks are all visible and empty ones not at all, for positions of a zigzag ring."""
    case = Case("kinds", mask, "zigzag", 2, 1024)
    plan, program, size = case.plan, case.program, 128
    step = next((n for n, step in enumerate(program.steps) if step.shift == shift), None)
    if step is None:
        return
    q_pos, k_pos = plan.q_positions(1), plan.k_positions((1 - shift) % 2)
    borders = plan.boundaries
    cells = [
        None if borders is None else jnp.searchsorted(jnp.asarray(borders), x, side="right")
        for x in (q_pos, k_pos)
    ]
    q, kv, no = jnp.zeros((1, 1, 512, 8)), jnp.zeros((1, 1, 512, 16)), None
    rows = QueryBlock(q, jnp.asarray(q_pos), jnp.asarray(q_pos), cells[0], no, no, no, no, no, no)
    columns = KeyBlock(kv, jnp.asarray(k_pos), cells[1], no)
    columns_of_items = [TABLE_COLUMNS.index(name) for name in Item._fields]
    items = jnp.asarray(program.table(step)[1][:, columns_of_items])
    work = ItemTable(items, None, jnp.int32(1), jnp.int32(1 - shift) % 2, None)
    blocks = Blocks(size, size, 512, 512)
    kinds = block_kinds(rows, columns, work, blocks)
    visible = mask.dense(q_pos, k_pos).reshape(4, size, 4, size).swapaxes(1, 2)
    np.testing.assert_array_equal(kinds[0] == FULL, visible.all(axis=(2, 3)))
    np.testing.assert_array_equal(kinds[0] == EMPTY, ~visible.any(axis=(2, 3)))
    for index, outer in ((q_major(kinds).whole(), 0), (k_major(kinds).whole(), 1)):
        entries = [unpack(word) for word in np.asarray(index.words[0])[: int(index.steps)]]
        live = sorted(np.argwhere(kinds[0] > EMPTY).tolist(), key=lambda block: block[outer])
        assert [[word.q_block, word.k_block] for word in entries if word.kind > EMPTY] == live
        assert sum(word.is_first for word in entries) == sum(word.is_last for word in entries)


def test_numbers_that_are_not_finite() -> None:
    """Partial blocks with nonfinite inputs become NONFINITE, in the batch rows that have them."""
    blocks = Blocks(128, 128, 384, 256)
    kinds = jnp.asarray([[[FULL, EMPTY], [PARTIAL, PARTIAL], [PARTIAL, FULL]]], jnp.int32)
    rows, columns = np.zeros((2, 300), bool), np.zeros((2, 256), bool)
    rows[0, [0, 299]] = columns[1, 255] = True
    first = [[FULL, EMPTY], [PARTIAL, PARTIAL], [NONFINITE, FULL]]
    second = [[FULL, EMPTY], [PARTIAL, NONFINITE], [PARTIAL, FULL]]
    both = [[FULL, EMPTY], [PARTIAL, NONFINITE], [NONFINITE, FULL]]
    for many, expected in ((1, [both]), (2, [first, second])):
        results = with_nonfinite(
            jnp.repeat(kinds, many, axis=0), jnp.asarray(rows), jnp.asarray(columns), blocks
        )
        np.testing.assert_array_equal(results, expected)


@lru_cache
def _device(topology: str) -> Any:
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]


def compile_for(
    topology: str, *, tokens: tuple[int, int] = (2048, 2048), dims: tuple[int, int] = (128, 128),
    dtype: str = "bfloat16", config: KernelConfig | None = None,
    arrays: dict[str, tuple[str, tuple[int, ...]]] | None = None, **options: Any,
) -> None:  # fmt: skip
    """Compile forward and backward for a chip of a topology; Mosaic must accept the kernels."""
    mesh = Mesh(np.array([_device(topology)]), ("cp",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    spec = partial(jax.ShapeDtypeStruct, sharding=everywhere)
    q = spec((1, tokens[0], 4, dims[0]), dtype)
    k, v = (spec((1, tokens[1], 2, dim), dtype) for dim in dims)
    dout = spec((1, tokens[0], 4, dims[1]), dtype)
    more = {name: spec(shape, kind) for name, (kind, shape) in (arrays or {}).items()}

    @partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    def both(q: Any, k: Any, v: Any, dout: Any, more: dict[str, Any]) -> Any:
        def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
            bias_option = {**more, "bias": bias}
            return ring_attention(
                q, k, v, axis_name=None, kernel=config or "pallas", **bias_option, **options
            )

        out, pull = jax.vjp(call, q, k, v, more.get("bias"))
        return out, pull(dout)

    jax.jit(both).lower(q, k, v, dout, more).compile()


@pytest.mark.nightly  # per change `test_compiled` compiles for a chip and reads the schedule
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_compiles(topology: str, *, fused: bool) -> None:
    config = KernelConfig("pallas", fused_backward=fused)
    compile_for(topology, tokens=(8192, 8192), config=config, causal=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "narrow": {"dims": (64, 64)},
    "v-dim": {"dims": (192, 128)},
    "float32": {"dims": (256, 256), "dtype": "float32"},
    "odd": {"tokens": (2004, 1000)},
    "tiny": {"tokens": (6, 6), "dims": (8, 8)},
    "documents": {"mask": Mask(causal=True, cu_seqlens=(0, 5, 700, 2048))},
    "predicate": {"mask": Mask(causal=True, predicate=diagonals)},
    "segments": {"softcap": 30.0, "arrays": {"segment_ids": ("int32", (1, 2048))}},
    "dropout": {
        "dropout_p": 0.1, "dropout_seed": 3, "arrays": {"alibi_slopes": ("float32", (4,))},
    },
    "bias": {"arrays": {"bias": ("float32", (1, 1, 2048, 2048))}},
    "mask": {"arrays": {"mask": ("bool", (2048, 2048))}},
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIONS)
def test_options_compile(name: str) -> None:
    compile_for("v5e:2x2", **OPTIONS[name])


def test_a_program_keeps_no_arrays_of_its_trace() -> None:
    """Tracing leaks no arrays: the cached function for ``vmap`` must not hold those around it."""
    x = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, 1, 256, 256), jnp.float32)

    def loss(x: jax.Array, bias: jax.Array) -> jax.Array:
        return ring_attention(x, x, x, axis_name=None, kernel="pallas", bias=bias).sum()

    with jax.checking_leaks():
        assert jax.eval_shape(jax.grad(loss), x, bias).shape == x.shape


T, HIDDEN = 256, 5


def test_a_bias_hides_what_is_not_finite() -> None:
    rng, attend = np.random.default_rng(0), RingAttention((PallasKernel(), XlaKernel()))
    qkv = [jnp.asarray(rng.standard_normal((1, T, 2, 8)), jnp.float32) for _ in range(3)]
    qkv = [qkv[0], *(x.at[:, HIDDEN].set(jnp.nan) for x in qkv[1:])]
    bias = jnp.zeros((1, 1, T, T)).at[..., HIDDEN].set(-jnp.inf)

    def loss(qkv: Any, kernel: Any) -> Any:
        out = attend(*qkv, axis_name=None, bias=bias, kernel=kernel)
        return jnp.sum(out**2), out

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    with interpreted():
        actual = jax.block_until_ready(run(qkv, KernelConfig("pallas", block_q=128, block_k=128)))
    for ours, expected in zip(*map(jax.tree.leaves, (actual, run(qkv, "xla"))), strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
