"""Strategies that ``auto`` chooses, the reasons it states, and results under JAX's transforms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import ring_jax
from ring_core import Mask
from ring_jax import ContextParallel, prepare
from ring_jax.records import Devices
from ring_jax.strategies import gather

GPUS = Devices("gpu", in_one_process=True)
LOCAL = 1024
MORE_MEMORY = "it takes more than 3 times the memory of a ring"
DOCUMENTS = (0, 900, 2000, 3000, 4096)  # each crosses at most one of the shard borders


@pytest.fixture
def on_gpus() -> Iterator[None]:
    """Make host devices count as GPUs when a strategy is chosen."""
    with patch.object(prepare, "_devices", lambda *_: GPUS):
        yield


def told(size: int, *, layout: Any = "zigzag", kv_heads: int = 8, **options: Any) -> list[str]:
    """Return the lines of ``explain`` about the strategy."""
    mesh: Any = AbstractMesh((size,), ("cp",), axis_types=(AxisType.Auto,))
    cp, texts = ContextParallel(mesh, "cp", layout=layout), list[str]()
    q, k = (
        jax.ShapeDtypeStruct((1, size * LOCAL, heads, 128), jnp.bfloat16)
        for heads in (32, kv_heads)
    )
    jax.eval_shape(lambda *x: texts.append(cp.explain(*x, **options)), q, k, k)
    lines = texts[0].splitlines()
    return [line for line in lines if line.startswith(("strategy", "  not gather"))]


CAUSAL: dict[str, Any] = {"causal": True}
ON_EIGHT = jax.ShapeDtypeStruct((1, 1, 8 * LOCAL, 8 * LOCAL), jnp.bfloat16)
GATHERED = {
    "three": (3, CAUSAL),
    "most memory": (11, CAUSAL),  # (11 + 1) * 12288 bytes a token: 3 times the ring's 49152
    "most memory, heads alike": (8, {"kv_heads": 32, "bias": ON_EIGHT}),  # else ranks trade heads
    "window of two hops": (4, {**CAUSAL, "layout": "zigzag", "window": (99, 0)}),
    "window of all shards": (4, {**CAUSAL, "window": (3 * LOCAL, 0)}),
    "documents": (4, {**CAUSAL, "layout": "contiguous", "cu_seqlens": (0, 100, 4096)}),
    "bias": (4, {"bias": jnp.zeros((1, 1, 4 * LOCAL, 4 * LOCAL), jnp.bfloat16)}),
}
IN_A_RING = {
    "one": (1, CAUSAL, "on one device nothing travels"),
    "two": (2, CAUSAL, "on two devices it launches what a ring does, and takes more memory"),
    "memory": (12, CAUSAL, MORE_MEMORY),
    "memory, heads alike": (9, {**CAUSAL, "kv_heads": 32}, MORE_MEMORY),
    "window": (
        4, {**CAUSAL, "layout": "contiguous", "window": (LOCAL - 1, 0)},
        "it fetches 3 shards of K/V, and 1 go round the ring",
    ),
    "few documents": (
        4, {**CAUSAL, "layout": "contiguous", "cu_seqlens": DOCUMENTS},
        "it fetches 3 shards of K/V, and 1 go round the ring",
    ),
    "predicate": (4, {"mask": Mask(predicate=lambda q, k: k <= q)}, "a predicate mask is"),
}  # fmt: skip


@pytest.mark.usefixtures("on_gpus")
def test_what_is_gathered_on_gpus() -> None:
    for name, (size, options) in GATHERED.items():
        assert told(size, **options) == ["strategy gather, transport xla"], name


@pytest.mark.usefixtures("on_gpus")
def test_what_goes_round_on_gpus() -> None:
    for name, (size, options, reason) in IN_A_RING.items():
        first, second = told(size, **options)
        assert first == "strategy ring, transport xla", name
        assert second.startswith(f"  not gather: {reason}"), name
    assert told(4, strategy="ring", **CAUSAL) == ["strategy ring, transport xla"]


def test_elsewhere() -> None:
    """CPUs, TPUs and devices of several processes do not gather."""
    assert told(4, **CAUSAL)[1].startswith("  not gather: devices of a CPU share")
    with patch.object(prepare, "_devices", lambda *_: Devices("gpu", in_one_process=False)):
        assert told(4, **CAUSAL)[1].startswith("  not gather: between processes")
    with patch.object(prepare, "_devices", lambda *_: Devices("tpu", in_one_process=True)):
        assert told(4, **CAUSAL)[1].startswith(
            "  not gather: on TPUs XLA runs an all-gather beside"
        )


def _layers(attend: Any, place: Any = lambda x: x) -> Any:
    """Return the gradient of two equal layers and two more in a scan with checkpoints, jitted."""
    policy = jax.checkpoint_policies.save_only_these_names(*ring_jax.RESIDUALS)

    def loss(q: Any, k: Any, v: Any) -> Any:
        x, k, v = (place(x) for x in (q, k, v))

        def layer(x: Any, _: Any = None) -> Any:
            return attend(x, k, v, causal=True), None

        x, _ = layer(layer(x)[0])
        return (jax.lax.scan(jax.checkpoint(layer, policy=policy), x, None, 2)[0] ** 2).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.nightly(unless=["AxisType.Explicit-False"])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_in_functions_and_loops(kind: AxisType, kept: bool) -> None:
    """``auto`` gathers in equal layers and in loops, and again for keys that are not saved.

    Results in loops are those of `test_gather`.
    """
    mesh = jax.make_mesh((4,), ("cp",), axis_types=(kind,), devices=jax.devices()[:4])
    x = [jax.ShapeDtypeStruct((2, 64, heads, 8), jnp.float32) for heads in (4, 2, 2)]
    cp, limit = ContextParallel(mesh, "cp"), sum(4 * y.size for y in x[1:]) * kept
    jax.clear_caches()
    with patch.object(gather, "MAX_SAVED_BYTES", limit), jax.set_mesh(mesh):
        text = _layers(cp.attention, cp.shard).lower(*x).as_text()
    jax.clear_caches()
    # The two layers share one function forward and one backward; the loops have their own. With
    # `RESIDUALS` saved no forward runs again in a backward.
    assert text.count("stablehlo.all_gather") == (2 if kept else 4)
    assert "collective_permute" not in text
