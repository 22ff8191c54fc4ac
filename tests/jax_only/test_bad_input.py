"""Bad input raises an error that names the argument when the call is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from ring_core import Mask, UnsupportedError
from ring_jax import ContextParallel, KernelConfig, ring_attention

Q, KV = (2, 8, 4, 16), (2, 8, 2, 16)


def arrays(**replaced: Any) -> dict[str, Any]:
    """Return valid arguments with some replaced."""
    good = {"q": jnp.zeros(Q), "k": jnp.zeros(KV), "v": jnp.zeros(KV), "axis_name": None}
    return good | replaced


def ids(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "3 dimensions": ({"q": jnp.zeros((8, 4, 16))}, r"q must have 4 dimensions .* got shape \(8, 4, 16\)"),
    "not an array": ({"k": [1.0]}, "k must be a jax.Array, got list"),
    "heads": ({"q": jnp.zeros((2, 8, 3, 16))}, "3 heads of q must be a multiple of the 2 heads"),
    "dtypes": ({"v": jnp.zeros(KV, jnp.bfloat16)}, "share a dtype, got float32 for q and bfloat16 for v"),
    "batch": ({"k": jnp.zeros((1, 8, 2, 16))}, "share a batch size, got 2 for q and 1 for k"),
    "lengths": ({"v": jnp.zeros((2, 9, 2, 16))}, "same sequence length and heads"),
    "head dims": ({"k": jnp.zeros((2, 8, 2, 8))}, "same head dim, got 16 and 8"),
    "complex": ({"q": jnp.zeros(Q, jnp.complex64)}, "q must be float16, .* got complex64"),
    "integer": ({"q": jnp.zeros(Q, jnp.int32)}, "q must be float16, .* got int32"),
    "empty sequence": ({n: jnp.zeros((2, 0, 2, 16)) for n in "qkv"}, "sequence length 0"),
    "layout": ({"layout": "zigzak"}, "unknown layout 'zigzak'; known: contiguous, zigzag, striped"),
    "negative window": ({"window": (-1, 0)}, "window="),
    "window as int": ({"window": 4}, r"window must be a pair .* window=\(W - 1, 0\)"),
    "chunk": ({"chunk_size": 0}, "chunk_size must be an integer >= 1"),
    "causal": ({"causal": "yes"}, "causal must be a bool"),
    "cu_seqlens end": ({"cu_seqlens": (0, 7)}, "cu_seqlens must end at the sequence length 8, got 7"),
    "cu_seqlens start": ({"cu_seqlens": (1, 8)}, "cu_seqlens must start at 0"),
    "cu_seqlens order": ({"cu_seqlens": (0, 5, 3, 8)}, "cu_seqlens must be ascending"),
    "cu_seqlens as an array": ({"cu_seqlens": jnp.array([0, 8])}, "cu_seqlens must be known when the call is traced"),
    "mask twice": ({"mask": Mask(), "causal": True}, "mask was given together with causal"),
    "mask type": ({"mask": jnp.ones((8, 8))}, "mask must be a ring_core.Mask"),
    "ids dtype": ({"segment_ids": jnp.zeros((2, 8), jnp.uint32)}, "segment_ids must be int32, .* got uint32"),
    "ids shape": ({"segment_ids": ids(2, 9)}, r"shape \[2, 8\], got \(2, 9\)"),
    "ids triple": ({"segment_ids": (ids(2, 8),) * 3}, "pair"),
    "ids type": ({"segment_ids": 3}, "segment_ids must be a jax.Array"),
    "sinks": ({"sinks": jnp.zeros(3)}, r"sinks must have shape \[4\] or \[4, n\]"),
    "sinks integer": ({"sinks": ids(4)}, "sinks must be floating point"),
    "bias": ({"bias": jnp.zeros((2, 4, 8, 9))}, r"bias must have shape \[2 or 1, 4 or 1, 8, 8\]"),
    "slopes": ({"alibi_slopes": jnp.zeros(2)}, r"alibi_slopes must have shape \[4\] or \[2, 4\]"),
    "dropout": ({"dropout_p": 1.0, "dropout_seed": 1}, r"dropout_p must be in \[0, 1\), got 1.0"),
    "dropout without seed": ({"dropout_p": 0.1}, "needs dropout_seed"),
    "seed": ({"dropout_p": 0.1, "dropout_seed": -1}, "dropout_seed must be an integer"),
    "seed without dropout": ({"dropout_seed": -1}, "dropout_seed must be an integer"),
    "seed as a float": ({"dropout_p": 0.1, "dropout_seed": jnp.float32(1)}, r"dropout_seed .* got float32 \[\]"),
    "seed as words": ({"dropout_p": 0.1, "dropout_seed": ids(2)}, r"dropout_seed .* got int32 \[2\]"),
    "scale": ({"softmax_scale": float("inf")}, "softmax_scale must be a finite number"),
    "softcap": ({"softcap": -1.0}, "softcap must be a finite number > 0"),
    "deterministic": ({"deterministic": 1}, "deterministic must be True or False"),
    "return_lse": ({"return_lse": None}, "return_lse must be True or False"),
    "kernel": ({"kernel": "flash"}, "unknown kernel 'flash'; known: auto, triton, cudnn, pallas, xla"),
    "kernel type": ({"kernel": 3}, "kernel must be a name or a KernelConfig"),
    "transport": ({"transport": "rdma"}, "unknown transport 'rdma'; known: auto, xla"),
    "strategy": ({"strategy": "rdma"}, "unknown strategy name 'rdma'; known: auto, ring"),
    "axis": ({"axis_name": "cp"}, "axis_name 'cp' is not a mesh axis here; call this inside"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    replaced, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        ring_attention(**arrays(**replaced))


@pytest.mark.parametrize(
    "name",
    ["causal", "window", "chunk_size", "softmax_scale", "softcap", "dropout_p", "deterministic", "return_lse"],
)  # fmt: skip
def test_traced_values_where_static_ones_are_needed(name: str) -> None:
    @jax.jit
    def call(x: jax.Array) -> Any:
        return ring_attention(**arrays(**{name: (x, x) if name == "window" else x}))

    with pytest.raises(ValueError, match=f"{name} must be known when the call is traced"):
        call(jnp.int32(1))


def test_gradient_of_slopes_is_refused() -> None:
    def loss(slopes: jax.Array) -> Any:
        return ring_attention(**arrays(alibi_slopes=slopes)).sum()

    loss(jnp.ones(4))
    with pytest.raises(ValueError, match="alibi_slopes have no gradient"):
        jax.grad(loss)(jnp.ones(4))
    others = jax.grad(lambda q: ring_attention(**arrays(q=q, alibi_slopes=jnp.ones(4))).sum())
    assert others(jnp.zeros(Q)).shape == Q


def test_auto_names_all_reasons_when_nothing_fits() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"no kernel can do this call. triton: needs .* xla: has no choice of fused",
    ):
        ring_attention(**arrays(kernel=KernelConfig(fused_backward=True)))


def test_context_parallel() -> None:
    mesh = jax.make_mesh(
        (2, 2), ("cp", "dp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    with pytest.raises(ValueError, match="unknown layout 'ring'"):
        ContextParallel(mesh, "cp", layout="ring")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="unknown axis_name 'sp'; known: cp, dp"):
        ContextParallel(mesh, "sp")
    with pytest.raises(ValueError, match="must be three axes"):
        ContextParallel(mesh, "cp", batch_axis="cp")
    cp = ContextParallel(mesh, "cp", batch_axis="dp", head_axis=None)
    with pytest.raises(ValueError, match="pad to 8"):
        cp.shard(jnp.zeros((1, 7, 2)), dim=1)
    good = jnp.zeros((2, 8, 4, 16))
    with pytest.raises(
        ValueError, match=r"the batch of k, 1, must be a multiple of the 2 devices along 'dp'"
    ):
        cp.attention(good, jnp.zeros((1, 8, 4, 16)), good)
    with pytest.raises(ValueError, match="q must have 4 dimensions"):
        cp.attention(good[0], good, good)
    with pytest.raises(ValueError, match=r"k must be a jax\.Array, got NoneType"):
        cp.attention(good, None, good)  # type: ignore[call-overload]  # wrong on purpose
    with pytest.raises(ValueError, match=r"sequence length 6 .* pad to 8"):
        cp.attention(good, jnp.zeros((2, 6, 4, 16)), good)
