"""Kernel ``cudnn`` on GPUs agrees with the oracle, alone and in merged steps."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import cudnn
from cases import Bias, Case
from tolerances import assert_close

from ring_core import Mask, reference
from ring_jax.kernels import compute_capability
from ring_jax.records import AttentionState
from ring_jax.strategies.steps import merge
from ring_jax_gpu import fmha, ring_attention

CAUSAL = Mask(causal=True)
HOPPER = 90
#: Head dims of Q and K and of V, and query and key heads.
SHAPES = [
    ((64, 64), (4, 1)), ((80, 80), (4, 2)), ((96, 96), (2, 2)), ((128, 128), (8, 2)),
    ((160, 160), (4, 2)), ((192, 128), (4, 4)), ((192, 128), (4, 1)), ((128, 64), (4, 2)),
    ((64, 96), (4, 2)), ((256, 256), (4, 1)), ((100, 100), (4, 2)), ((250, 250), (4, 2)),
    ((190, 121), (4, 2)), ((33, 130), (2, 1)),
]  # fmt: skip
usual = partial(cudnn.case_of, dims=(64, 64), seq_len=256)
CASES = [
    *(
        usual(f"{dims}-{heads}-{mask.causal}-{length}", mask, dims=dims, heads=heads, seq_len=length)
        for (dims, heads), mask, length in product(SHAPES, (CAUSAL, Mask()), (256, 261))
    ),
    usual("float16", CAUSAL, dtype="float16", batch=2),
    usual("float16-256", CAUSAL, dtype="float16", dims=(256, 256)),
    usual("short", CAUSAL, seq_len=3),
    usual("one-query", Mask(), seq_len=1, dims=(256, 256), kv_seq_len=300),
    usual("one-key", Mask(), dims=(192, 128), kv_seq_len=1),
    usual("window", Mask(causal=True, window=(100, 0)), dims=(256, 256)),
    usual("window-odd", Mask(causal=True, window=(33, 0)), seq_len=261),
    usual("fewer-keys", CAUSAL, kv_seq_len=133), usual("more-keys", Mask(), kv_seq_len=605),
    usual("sinks", CAUSAL, sinks=0), usual("scale", CAUSAL, softmax_scale=0.3),
    usual("spread", CAUSAL, spread=40.0),
    *(usual(f"bias-{bias}", CAUSAL, bias=bias, batch=2) for bias in get_args(Bias)),
    usual("bias-full-mask", Mask(), bias="full", batch=2),
    usual("bias-keys", Mask(), bias="full", kv_seq_len=130),
    usual("bias-256", CAUSAL, dims=(256, 256), bias="shared"),
    usual("bias-mixed", CAUSAL, dims=(192, 128), bias="full"),
    usual("bias-masked-full", Mask(), bias="masked"),
    usual("bias-very-negative-full", Mask(), bias="very-negative"),
    usual("bias-float16", Mask(), dtype="float16", bias="masked"),
]  # fmt: skip
#: With a bias, squares must have even sizes.
RING = [
    *product(["contiguous", "zigzag", "striped"], [None]),
    *product(["contiguous", "zigzag"], ["full"]),
]


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if compute_capability() != HOPPER:
        pytest.skip("head dims above 128 are for Hopper")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    assert_close(case, cudnn.run(case))


@pytest.mark.parametrize(("layout", "bias"), RING)
@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 4)]
)
def test_in_the_ring(layout: Any, size: int, bias: Any) -> None:
    options = {"seq_len": 1024, "dims": (192, 128), "bias": bias}
    case = usual(f"{layout}-cp{size}-{bias}", CAUSAL, layout, size, **options)
    assert_close(case, cudnn.run(case))


def test_parts_that_merge() -> None:
    """Parts merge: ``lse`` is a natural logarithm, and the backward accepts that of all parts."""
    rng = np.random.default_rng(0)
    shapes = ((2, 4, 130, 128), (2, 2, 300, 128), (2, 2, 300, 128), (2, 4, 130, 128))
    q, k, v, dout = (jnp.asarray(rng.standard_normal(shape), "bfloat16") for shape in shapes)
    pattern = fmha.Pattern(128**-0.5, causal=False, window=None)
    parts = [(k[:, :, some], v[:, :, some]) for some in (slice(0, 101), slice(101, 300))]

    def both(*parts: Any) -> Any:
        states = [AttentionState(*fmha.attend(pattern, q, k, v, None)) for k, v in parts]
        wide = [x._replace(out=x.out.astype("float32")) for x in states]
        out, lse = merge(*wide)
        grads = [
            fmha.differentiate(pattern, q, k, v, None, lse, out.astype(q.dtype), dout)[:3]
            for k, v in parts
        ]
        return out, lse, grads

    out, lse, grads = jax.jit(both)(*parts)
    dq = sum(x[0].astype("float32") for x in grads)
    dk, dv = (jnp.concatenate([x[n] for x in grads], axis=2) for n in (1, 2))
    behind = [np.asarray(x, np.float64).swapaxes(1, 2) for x in (dout, q, k, v)]
    expected, expected_lse = reference.attention(*behind[1:])
    np.testing.assert_allclose(lse, expected_lse, atol=1e-3)
    expected_value = (expected, *reference.attention_grads(*behind)[:3])
    for a, b in zip((out, dq, dk, dv), expected_value, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64).swapaxes(1, 2), b, atol=0.03)


@pytest.mark.parametrize(("dim", "taken"), [(64, True), (128, False), (192, True), (250, True)])
def test_what_auto_runs(dim: int, taken: bool) -> None:
    x = jnp.zeros((1, 256, 2, dim), "bfloat16")

    def call(q: Any, k: Any, v: Any) -> Any:
        return ring_attention(q, k, v, axis_name=None, causal=True)

    text = str(jax.jit(call).lower(x, x, x).compile().as_text())
    assert ("__cudnn$fmhaSoftmax" in text) == taken
