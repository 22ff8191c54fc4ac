"""ring_attention and ContextParallel under JAX's transformations, on meshes of every kind."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RINGS
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
from jax_meshes import mesh_of

from ring_core import (
    ChunkLayout,
    Mask,
    make_plan,
    reference,
    ring_program,
    viz,
)
from ring_jax import RESIDUALS, ContextParallel, __version__, ring_attention
from ring_jax.records import AttentionOptions, CallOptions

Q, KV = (2, 16, 4, 8), (2, 16, 2, 8)
CALL = partial(ring_attention, axis_name="cp", causal=True)


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def qkv() -> tuple[jax.Array, jax.Array, jax.Array]:
    return random(*Q), random(*KV, seed=1), random(*KV, seed=2)


def ring(call: Callable[..., Any] = CALL, size: int = 2, **options: Any) -> Callable[..., Any]:
    """Return a call on local shards as a function of global arrays."""
    tokens = P(None, "cp")
    return jax.shard_map(
        call, mesh=mesh_of(cp=size), in_specs=(tokens,) * 3, out_specs=tokens, **options
    )


def dense(*args: jax.Array, **options: Any) -> np.ndarray[Any, Any]:
    return reference.attention(*map(np.asarray, args), causal=True, **options)[0]


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=2e-5, atol=2e-5)


def gradients(
    function: Callable[..., Any], *args: jax.Array, wrap: Callable[..., Any] = jax.jit
) -> Any:
    def loss(*args: jax.Array) -> Any:
        return (function(*args) * random(*Q, seed=3)).sum()

    return wrap(jax.grad(loss, argnums=tuple(range(len(args)))))(*args)


def dense_gradients(*args: jax.Array, **options: Any) -> Any:
    weight = np.asarray(random(*Q, seed=3))
    return reference.attention_grads(weight, *map(np.asarray, args), causal=True, **options)


def test_under_vmap_scan_and_remat() -> None:
    args = [jnp.stack([x, 2 * x, 3 * x]) for x in qkv()]
    expected = np.stack([dense(*(x[n] for x in args)) for n in range(3)])
    close(jax.jit(jax.vmap(ring()))(*args), expected)

    def layer(carry: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        out = jax.checkpoint(ring())(*x)
        return carry + out.sum(), out

    total, outs = jax.jit(lambda *args: jax.lax.scan(layer, jnp.float32(0), args))(*args)
    close(outs, expected)
    np.testing.assert_allclose(total, expected.sum(), rtol=1e-4, atol=1e-4)
    batched = jax.vmap(lambda *args: gradients(ring(), *args))(*args)
    for n in range(3):
        grads = dense_gradients(*(x[n] for x in args))
        for actual, expected_value in zip(batched, grads, strict=False):
            close(actual[n], expected_value)


@pytest.mark.nightly(unless=["False"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_replicated_parameters_get_their_gradient_once(*, check_vma: bool) -> None:
    """Replicated sinks on a mesh with data parallelism get one summed gradient, not several."""
    sinks, args = random(4, seed=5), qkv()
    tokens = P("dp", "cp")
    function = jax.shard_map(
        lambda q, k, v, sinks: CALL(q, k, v, sinks=sinks),
        mesh=mesh_of(dp=2, cp=4), in_specs=(tokens,) * 3 + (P(),), out_specs=tokens,
        check_vma=check_vma,
    )  # fmt: skip
    actual = gradients(function, *args, sinks)
    expected = dense_gradients(*args, sinks=np.asarray(sinks))
    for name, grad in zip(("dq", "dk", "dv", "dsinks"), actual, strict=True):
        close(grad, getattr(expected, name))


@pytest.mark.nightly(unless=["zigzag-AxisType.Explicit", "chunks-AxisType.Explicit"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("layout", "strategy"),
    [*RINGS.values(), (ChunkLayout(((0, 3), (1, 2))), "ring")], ids=[*RINGS, "chunks"],
)  # fmt: skip
def test_context_parallel(axis_type: AxisType, layout: Any, strategy: str) -> None:
    mesh = mesh_of(axis_type, dp=2, cp=2, tp=2)
    cp = ContextParallel(mesh, "cp", batch_axis="dp", head_axis="tp", layout=layout)
    ids = np.sort(np.random.default_rng(4).integers(0, 3, Q[:2])).astype(np.int32)
    extra = {"sinks": random(4, seed=5), "bias": random(1, 4, 16, 16, seed=6)}
    fixed: dict[str, Any] = {"dropout_p": 0.25, "dropout_seed": 7, "softcap": 3.0}
    slopes = 2.0 ** -np.arange(1, 5, dtype=np.float32)

    def call(q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> jax.Array:
        out = cp.attention(
            *(cp.shard(x) for x in (q, k, v)), causal=True, sinks=sinks, bias=cp.shard(bias, dim=2),
            segment_ids=cp.shard(jnp.asarray(ids)), alibi_slopes=jnp.asarray(slopes), strategy=strategy, **fixed,
        )  # fmt: skip
        return cp.unshard(out)

    options = {**{name: np.asarray(x) for name, x in extra.items()}, **fixed}
    options |= {"segment_ids": ids, "alibi_slopes": slopes}

    def loss(*args: jax.Array) -> Any:
        out = call(*args)
        return (out * random(*Q, seed=3)).sum(), out

    both = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True))
    with jax.set_mesh(mesh) if axis_type == AxisType.Explicit else nullcontext():
        actual, out = both(*qkv(), *extra.values())
    close(out, dense(*qkv(), **options))
    expected = dense_gradients(*qkv(), **options)
    for name, grad in zip(("dq", "dk", "dv", "dsinks", "dbias"), actual, strict=True):
        close(grad, getattr(expected, name))


def test_calls_that_nothing_compiles(caplog: pytest.LogCaptureFixture) -> None:
    """Calls outside of jit run one program, compiled once, whatever the seed.

    Before jax 0.12 their gradients run operation by operation.
    """
    cp = ContextParallel(mesh_of(dp=2, cp=2), "cp", batch_axis="dp")
    slopes = 2.0 ** -np.arange(1, 5, dtype=np.float32)
    args, weight = [cp.shard(x) for x in qkv()], cp.shard(random(*Q, seed=3))

    def call(seed: int, *args: jax.Array) -> jax.Array:
        return cp.attention(
            *args, causal=True, dropout_p=0.25, dropout_seed=seed, alibi_slopes=jnp.asarray(slopes)
        )

    programs = []
    for seed in (5, 6):
        with caplog.at_level("WARNING"):
            with jax.log_compiles():
                again = call(seed, *args)
            with jax.log_compiles() if jax.__version_info__ >= (0, 12) else nullcontext():
                out, pull = jax.vjp(partial(call, seed), *args)
                grads = pull(weight)
        programs.append(sum(text.startswith("Compiling jit(") for text in caplog.messages))
        caplog.clear()
        options = {"dropout_p": 0.25, "dropout_seed": seed, "alibi_slopes": slopes}
        for result in (out, again):
            close(cp.unshard(result), dense(*qkv(), **options))
        for actual, expected in zip(grads, dense_gradients(*qkv(), **options), strict=False):
            close(cp.unshard(actual), expected)
    assert 0 < programs[0] < 20
    assert programs[1] == 0


def test_saved_residuals_spare_the_ring() -> None:
    policy = jax.checkpoint_policies.save_only_these_names(*RESIDUALS)

    def permutes(policy: Any) -> int:
        function = jax.checkpoint(ring(size=4), policy=policy)
        return str(jax.make_jaxpr(partial(gradients, function))(*qkv())).count("ppermute")

    assert permutes(policy) == permutes(jax.checkpoint_policies.everything_saveable)
    assert permutes(policy) < permutes(jax.checkpoint_policies.nothing_saveable)


def test_signatures_are_those_of_torch() -> None:
    options = (
        "seq_len", "causal", "window", "chunk_size", "cu_seqlens", "segment_ids", "mask", "softmax_scale",
        "softcap", "sinks", "bias", "alibi_slopes", "dropout_p", "dropout_seed", "deterministic", "return_lse", "kernel", "strategy", "transport",
    )  # fmt: skip
    call = inspect.signature(ring_attention).parameters
    assert tuple(call) == ("q", "k", "v", "axis_name", "layout", *options)
    defaults = {name: call[name].default for name in options}
    assert list(AttentionOptions.__annotations__) == [x for x in options if x != "return_lse"]
    assert list(defaults.items()) == list(CallOptions._field_defaults.items())
    for method in (ContextParallel.attention, ContextParallel.explain):
        shown = inspect.signature(method).parameters
        assert tuple(shown) == ("self", "q", "k", "v", *options)
        assert {x: shown[x].default for x in options} == defaults


def test_explain_says_what_would_run() -> None:
    cp = ContextParallel(jax.make_mesh((2,), ("cp",), devices=jax.devices()[:2]), axis_name="cp")
    q, k, v = qkv()
    text = cp.explain(q, k, v, causal=True)
    program = ring_program(
        make_plan(Mask(causal=True), seq_len=q.shape[1], cp_size=2, layout="zigzag")
    )
    size = "4 launches or loops of them, forward and backward; 176 bytes of constants: 176 of work"
    absent = "".join(
        f"  not {name}: needs ring-jax-{package} {__version__}, which is not installed\n"
        for name, package in (
            ("triton (cuda)", "gpu"),
            ("cudnn (cuda)", "gpu"),
            ("pallas (tpu)", "tpu"),
        )
    )
    why = "devices of a CPU share its cores and its memory, and a ring was faster there"
    assert text == (
        f"kernel xla (any device)\n{absent}strategy ring, transport xla\n"
        f"  not ulysses: it was not measured on cpu\n  not gather: {why}\n"
        f"program            {size} items of all ranks\n{viz.describe(program, pictures=False)}"
    )
    gathering = cp.explain(q, k, v, causal=True, strategy="gather")
    assert "strategy gather" in gathering
    assert gathering.splitlines()[-3:] == [
        "imbalance          1.000  busiest rank's (query, key) pairs over the mean",
        "fetches            1 shard of K/V by each device, in one all-gather",
        "launches           1 over own keys, 1 over all others, in the forward",
    ]
    lines = []
    jax.eval_shape(lambda q: lines.append(cp.explain(q, k, v, causal=True)), q)
    assert lines == [text], "also while it is traced"


def test_one_device_on_a_mesh_with_explicit_axes() -> None:
    mesh = jax.make_mesh((2,), ("cp",), devices=jax.devices()[:2])
    x = jax.random.normal(jax.random.key(0), (1, 8, 2, 4))

    def loss(x: jax.Array) -> jax.Array:
        return ring_attention(x, x, x, axis_name=None, causal=True, sinks=jnp.ones(2)).sum()

    expected = jax.jit(jax.grad(loss))(x)
    replicated = jax.device_put(x, NamedSharding(mesh, P()))
    close(jax.jit(jax.grad(loss))(replicated), expected)  # recompiled for two devices
    split = jax.device_put(x, NamedSharding(mesh, P(None, "cp")))
    with pytest.raises(ValueError, match=r"axis_name=None runs on one device.*use ContextParallel"):
        loss(split)


def test_donated_inputs() -> None:
    def step(*args: jax.Array) -> Any:
        return [x - 0.1 * g for x, g in zip(args, gradients(ring(), *args), strict=True)]

    expected = [np.asarray(x) for x in jax.jit(step)(*qkv())]
    donated = [jax.device_put(x, NamedSharding(mesh_of(cp=2), P(None, "cp"))) for x in qkv()]
    for actual, expected_value in zip(
        jax.jit(step, donate_argnums=(0, 1, 2))(*donated), expected, strict=True
    ):
        close(actual, expected_value)
    assert all(x.is_deleted() for x in donated)


TWO_AXES: dict[str, Any] = {
    kind.name: jax.make_mesh((2, 2), ("cp", "tp"), (kind, kind), devices=jax.devices()[2:6])
    for kind in (AxisType.Auto, AxisType.Explicit)
}
TWO_AXES["abstract"] = AbstractMesh((2, 2), ("cp", "tp"), (AxisType.Auto, AxisType.Auto))
SPLIT = ContextParallel(TWO_AXES["Auto"], "cp", head_axis="tp")
FOUR_HEADS = jax.random.normal(jax.random.key(0), (1, 8, 4, 4))


@pytest.mark.parametrize("mesh", TWO_AXES.values(), ids=TWO_AXES)
def test_pickles(mesh: Any) -> None:
    cp = ContextParallel(mesh, "cp", head_axis="tp", layout="striped")
    for again in (pickle.loads(pickle.dumps(cp)), copy.deepcopy(cp), copy.copy(cp)):
        assert vars(again) == vars(cp) and type(again) is ContextParallel
        if isinstance(mesh, jax.sharding.Mesh):
            np.testing.assert_array_equal(
                again.attention(FOUR_HEADS, FOUR_HEADS, FOUR_HEADS),
                cp.attention(FOUR_HEADS, FOUR_HEADS, FOUR_HEADS),
            )


def test_a_pickle_of_more_devices() -> None:
    state = SPLIT.__getstate__()
    state["mesh"] = state["mesh"]._replace(ids=state["mesh"].ids + 1000)
    with pytest.raises(ValueError, match=r"cpu devices \[1002, 1003, 1004, 1005\]"):
        SPLIT.__class__.__new__(ContextParallel).__setstate__(state)


def test_heads_that_an_axis_does_not_divide() -> None:
    k = FOUR_HEADS[:, :, :1]
    with pytest.raises(
        ValueError, match=r"heads of k, 1, .*jnp\.repeat\(k, n, axis=2\).*head_axis out"
    ):
        SPLIT.attention(FOUR_HEADS, k, k)
    out = SPLIT.attention(FOUR_HEADS, *[jnp.repeat(k, 2, axis=2)] * 2)  # follows the error's advice
    plain = ContextParallel(TWO_AXES["Auto"], "cp").attention(FOUR_HEADS, k, k)
    np.testing.assert_allclose(out, plain, atol=1e-6)
    with pytest.raises(ValueError, match=r"heads of q, 3, .*Instead: leave head_axis out"):
        SPLIT.attention(FOUR_HEADS[:, :, :3], k, k)
    by_batch = ContextParallel(TWO_AXES["Auto"], "cp", batch_axis="tp")
    with pytest.raises(ValueError, match=r"batch of q, 1, .*pad the batch"):
        by_batch.attention(FOUR_HEADS, FOUR_HEADS, FOUR_HEADS)
