"""Errors that say what to do; pickling; and zigzag over one device."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import ring_jax
from ring_core import UnsupportedError, reference
from ring_jax import ContextParallel, compat
from ring_jax.equinox import convert
from ring_jax.flax import make_attention_fn

MESHES: dict[str, Any] = {
    kind.name: jax.make_mesh((2, 2), ("cp", "tp"), (kind, kind), devices=jax.devices()[2:6])
    for kind in (AxisType.Auto, AxisType.Explicit)
}
MESHES["abstract"] = AbstractMesh((2, 2), ("cp", "tp"), (AxisType.Auto, AxisType.Auto))
CP = ContextParallel(MESHES["Auto"], "cp", head_axis="tp")
Q = jax.random.normal(jax.random.key(0), (1, 8, 4, 4))


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_pickles(mesh: Any) -> None:
    cp = ContextParallel(mesh, "cp", head_axis="tp", layout="striped")
    for again in (pickle.loads(pickle.dumps(cp)), copy.deepcopy(cp), copy.copy(cp)):
        assert vars(again) == vars(cp) and type(again) is ContextParallel
        if isinstance(mesh, jax.sharding.Mesh):
            np.testing.assert_array_equal(again.attention(Q, Q, Q), cp.attention(Q, Q, Q))


def test_a_pickle_of_more_devices() -> None:
    state = CP.__getstate__()
    state["mesh"] = state["mesh"]._replace(ids=state["mesh"].ids + 1000)
    with pytest.raises(ValueError, match=r"cpu devices \[1002, 1003, 1004, 1005\]"):
        CP.__class__.__new__(ContextParallel).__setstate__(state)


def test_heads_that_an_axis_does_not_divide() -> None:
    k = Q[:, :, :1]
    with pytest.raises(
        ValueError, match=r"heads of k, 1, .*jnp\.repeat\(k, n, axis=2\).*head_axis out"
    ):
        CP.attention(Q, k, k)
    out = CP.attention(Q, *[jnp.repeat(k, 2, axis=2)] * 2)  # follows the error's advice
    plain = ContextParallel(MESHES["Auto"], "cp").attention(Q, k, k)
    np.testing.assert_allclose(out, plain, atol=1e-6)
    with pytest.raises(ValueError, match=r"heads of q, 3, .*Instead: leave head_axis out"):
        CP.attention(Q[:, :, :3], k, k)
    by_batch = ContextParallel(MESHES["Auto"], "cp", batch_axis="tp")
    with pytest.raises(ValueError, match=r"batch of q, 1, .*pad the batch"):
        by_batch.attention(Q, Q, Q)


def test_a_mask_of_keys() -> None:
    mask = jnp.ones((1, 1, 1, 8), bool)
    with pytest.raises(ValueError, match=r"segment_ids, int32 \[B, T_local\].*-1 for padding"):
        CP.attention(Q, Q, Q, mask=mask)


def test_equinox_names_inference() -> None:
    model = convert(eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0)), CP.attention)
    x = jnp.ones((8, 8))
    with pytest.raises(UnsupportedError, match="deterministic: pass inference=True"):
        model(x, x, x, deterministic=True)


def test_flax_looks_at_shapes_first() -> None:
    attend = make_attention_fn(CP.attention)
    dropout: Any = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
    with pytest.raises(ValueError, match="share batch dimensions") as error:
        attend(Q, jnp.concatenate([Q, Q]), Q, **dropout)
    assert not isinstance(error.value, UnsupportedError)
    with pytest.raises(ValueError, match=r"must be \[batch\.\.\., sequence, heads, head_dim\]"):
        attend(Q[0, 0], Q[0, 0], Q[0, 0], **dropout)
    with pytest.raises(UnsupportedError, match="broadcast_dropout"):
        attend(Q, Q, Q, **dropout)


def test_shared_sinks_are_told_as_they_are() -> None:
    assert compat.__doc__ is not None and "``softmax_aux`` is ``[H, n]``" in compat.__doc__
    with pytest.raises(ValueError, match=r"softmax_aux\[:, None\]"):
        compat.flash_attention(Q, Q, Q, softmax_aux=jnp.zeros(4))


def test_zigzag_over_one_device_takes_odd_lengths() -> None:
    cp = ContextParallel(
        jax.make_mesh((1,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:1]), "cp"
    )
    q = Q[:, :7]
    out = cp.unshard(cp.attention(*map(cp.shard, (q, q, q)), causal=True))
    np.testing.assert_allclose(out, reference.attention(q, q, q, causal=True)[0], atol=2e-6)
    alone = partial(ring_jax.ring_attention, axis_name=None, layout="zigzag", causal=True)
    np.testing.assert_allclose(alone(q, q, q), out, atol=2e-6)
