"""The Pallas kernels, interpreted, against the oracle: alone, in pieces, and in the ring.

The interpreter detects races and fills fresh memory with NaN. The lists of blocks that kernels
compute have those with a visible pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from backends import jax_devices
from backends.jax_devices import Arrays, JaxBackend, assert_vmapped
from backends.tpu_interpreter import InterpretedKernel, interpreted
from blocks import CAUSAL, several_blocks
from cases import CASES, RINGS, Case, masks
from loops import CASES as LOOPS, assert_equal_bits, in_loop, unrolled
from tolerances import assert_close

from ring_core import KernelConfig, Mask, RingProgram, UnsupportedError
from ring_core.base.arguments import EMPTY, FULL, PARTIAL, TILE
from ring_core.programs.ring import TABLE_COLUMNS
from ring_jax.attention import RingAttention
from ring_jax.autodiff import _compiled
from ring_jax.kernels.xla import XlaKernel
from ring_jax.rank_view import Launches, RankView, step_table
from ring_jax.records import CallSpec, Inputs, KVPayload, QueryPayload
from ring_jax_tpu import block_index as index, block_sizes, operands, ring_attention
from ring_jax_tpu.block_sizes import GENERATIONS, Blocks

SMALL = KernelConfig("pallas", block_q=128, block_k=128)
BLOCKS = several_blocks(
    300, 300, "float16", "wider", "wider-k", "wider-v", "negative-scale", "no-scale", "spread",
    "segments-chunks", "segments-documents", "bias-large", "poison-q", "poison-k", "v-inf", "bias-nan",
)  # fmt: skip
BLOCKS["keys"] = Case("keys", CAUSAL, seq_len=130, kv_seq_len=300)
FUSED = (
    "causal", "gqa", "segments", "shown-heads", "negative-left", "negative-rows", "poison-v", "everything",
)  # fmt: skip
IN_PIECES = (
    "window", "documents", "predicate", "fewer-keys", "keys", "bias-shared", "poison-v", "everything",
)  # fmt: skip


def alone(case: Case, *, fused: bool) -> Arrays:
    """Run a case in small blocks on one device, without a ring."""
    with interpreted():
        return jax_devices.alone(case, replace(SMALL, fused_backward=fused), ring_attention)


@pytest.mark.nightly(unless=["shown-heads-False", "negative-left-False", "causal-True"])
@pytest.mark.parametrize(
    ("name", "fused"), [*product(BLOCKS, [False]), *((name, True) for name in FUSED)]
)
def test_several_blocks(name: str, *, fused: bool) -> None:
    assert_close(BLOCKS[name], alone(BLOCKS[name], fused=fused))


@pytest.fixture
def few_words(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Limit lists to six words, and forget programs traced with another limit."""
    monkeypatch.setattr(block_sizes, "MAX_WORDS", 6)
    _compiled.cache_clear()
    yield monkeypatch
    _compiled.cache_clear()


@pytest.mark.nightly
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", IN_PIECES)
def test_pieces(name: str, few_words: pytest.MonkeyPatch, *, fused: bool) -> None:
    """Shards of more blocks than a list holds are right; all options give the bits of one list."""
    pieces = alone(BLOCKS[name], fused=fused)
    assert_close(BLOCKS[name], pieces)
    if name == "everything" and fused:
        few_words.setattr(block_sizes, "MAX_WORDS", 1 << 17)
        _compiled.cache_clear()
        for result, whole in alone(BLOCKS[name], fused=fused).items():
            np.testing.assert_array_equal(pieces[result], whole, err_msg=result)


@pytest.mark.nightly(unless=["TPU v6e"])
@pytest.mark.parametrize("name", ["TPU v4", "TPU v6e", "TPU7x"])
def test_ways_of_generations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "generation_of", lambda _: GENERATIONS[name])
    jax.clear_caches()  # programs traced for other generations
    mask = Mask(causal=True, window=(400, 0))
    case = Case("parts", mask, seq_len=600, dims=(256, 128), dtype="bfloat16", softcap=1.5)
    config = KernelConfig("pallas", block_q=512, block_k=512, fused_backward=True)
    with interpreted():
        assert_close(case, jax_devices.alone(case, config, ring_attention))


@pytest.mark.nightly(unless=["heads1-300"])
@pytest.mark.parametrize("seq_len", [100, 200, 300])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1)])
def test_blocks_of_dq_that_come_back_at_once(seq_len: int, heads: tuple[int, int]) -> None:
    """Blocks of dQ are right if fetched again while their write-back is still under way.

    A column has one to six visits.
    """
    case = Case("few-rows", Mask(), seq_len=seq_len, kv_seq_len=500, heads=heads)
    assert_close(case, alone(case, fused=True))


def test_vmap() -> None:
    with interpreted():
        assert_vmapped(ring_attention, replace(SMALL, fused_backward=True), 256)


def test_a_bias_hides_what_is_not_finite() -> None:
    rng, hidden = np.random.default_rng(0), 5
    qkv = [jnp.asarray(rng.standard_normal((1, 256, 2, 8)), jnp.float32) for _ in range(3)]
    qkv = [qkv[0], *(x.at[:, hidden].set(jnp.nan) for x in qkv[1:])]
    bias = jnp.zeros((1, 1, 256, 256)).at[..., hidden].set(-jnp.inf)

    def loss(qkv: Any, kernel: Any) -> Any:
        out = ring_attention(*qkv, axis_name=None, bias=bias, kernel=kernel)
        return jnp.sum(out**2), out

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    with interpreted():
        actual = jax.block_until_ready(run(qkv, SMALL))
    for ours, expected in zip(*map(jax.tree.leaves, (actual, run(qkv, "xla"))), strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


WINDOW = Mask(causal=True, window=(200, 0))
#: Cases over devices whose kernels are all parts of one program.
IN_ONE_PROGRAM = {
    "causal": CASES["causal-balanced-cp3"], "everything": CASES["everything-zigzag"],
    "blocks": Case("blocks", WINDOW, "zigzag", 2, 512), "pieces": Case("pieces", WINDOW, "zigzag", 2, 768),
}  # fmt: skip


@pytest.mark.nightly(only=["everything", "pieces"])
@pytest.mark.parametrize("name", IN_ONE_PROGRAM)
def test_in_one_program(name: str, request: pytest.FixtureRequest) -> None:
    config: Any = "pallas"
    if name in ("blocks", "pieces"):
        patched: pytest.MonkeyPatch = request.getfixturevalue(
            "few_words" if name == "pieces" else "monkeypatch"
        )
        # The interpreter supports no grid of traced size under check_vma=True.
        patched.setattr(jax, "shard_map", partial(jax.shard_map, check_vma=False))
        config = replace(SMALL, fused_backward=False if name == "pieces" else None)
    with interpreted():
        results = JaxBackend(ring_attention).run(IN_ONE_PROGRAM[name], kernel=config)
    assert_close(IN_ONE_PROGRAM[name], results)


@pytest.fixture(scope="module")
def backend() -> JaxBackend:
    """Return a backend whose kernel all tests share, with its compiled programs."""
    return JaxBackend(RingAttention((InterpretedKernel(),)))


@pytest.mark.nightly(unless=[
    "documents-chunks-striped-cp2", "sinks-many-zigzag", "batch-0-contiguous", "float16-contiguous",
    "large-contiguous",
])  # fmt: skip
@pytest.mark.timeout(1500)  # interpreted programs of eight devices take minutes
@pytest.mark.parametrize("name", CASES)
def test_in_the_ring(name: str, backend: JaxBackend) -> None:
    """A case of the table is right, or raises UnsupportedError for its dtype."""
    case = CASES[name]
    if case.dtype not in ("float32", "bfloat16"):
        with pytest.raises(UnsupportedError, match=f"kernel 'pallas': .*not {case.dtype}"):
            backend.run(case, kernel="pallas")
        return
    with interpreted():
        assert_close(case, backend.run(case, kernel="pallas"))


@pytest.mark.nightly(unless=["causal"])
@pytest.mark.parametrize("name", LOOPS)
def test_in_a_loop(name: str, backend: JaxBackend) -> None:
    """A ring rolled into a loop is exact, and bitwise equal to its unrolled stages."""
    with interpreted():
        looped = in_loop(backend, LOOPS[name], "pallas")
        assert_close(LOOPS[name], looped)
        if name != "causal":  # per change; it compiles all unrolled stages, too
            assert_equal_bits(looped, unrolled(backend, LOOPS[name], "pallas"))


CP, LENGTH = 4, 4 * 6 * TILE
NOTHING = Inputs(*[None] * len(Inputs._fields))  # type: ignore[arg-type]  # none is read


def shown(
    program: RingProgram, rank: int, step: int, *, helped: bool
) -> tuple[npt.NDArray[np.bool_], int]:
    """Return the pairs that a rank computes for its own queries, or lent ones, and their items."""
    plan, items = program.plan, 0
    visible = np.zeros((plan.q_layout.local_len, plan.k_layout.local_len), dtype=bool)
    for row in program.table(step)[rank].tolist():
        item = dict(zip(TABLE_COLUMNS, row, strict=True))
        rows, columns = (slice(item[f"{x}_start"], item[f"{x}_stop"]) for x in "qk")
        if rows.start == rows.stop or (item["q_rank"] != rank) != helped:
            continue
        q_pos, k_pos = plan.q_positions(item["q_rank"]), plan.k_positions(item["kv_rank"])
        dense = plan.mask.dense(q_pos[rows], k_pos[columns])
        distance = np.subtract.outer(*map(np.arange, dense.shape))
        visible[rows, columns] |= dense & (distance >= item["lo"]) & (distance <= item["hi"])
        items += 1
    return visible, items


def computed(program: RingProgram, rank: int, step: int, blocks: Blocks, *, helped: bool) -> Any:
    """Return the block kinds that a rank's kernel gets."""
    call = CallSpec(program, None, 1.0, None, 0.0, (XlaKernel(),), None, "float32", 8)  # type: ignore[arg-type]  # its strategy is not read
    side = RankView(call, NOTHING, jnp.int32(rank))
    launches = Launches.of(step_table(program, step), for_peer=helped)
    if launches.table is None:
        return None
    work = jax.tree.map(lambda x: x[0], side.work_of(launches))
    q, kv = (
        jnp.zeros((1, 1, layout.local_len, 1))
        for layout in (program.plan.q_layout, program.plan.k_layout)
    )
    rows = side.rows(launches, work.q_rank, QueryPayload(q, None, None, None))
    columns = side.columns(launches, side.key_positions(work.kv_rank), KVPayload(kv, None))
    return np.asarray(index.block_kinds(rows, columns, work, blocks))[0]


#: Combinations that run per change: each mask in a ring, in turn.
PER_CHANGE = [f"{name}-{ring}" for name, ring in zip(masks(LENGTH, CP), cycle(RINGS), strict=False)]


@pytest.mark.nightly(unless=PER_CHANGE)
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("name", masks(LENGTH, CP))
def test_live_blocks(name: str, ring: str) -> None:
    layout, strategy = RINGS[ring]
    case = Case("", masks(LENGTH, CP)[name], layout, CP, LENGTH, strategy=strategy)
    local, size = LENGTH // CP, 2 * TILE
    blocks = Blocks(size, TILE, local, local)
    for step, rank, helped in product(range(case.program.num_steps), range(CP), (False, True)):
        kinds = computed(case.program, rank, step, blocks, helped=helped)
        if kinds is not None:
            visible, items = shown(case.program, rank, step, helped=helped)
            tiles = visible.reshape(local // size, size, local // TILE, TILE)
            np.testing.assert_array_equal(kinds != EMPTY, tiles.any(axis=(1, 3)))
            full = tiles.all(axis=(1, 3))
            assert full[kinds == FULL].all()
            assert items > 1 or (kinds[full] == FULL).all()  # no item may see all that several do


@pytest.mark.parametrize("shape", [(2, 7, 3), (1, 2, 6)])
@pytest.mark.parametrize("whole", [False, True])
def test_lists_have_all_blocks_in_order(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, *, whole: bool
) -> None:
    """A piece has whole rows or columns; one without visible blocks writes a block of its own."""
    kinds = np.random.default_rng(3).integers(0, FULL + 1, shape).astype(np.int32)
    kinds[:, shape[1] // 2] = EMPTY
    if not whole:
        monkeypatch.setattr(block_sizes, "MAX_WORDS", shape[0] * max(shape[1:]))
    for walk, outer in (
        (index.q_major(jnp.asarray(kinds)), 0),
        (index.k_major(jnp.asarray(kinds)), 1),
    ):
        assert (walk.pieces == 1) == whole
        blocks_by_batch: list[list[list[int]]] = [[] for _ in range(shape[0])]
        for n in range(walk.pieces):
            entries, steps = walk.whole() if whole else walk.piece(jnp.int32(n))
            assert entries.size <= block_sizes.MAX_WORDS
            for row, blocks in zip(np.asarray(entries), blocks_by_batch, strict=True):
                visits = [index.unpack(word) for word in row[: int(steps)]]
                assert sum(x.is_first for x in visits) == sum(x.is_last for x in visits)
                live = [[int(x.q_block), int(x.k_block)] for x in visits if x.kind > EMPTY]
                assert {int(x[outer]) // walk.height for x in visits} == {n}
                assert live or (visits[0].is_first and visits[0].is_last)
                blocks.extend(live)
        for batch, each in enumerate(blocks_by_batch):
            expected = np.argwhere(kinds[batch] > EMPTY).tolist()
            assert each == sorted(expected, key=lambda block: block[outer])


def test_numbers_that_are_not_finite() -> None:
    """Partial blocks with nonfinite inputs become NONFINITE, in the batch rows that have them."""
    blocks = Blocks(128, 128, 384, 256)
    kinds = jnp.asarray([[[FULL, EMPTY], [PARTIAL, PARTIAL], [PARTIAL, FULL]]], jnp.int32)
    rows, columns = np.zeros((2, 300), bool), np.zeros((2, 256), bool)
    rows[0, [0, 299]] = columns[1, 255] = True
    first = [[FULL, EMPTY], [PARTIAL, PARTIAL], [index.NONFINITE, FULL]]
    second = [[FULL, EMPTY], [PARTIAL, index.NONFINITE], [PARTIAL, FULL]]
    both = [[FULL, EMPTY], [PARTIAL, index.NONFINITE], [index.NONFINITE, FULL]]
    for many, expected in ((1, [both]), (2, [first, second])):
        repeated = jnp.repeat(kinds, many, axis=0)
        results = index.with_nonfinite(repeated, jnp.asarray(rows), jnp.asarray(columns), blocks)
        np.testing.assert_array_equal(results, expected)
