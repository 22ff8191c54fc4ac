"""Shards of more blocks than a list holds stay in Pallas, and ``explain`` says what would run.

They used to fall back to XLA silently, by the number of all blocks, visible or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends.jax_devices import JaxBackend
from backends.tpu_compiled import compiled, exposed, letters
from backends.tpu_interpreter import interpreted
from cases import Case, diagonals
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tolerances import assert_close

import ring_jax
from ring_core import KernelConfig, Mask, UnsupportedError
from ring_core.base.arguments import EMPTY, FULL
from ring_jax.autodiff import _compiled
from ring_jax_tpu import ContextParallel, block_sizes, ring_attention
from ring_jax_tpu.block_index import Walk, k_major, q_major, unpack

SMALL = KernelConfig("pallas", block_q=128, block_k=128)
CAUSAL = Mask(causal=True)
EVERYTHING = Case(
    "everything", CAUSAL, seq_len=300, softcap=2.0, sinks=0, bias="masked", alibi=1, dropout_p=0.1,
    segments="padded", softmax_scale=0.4, heads=(4, 2), dims=(8, 6), batch=2, lse_grad=True,
)  # fmt: skip
EVERY_MASK = [
    Case("window", Mask(causal=True, window=(40, 0)), seq_len=300),
    Case("documents", Mask(cu_seqlens=(0, 1, 100, 102, 151, 300)), seq_len=300),
    Case("predicate", Mask(causal=True, predicate=diagonals), seq_len=300),
    Case("fewer-keys", CAUSAL, seq_len=300, kv_seq_len=140),
    Case("keys", CAUSAL, seq_len=130, kv_seq_len=300),
    Case("bias-shared", CAUSAL, seq_len=300, bias="shared", batch=2),
    Case("poison-v", CAUSAL, seq_len=300, poison="v"),
    EVERYTHING,
]  # fmt: skip

#: By name: tokens per device, devices, batch, True for segment ids, options.
LONG: dict[str, tuple[int, int, int, bool, dict[str, Any]]] = {
    "causal": (1 << 19, 1, 1, False, {"causal": True}),
    "window": (1 << 20, 1, 1, False, {"causal": True, "window": (4095, 0)}),
    "large-batch": (1 << 17, 1, 16, True, {"causal": True}),
    "larger-batch": (1 << 15, 1, 64, True, {"causal": True, "window": (1023, 0)}),
    "gather": (
        1 << 17, 4, 1, False, {"causal": True, "window": (4095, 0), "strategy": "gather"}
    ),
}  # fmt: skip


@pytest.fixture
def few_words(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Limit lists to six words, and forget programs traced with another limit."""
    monkeypatch.setattr(block_sizes, "MAX_WORDS", 6)
    _compiled.cache_clear()
    yield monkeypatch
    _compiled.cache_clear()


def run(case: Case, monkeypatch: pytest.MonkeyPatch, *, fused: bool) -> dict[str, Any]:
    """Run a case in small blocks, interpreted."""
    monkeypatch.setattr(ring_jax, "ring_attention", ring_attention)
    # The interpreter supports no grid of traced size under check_vma=True.
    monkeypatch.setattr(jax, "shard_map", partial(jax.shard_map, check_vma=False))
    config: Any = replace(SMALL, fused_backward=fused)
    with interpreted():
        return JaxBackend().run(case, kernel=config)


@pytest.mark.nightly
def test_pieces(few_words: pytest.MonkeyPatch) -> None:
    """Every option, odd lengths and rows that see nothing give the same bits in pieces as whole."""
    pieces = run(EVERYTHING, few_words, fused=True)
    assert_close(EVERYTHING, pieces)
    few_words.setattr(block_sizes, "MAX_WORDS", 1 << 17)
    _compiled.cache_clear()
    for name, whole in run(EVERYTHING, few_words, fused=True).items():
        np.testing.assert_array_equal(pieces[name], whole, err_msg=name)


@pytest.mark.nightly
def test_pieces_in_the_ring(few_words: pytest.MonkeyPatch) -> None:
    case = Case("blocks-zigzag-cp2", Mask(causal=True, window=(200, 0)), "zigzag", 2, 768)
    assert_close(case, run(case, few_words, fused=False))


@pytest.mark.nightly
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", EVERY_MASK, ids=lambda case: case.name)
def test_pieces_of_every_mask(case: Case, few_words: pytest.MonkeyPatch, *, fused: bool) -> None:
    assert_close(case, run(case, few_words, fused=fused))


@pytest.mark.parametrize("shape", [(1, 5, 4), (2, 7, 3), (3, 4, 2), (1, 2, 6)])
def test_pieces_are_all_blocks_in_order(
    shape: tuple[int, int, int], few_words: pytest.MonkeyPatch
) -> None:
    """A piece has whole rows or columns; one without visible blocks writes a block of its own."""
    kinds = np.random.default_rng(3).integers(0, FULL + 1, shape).astype(np.int32)
    kinds[:, shape[1] // 2] = EMPTY
    few_words.setattr(block_sizes, "MAX_WORDS", shape[0] * max(shape[1:]))
    for walk, outer in ((q_major(jnp.asarray(kinds)), 0), (k_major(jnp.asarray(kinds)), 1)):
        assert walk.pieces > 1
        blocks_by_batch: list[list[list[int]]] = [[] for _ in range(shape[0])]
        for n in range(walk.pieces):
            _check_piece(walk, n, outer, blocks_by_batch)
        for batch, each in enumerate(blocks_by_batch):
            live = np.argwhere(kinds[batch] > EMPTY).tolist()
            assert each == sorted(live, key=lambda block: block[outer])


def _check_piece(walk: Walk, n: int, outer: int, blocks_by_batch: list[list[list[int]]]) -> None:
    """Check a piece's list, and add the blocks it visits to ``blocks_by_batch``."""
    entries, steps = walk.piece(jnp.int32(n))
    assert entries.size <= block_sizes.MAX_WORDS
    for row, blocks in zip(np.asarray(entries), blocks_by_batch, strict=True):
        visits = [unpack(word) for word in row[: int(steps)]]
        assert sum(visit.is_first for visit in visits) == sum(visit.is_last for visit in visits)
        places = [[int(visit.q_block), int(visit.k_block)] for visit in visits]
        assert {block[outer] // walk.height for block in places} == {n}
        live = [block for block, visit in zip(places, visits, strict=True) if visit.kind > EMPTY]
        assert live or (visits[0].is_first and visits[0].is_last)
        blocks.extend(live)


def long_call(name: str, topology: str) -> tuple[ContextParallel, list[Any], dict[str, Any]]:
    """Return the ``ContextParallel``, arrays and options of a long call on a topology's devices."""
    local, size, batch, has_ids, options = LONG[name]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh, tokens = Mesh(np.array(devices[:size]), ("cp",)), PartitionSpec(None, "cp")
    spec = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, tokens))
    arrays = [spec((batch, local * size, heads, 128), jnp.bfloat16) for heads in (2, 1, 1)]
    arrays += [spec((batch, local * size), jnp.int32)] if has_ids else []
    return ContextParallel(mesh, "cp", layout="contiguous"), arrays, options


def lowered(name: str, topology: str, *, backward: bool) -> tuple[Any, str]:
    """Return a long call's program, and what ``explain`` says of it."""
    cp, arrays, options = long_call(name, topology)
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
    """A long call has one Pallas kernel per pass and part of the keys, however many pieces."""
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
def test_transfers_beside_pieces(few_words: pytest.MonkeyPatch, *, backward: bool) -> None:
    """K/V are sent while a loop of launches runs, as they are with a single launch."""
    few_words.setattr(block_sizes, "MAX_WORDS", 32)
    program = compiled("v5e:2x2", "zigzag", backward=backward, causal=True)
    assert letters(program).count("K") == (8 if backward else 4)
    assert " while(" in program.as_text()
    assert exposed(program) == []


def explained(config: KernelConfig, tokens: int) -> list[str]:
    """Return the lines of ``explain`` for a v4."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v4:2x2x1").devices
    cp = ContextParallel(Mesh(np.array(devices[:1]), ("cp",)), "cp", layout="contiguous")
    said: list[str] = []

    def explain(q: Any) -> Any:
        said.append(cp.explain(q, q, q, causal=True, kernel=config))
        return q

    jax.eval_shape(explain, jax.ShapeDtypeStruct((1, tokens, 1, 128), jnp.bfloat16))
    return said[0].splitlines()


def test_explain_says_why_not() -> None:
    large = explained(KernelConfig(block_q=2048, block_k=2048), 8192)
    assert large[0] == "kernel xla (any device)"
    assert "not pallas (tpu): the forward with blocks of 2048 queries and 2048" in large[1]
    assert "16 MiB is the limit (generation: v4)" in large[1]
    many = explained(KernelConfig(block_q=128, block_k=128), 1 << 21)
    assert many[0] == "kernel xla (any device)"
    assert "are 16384 x 16384, and 8192 along a side are the most" in many[1]
    assert explained(KernelConfig(), 8192)[0] == "kernel pallas (tpu)"


def test_explain_tells_a_backward_that_another_kernel_does() -> None:
    config = KernelConfig(block_q=1024, block_k=1024)
    first, second, third, *_ = explained(config, 8192)
    assert [first, second] == ["kernel pallas (tpu)", "kernel xla (any other device)"]
    assert third.startswith("  not the backward of pallas: the backward with blocks of 1024")


def test_a_named_kernel_is_refused_before_it_is_traced() -> None:
    with pytest.raises(UnsupportedError, match=r"^kernel 'pallas': blocks .* larger block_q"):
        explained(replace(SMALL), 1 << 21)
