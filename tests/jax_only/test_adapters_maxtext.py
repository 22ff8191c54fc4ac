"""The MaxText adapter translates MaxText's settings; MaxText itself is not needed.

``nox -s maxtext`` trains with the real MaxText.
"""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from adapted import IDS, QKV, H, close, compiled, dense, program, random
from jax.sharding import AxisType

from ring_core import LayoutSpec, UnsupportedError
from ring_jax import ContextParallel
from ring_jax.maxtext import with_ring


def member(value: str) -> SimpleNamespace:
    """Return a stand-in for a member of one of MaxText's enumerations."""
    return SimpleNamespace(value=value)


SCALE = 8**-0.5  # MaxText scales its queries itself
CONFIG: dict[str, Any] = {
    "context_sharding": "context", "context_parallel_load_balance": True,
    "context_parallel_reorder_strategy": member("auto"), "context_parallel_strategy": "all_gather",
    "hardware": "cpu", "packing": False, "moba": False, "enable_dropout": True,
}  # fmt: skip


class Operation(SimpleNamespace):
    """Stand-in for MaxText's ``AttentionOp`` with the attributes that the adapter reads."""

    def _logical_to_mesh_axes(self, names: tuple[str, ...]) -> tuple[str | None, ...]:
        axes = {"batch": "data", "heads": None, "length": "context", "kv": None}
        return tuple(axes[name] for name in names)


def operation(kind: str = "global", **settings: Any) -> Operation:
    mesh = jax.make_mesh(
        (2, 2), ("data", "context"), (AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    own = {name: settings.pop(name) for name in list(settings) if name not in CONFIG}
    arguments: dict[str, Any] = {
        "attention_kernel": "ring", "mesh": mesh, "attention_type": member(kind), "kv_quant": None,
        "sliding_window_size": None, "chunk_attn_window_size": None, "attn_logits_soft_cap": 0.0,
        "dropout_rate": 0.0, "flash_axis_names_q": ("batch", "heads", "length", "kv"),
        "config": SimpleNamespace(**(CONFIG | settings)),
    }  # fmt: skip
    return Operation(**(arguments | own))


def theirs(
    self: Any, query: Any, key: Any, value: Any, decoder_segment_ids: Any, segment_positions: Any,
    lengths: Any, model_mode: Any, **others: Any,
) -> Any:  # fmt: skip
    """Stand-in for MaxText's own attention: return its arguments."""
    return self, others | {
        "query": query, "key": key, "value": value, "decoder_segment_ids": decoder_segment_ids,
        "segment_positions": segment_positions, "lengths": lengths, "model_mode": model_mode,
    }  # fmt: skip


APPLY = with_ring(theirs)


def call(op: Operation, q: Any, k: Any, v: Any, ids: Any = None, **options: Any) -> Any:
    arguments = {"model_mode": "train"} | options
    return APPLY(
        op, q * SCALE, k, v, ids, None, None, arguments.pop("model_mode"),
        qk_product_einsum=jnp.einsum, wv_product_einsum=jnp.einsum, **arguments,
    )  # fmt: skip


SINKS = random(H, seed=7)
HONOURED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "global": ({"kind": "global"}, {}, {"causal": True}),
    "mla": ({"kind": "mla"}, {}, {"causal": True}),
    "full": ({"kind": "full"}, {}, {}),
    "window": (
        {"kind": "local_sliding", "sliding_window_size": 5}, {},
        {"causal": True, "window": (4, 0)},
    ),
    "chunk": (
        {"kind": "chunk", "chunk_attn_window_size": 6}, {}, {"causal": True, "chunk_size": 6},
    ),
    "softcap and sinks": (
        {"attn_logits_soft_cap": 2.0}, {"sinks": SINKS},
        {"causal": True, "softcap": 2.0},
    ),
    "natural order": (
        {"context_parallel_load_balance": False}, {}, {"causal": True},
    ),
    "striped": (
        {"context_parallel_reorder_strategy": member("striped")}, {}, {"causal": True},
    ),
    "striped by itself": (
        {"hardware": "gpu", "packing": True, "context_parallel_strategy": "ring"}, {},
        {"causal": True},
    ),
}  # fmt: skip


def context(op: Operation, name: str) -> ContextParallel:
    """Return a context with the token order that MaxText's input pipeline uses."""
    layouts: dict[str, LayoutSpec] = {
        "natural order": "contiguous", "full": "contiguous", "striped": "striped",
        "striped by itself": "striped",
    }  # fmt: skip
    return ContextParallel(op.mesh, "context", "data", layout=layouts.get(name, "zigzag"))


@pytest.mark.parametrize("name", HONOURED)
def test_what_maxtext_says_is_honoured(name: str) -> None:
    settings, arguments, options = HONOURED[name]
    op, ids = operation(**settings), jnp.asarray(IDS)
    attend = context(op, name).attention
    expected = program(
        lambda q, k, v: attend(
            q * SCALE, k, v, segment_ids=ids, softmax_scale=1.0, **(arguments | options)
        )
    )
    assert program(lambda q, k, v: call(op, q, k, v, ids, **arguments)[0]) == expected


def test_maxtexts_order_on_a_mesh() -> None:
    settings, arguments, options = HONOURED["window"]
    op = operation(**settings)
    cp = context(op, "window")

    def whole(q: Any, k: Any, v: Any) -> Any:
        q, k, v, ids = (cp.shard(x) for x in (q, k, v, jnp.asarray(IDS)))
        out, *rest = call(op, q, k, v, ids, **arguments)
        assert rest == [None, None]
        return cp.unshard(out)

    close(compiled(whole), dense(segment_ids=IDS, **options))


def test_ids_of_keys() -> None:
    op, ids, keys = operation("full"), jnp.asarray(IDS), jnp.roll(jnp.asarray(IDS), 4, axis=1)
    attend = context(op, "full").attention
    expected = program(
        lambda q, k, v: attend(q * SCALE, k, v, segment_ids=(ids, keys), softmax_scale=1.0)
    )
    actual = program(lambda q, k, v: call(op, q, k, v, ids, decoder_segment_ids_kv=keys)[0])
    assert actual == expected


def test_another_attention_is_maxtexts() -> None:
    op, names = operation(attention_kernel="flash"), signature(APPLY, follow_wrapped=False)
    arguments = {name: object() for name in names.parameters if name != "self"}
    assert len(arguments) == 19
    assert APPLY(op, **arguments) == (op, arguments)


@pytest.mark.parametrize(
    ("settings", "options", "name"),
    [
        ({"kind": "compressed"}, {}, "attention_type"),
        ({"kind": "block_diffusion"}, {}, "attention_type"),
        ({"moba": True}, {}, "moba"),
        ({"kv_quant": object()}, {}, "kv_quant"),
        ({"dropout_rate": 0.1}, {}, "dropout_rate"),
        ({"context_parallel_strategy": "usp"}, {}, "context_parallel_strategy"),
        ({"context_parallel_strategy": "ulysses"}, {}, "context_parallel_strategy"),
        ({}, {"model_mode": "prefill"}, "model_mode"),
        ({}, {"previous_chunk": QKV[1]}, "previous_chunk"),
        ({}, {"bidirectional_mask": IDS > 0}, "bidirectional_mask"),
        ({}, {"indexer_mask": IDS > 0}, "indexer_mask"),
        ({}, {"compressed_mask": IDS > 0}, "compressed_mask"),
        ({}, {"record_max_logits": True}, "record_max_logits"),
        ({}, {"q": QKV[0][:, :8]}, "causal"),
    ],
)
def test_what_has_no_counterpart_is_refused(
    settings: dict[str, Any], options: dict[str, Any], name: str
) -> None:
    options = dict(options)
    q = options.pop("q", QKV[0])
    with pytest.raises(UnsupportedError, match=f"^{name}: "):
        call(operation(**settings), q, *QKV[1:], **options)


def test_dropout_that_is_off_is_not_refused() -> None:
    op = operation(dropout_rate=0.1, enable_dropout=False)
    assert jax.eval_shape(lambda *x: call(op, *x)[0], *QKV).shape == QKV[0].shape
