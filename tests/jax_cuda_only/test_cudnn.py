"""Kernel ``cudnn`` on GPUs agrees with the oracle, alone and in merged steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import cudnn
from cases import Case
from tolerances import assert_close

from ring_core import Mask, reference
from ring_jax.kernels import compute_capability
from ring_jax.records import AttentionState
from ring_jax.strategies.steps import merge
from ring_jax_gpu import fmha, ring_attention

CAUSAL = Mask(causal=True)
HOPPER = 90
#: Head dims of Q and K and of V, and query and key heads.
SHAPES: dict[str, dict[str, Any]] = {
    "64": {"dims": (64, 64), "heads": (4, 1)}, "80": {"dims": (80, 80), "heads": (4, 2)},
    "96": {"dims": (96, 96), "heads": (2, 2)}, "128": {"dims": (128, 128), "heads": (8, 2)},
    "160": {"dims": (160, 160), "heads": (4, 2)}, "192-128": {"dims": (192, 128), "heads": (4, 4)},
    "192-128-grouped": {"dims": (192, 128), "heads": (4, 1)},
    "128-64": {"dims": (128, 64), "heads": (4, 2)}, "64-96": {"dims": (64, 96), "heads": (4, 2)},
    "256": {"dims": (256, 256), "heads": (4, 1)}, "100": {"dims": (100, 100), "heads": (4, 2)},
    "250": {"dims": (250, 250), "heads": (4, 2)}, "190-121": {"dims": (190, 121), "heads": (4, 2)},
    "33-130": {"dims": (33, 130), "heads": (2, 1)},
}  # fmt: skip
USUAL: dict[str, Any] = {"dims": (64, 64), "heads": (4, 2), "dtype": "bfloat16", "seq_len": 256}
OTHERS = [
    Case("cudnn-float16", CAUSAL, **{**USUAL, "dtype": "float16"}, batch=2),
    Case("cudnn-float16-256", CAUSAL, **{**USUAL, "dtype": "float16", "dims": (256, 256)}),
    Case("cudnn-short", CAUSAL, **{**USUAL, "seq_len": 3}),
    Case("cudnn-one-query", Mask(), **{**USUAL, "seq_len": 1, "dims": (256, 256)}, kv_seq_len=300),
    Case("cudnn-one-key", Mask(), **{**USUAL, "dims": (192, 128)}, kv_seq_len=1),
    Case("cudnn-window", Mask(causal=True, window=(100, 0)), **{**USUAL, "dims": (256, 256)}),
    Case("cudnn-window-odd", Mask(causal=True, window=(33, 0)), **{**USUAL, "seq_len": 261}),
    Case("cudnn-fewer-keys", CAUSAL, **USUAL, kv_seq_len=133),
    Case("cudnn-more-keys", Mask(), **USUAL, kv_seq_len=605),
    Case("cudnn-sinks", CAUSAL, **USUAL, sinks=0),
    Case("cudnn-scale", CAUSAL, **USUAL, softmax_scale=0.3),
    Case("cudnn-spread", CAUSAL, **USUAL, spread=40.0),
    Case("cudnn-bias", CAUSAL, **USUAL, bias="full", batch=2),
    Case("cudnn-bias-full-mask", Mask(), **USUAL, bias="full", batch=2),
    Case("cudnn-bias-heads", CAUSAL, **USUAL, bias="heads", batch=2),
    Case("cudnn-bias-batch", CAUSAL, **USUAL, bias="batch", batch=2),
    Case("cudnn-bias-shared", CAUSAL, **USUAL, bias="shared", batch=2),
    Case("cudnn-bias-keys", Mask(), **USUAL, bias="full", kv_seq_len=130),
    Case("cudnn-bias-256", CAUSAL, **{**USUAL, "dims": (256, 256)}, bias="shared"),
    Case("cudnn-bias-mixed", CAUSAL, **{**USUAL, "dims": (192, 128)}, bias="full"),
    Case("cudnn-bias-masked", CAUSAL, **USUAL, bias="masked", batch=2),
    Case("cudnn-bias-masked-full", Mask(), **USUAL, bias="masked"),
    Case("cudnn-bias-very-negative", CAUSAL, **USUAL, bias="very-negative", batch=2),
    Case("cudnn-bias-very-negative-full", Mask(), **USUAL, bias="very-negative"),
    Case("cudnn-bias-float16", Mask(), **{**USUAL, "dtype": "float16"}, bias="masked"),
]


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if compute_capability() != HOPPER:
        pytest.skip("head dims above 128 are for Hopper")


@pytest.mark.parametrize("length", [256, 261])
@pytest.mark.parametrize("mask", [CAUSAL, Mask()], ids=["causal", "full"])
@pytest.mark.parametrize("shape", SHAPES)
def test_head_dims(shape: str, mask: Mask, length: int) -> None:
    name = f"cudnn-{shape}-{mask.causal}-{length}"
    case = Case(name, mask, **SHAPES[shape], dtype="bfloat16", seq_len=length)
    assert_close(case, cudnn.run(case))


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_options(case: Case) -> None:
    assert_close(case, cudnn.run(case))


@pytest.mark.parametrize(
    ("layout", "bias"),
    [
        ("contiguous", None), ("zigzag", None), ("striped", None),
        ("contiguous", "full"), ("zigzag", "full"),  # with a bias, squares must have even sizes
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 4)]
)
def test_in_the_ring(layout: Any, size: int, bias: Any) -> None:
    usual = {**USUAL, "seq_len": 1024, "dims": (192, 128)}
    case = Case(f"cudnn-{layout}-cp{size}-{bias}", CAUSAL, layout, size, **usual, bias=bias)
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
