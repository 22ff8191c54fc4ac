"""``causal=True`` with fewer keys than queries is refused: most such tensors are heads first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ring_core import Mask, reference
from ring_jax import ContextParallel, compat, nn, ring_attention

MESH = jax.make_mesh((2,), ("cp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
CP = ContextParallel(MESH, "cp", layout="contiguous")
Q, K = (jax.random.normal(jax.random.key(n), (1, n, 2, 4)) for n in (8, 6))
WORDS = r"q has \d tokens but k \d: .*x\.transpose\(1, 2\).*mask=Mask\(causal=True\)"


def in_shard_map(call: Callable[..., Any]) -> Callable[..., Any]:
    spec = PartitionSpec(None, "cp")
    return jax.shard_map(call, mesh=MESH, in_specs=spec, out_specs=spec)


def sharded(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return in_shard_map(partial(ring_attention, axis_name="cp", **options))(q, k, v)


OURS: dict[str, Callable[..., Any]] = {
    "one device": partial(ring_attention, axis_name=None), "shard_map": sharded,
    "ContextParallel": CP.attention, "explain": CP.explain,
}  # fmt: skip


@pytest.mark.parametrize("call", OURS.values(), ids=OURS)
def test_it_is_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=WORDS):
        call(Q, K, K, causal=True)
    with pytest.raises(ValueError, match=WORDS):
        jax.jit(partial(call, causal=True, mask=jnp.ones((4 if call is sharded else 8, 6), bool)))(
            Q, K, K
        )


def expected(causal_queries: Any = Q) -> Any:
    return reference.attention(*map(np.asarray, (causal_queries, K, K)), mask=Mask(causal=True))[0]


@pytest.mark.parametrize(
    "call", [OURS["one device"], sharded, CP.attention], ids=["one", "shard_map", "cp"]
)
def test_a_mask_keeps_the_rule(call: Callable[..., Any]) -> None:
    np.testing.assert_allclose(call(Q, K, K, mask=Mask(causal=True)), expected(), atol=2e-6)


OPERATION = compat.RingAttn(compat.OperationMetadata(sequence_axis_name="cp", mesh=MESH))
COMPAT: dict[str, Callable[..., Any]] = {
    "flash_attention": partial(compat.flash_attention, causal=True),
    "ring_attention": in_shard_map(partial(compat.ring_attention, axis_name="cp", causal=True)),
    "RingAttn": lambda *x: OPERATION(*x).attention_outputs,
}  # fmt: skip


@pytest.mark.parametrize("call", COMPAT.values(), ids=COMPAT)
def test_calls_of_other_libraries_keep_their_meaning(call: Callable[..., Any]) -> None:
    np.testing.assert_allclose(call(Q, K, K), expected(), atol=2e-6)


def test_an_adapter_takes_the_mask() -> None:
    """The adapter for ``jax.nn`` runs with the mask that its error says to bind."""
    attend = nn.make_dot_product_attention(CP.attention)
    with pytest.raises(ValueError, match=r"bind mask=ring_core\.Mask\(causal=True\)"):
        attend(Q, K, K, is_causal=True)
    bound = nn.make_dot_product_attention(partial(CP.attention, mask=Mask(causal=True)))
    np.testing.assert_allclose(bound(Q, K, K), expected(), atol=2e-6)
