"""The Pallas kernels, interpreted, against the oracle: alone, in pieces, and in the ring.

The interpreter detects races and fills fresh memory with NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import jax_devices
from backends.jax_devices import Arrays, JaxBackend, assert_vmapped
from backends.tpu_interpreter import InterpretedKernel, interpreted
from blocks import CAUSAL, several_blocks
from cases import CASES, Case
from loops import CASES as LOOPS, assert_equal_bits, in_loop, unrolled
from tolerances import assert_close

from ring_core import KernelConfig, Mask, UnsupportedError
from ring_jax.attention import RingAttention
from ring_jax.autodiff import _compiled
from ring_jax_tpu import block_sizes, operands, ring_attention
from ring_jax_tpu.block_sizes import GENERATIONS

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


@pytest.mark.nightly(
    unless=["bias-shared-False", "shown-heads-False", "negative-left-False", "causal-True"]
)
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
    "window-large-contiguous-cp2", "documents-chunks-striped-cp2", "sinks-many-zigzag",
    "poison-k-contiguous", "batch-0-contiguous", "float16-contiguous", "large-contiguous",
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
