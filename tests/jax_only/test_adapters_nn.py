"""``ring_jax.nn`` agrees with jax.nn.dot_product_attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted import (
    BIAS,
    CAUSAL,
    IDS,
    ONE,
    QKV,
    SHOWN,
    B,
    D,
    H,
    T,
    all_close,
    close,
    compiled,
    context,
    dense,
    parameters,
    program,
    random,
)
from jax.sharding import PartitionSpec as P

from ring_core import KernelConfig, UnsupportedError
from ring_jax import Segments, ring_attention
from ring_jax.nn import make_dot_product_attention


def test_signature_of_jax_nn() -> None:
    ours = make_dot_product_attention(ONE)
    assert parameters(ours) == parameters(jax.nn.dot_product_attention)


LENGTHS = jnp.array([11, 16], jnp.int32)
JAX_NN: dict[str, dict[str, Any]] = {
    "bias": {"bias": BIAS},
    "mask": {"mask": jnp.asarray(SHOWN)[:, None, None]},
    "query_seq_lengths": {"query_seq_lengths": LENGTHS},
    "key_value_seq_lengths": {"key_value_seq_lengths": LENGTHS},
    "local_window_size": {"local_window_size": (5, 1)},
    "both masks": {"mask": jnp.asarray(SHOWN)[:, None, None], "key_value_seq_lengths": LENGTHS - 3},
}


@pytest.mark.parametrize("name", JAX_NN)
def test_arguments_of_jax_nn(name: str) -> None:
    arguments = JAX_NN[name]
    expected = compiled(jax.nn.dot_product_attention, **arguments)
    close(compiled(make_dot_product_attention(ONE), **arguments), expected)
    assert np.abs(expected - dense()).max() > 1e-3


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({"scale": 0.7}, {"softmax_scale": 0.7}),
        ({"is_causal": True}, {"causal": True}),
        ({"local_window_size": 3}, {"window": (3, 3)}),
        ({"implementation": None}, {}),
        ({"implementation": "xla"}, {"kernel": "xla"}),
        ({"implementation": KernelConfig("xla", block_q=4)}, {"kernel": KernelConfig("xla", 4)}),
    ],
)
def test_options_by_another_name(arguments: dict[str, Any], options: dict[str, Any]) -> None:
    assert program(make_dot_product_attention(ONE), **arguments) == program(ONE, **options)


def test_the_table_holds_every_argument_of_jax_nn() -> None:
    elsewhere = {
        "query", "key", "value", "scale", "is_causal", "implementation", "return_residual"
    }  # fmt: skip
    assert parameters(make_dot_product_attention(ONE)).keys() <= elsewhere | JAX_NN.keys()


def test_jax_nn_without_a_batch_and_with_a_residual() -> None:
    q, k, v = (x[0] for x in QKV)
    attend = partial(make_dot_product_attention(ONE), return_residual=True)
    theirs = partial(jax.nn.dot_product_attention, return_residual=True)
    actual, expected = (jax.jit(function)(q, k, v, BIAS[0]) for function in (attend, theirs))
    assert [x.shape for x in actual] == [x.shape for x in expected]
    all_close(actual, expected)
    narrow = [x.astype(jnp.bfloat16) for x in QKV]
    assert jax.eval_shape(attend, *narrow) == jax.eval_shape(theirs, *narrow)


@pytest.mark.nightly(only=["global arrays"])  # per change the tests of Flax run them
@pytest.mark.parametrize("where", ["global arrays", "shard_map"])
def test_jax_nn_on_two_devices(where: str) -> None:
    """Lengths count tokens in natural order in every layout; gradients of shards are right."""
    in_shard_map = where == "shard_map"
    cp = context(layout="striped" if in_shard_map else "zigzag")
    local = partial(ring_attention, axis_name="cp", layout="striped")
    attend = make_dot_product_attention(local if in_shard_map else cp.attention)
    arguments: dict[str, Any] = {
        "is_causal": True, "local_window_size": (9, 0), "scale": 0.5, "return_residual": True,
        "query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS - 2,
    }  # fmt: skip
    weight = random(B, T, H, D, seed=9)

    def ring(q: Any, k: Any, v: Any) -> Any:
        call, tokens = partial(attend, **arguments), P(None, "cp")
        if in_shard_map:
            call = jax.shard_map(
                call, mesh=cp.mesh, in_specs=(tokens,) * 3, out_specs=(tokens, tokens)
            )
        return tuple(cp.unshard(x) for x in call(*(cp.shard(x) for x in (q, k, v))))

    def loss(function: Any, *args: Any) -> Any:
        out, lse = function(*args)
        held = jnp.where(jnp.isneginf(lse), 0, lse)  # lse has no gradient in either one
        return jnp.sum(out * weight) + jnp.sum(held), (out, lse)

    single = partial(jax.nn.dot_product_attention, **arguments)
    gradients = jax.grad(loss, argnums=(1, 2, 3), has_aux=True)
    actual, expected = (
        compiled(partial(gradients if in_shard_map else loss, loss_function))
        for loss_function in (ring, single)
    )
    out, lse = actual[1]
    expected_value, wanted_lse = expected[1]
    close(out, expected_value)
    visible = np.arange(T) < np.asarray(LENGTHS)[:, None]
    close(lse[visible], wanted_lse[visible])
    assert np.isneginf(lse[~visible]).all()
    if in_shard_map:
        all_close(actual[0], expected[0])


def test_implementation_names_kernels() -> None:
    with pytest.raises(UnsupportedError, match=r"^kernel 'cudnn': needs ring-jax-gpu"):
        make_dot_product_attention(ONE)(*QKV, implementation="cudnn")
    with pytest.raises(ValueError, match="kernel: bound"):
        make_dot_product_attention(partial(ONE, kernel="xla"))(*QKV, implementation="auto")


@pytest.mark.parametrize(
    ("arguments", "message", "kind"),
    [
        ({"mask": CAUSAL[:4]}, "^mask must have shape", ValueError),
        (
            {"query": QKV[0][:, :4], "is_causal": True, "local_window_size": 2},
            "^is_causal, local_window_size: with 4",
            UnsupportedError,
        ),
        ({"mask": SHOWN[:, None, None] * 1}, "mask must be boolean", ValueError),
        ({"query_seq_lengths": LENGTHS[:1]}, r"query_seq_lengths must be integers \[2\]", ValueError),
        (
            {"mask": Segments(jnp.asarray(IDS)), "query_seq_lengths": LENGTHS},
            "both say what is hidden",
            ValueError,
        ),
        ({"query": QKV[0][0]}, "all without batch", ValueError),
        ({"local_window_size": -1}, "window", ValueError),
    ],
)  # fmt: skip
def test_wrong_calls_of_jax_nn(
    arguments: dict[str, Any], message: str, kind: type[ValueError]
) -> None:
    arguments_of_call = dict(zip(("query", "key", "value"), QKV, strict=True)) | arguments
    with pytest.raises(kind, match=message) as caught:
        make_dot_product_attention(ONE)(**arguments_of_call)
    assert type(caught.value) is kind
