"""Calls and classes under JAX's transformations and derivatives, on meshes of every kind."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RINGS
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P
from jax_meshes import KINDS, TOKENS, check_passes, close, context, in_ring, mesh_of, random
from refused import refused

from ring_core import ChunkLayout, Mask, UnsupportedError, make_plan, reference, ring_program, viz
from ring_jax import RESIDUALS, ContextParallel, __version__, ring_attention
from ring_jax.records import AttentionOptions, CallOptions

Q, KV = (4, 16, 4, 8), (4, 16, 2, 8)
CALL = partial(ring_attention, axis_name="cp", causal=True)
DOUT = random(*Q, seed=3)


def qkv() -> tuple[jax.Array, jax.Array, jax.Array]:
    return random(*Q), random(*KV, seed=1), random(*KV, seed=2)


ring = partial(in_ring, CALL)


def dense(*args: jax.Array, **options: Any) -> np.ndarray[Any, Any]:
    return reference.attention(*map(np.asarray, args), causal=True, **options)[0]


def dense_gradients(*args: jax.Array, **options: Any) -> Any:
    x = map(np.asarray, (DOUT, *args))
    return reference.attention_grads(*x, causal=True, **options)


def test_under_vmap_scan_and_remat() -> None:
    """With a bias of -1e10 in whole rows, of which devices know the largest number."""
    bias = random(1, 4, 16, 16, seed=4).at[:, :, -4:].add(-1e10)
    args = [jnp.stack([x, 2 * x, 3 * x]) for x in (*qkv(), bias)]
    policy = jax.checkpoint_policies.save_only_these_names(*RESIDUALS)
    call = in_ring(
        lambda q, k, v, bias: CALL(q, k, v, bias=bias),
        in_specs=(*[TOKENS] * 3, P(None, None, "cp")),
    )
    rows = [([x[n] for x in args[:3]], {"bias": np.asarray(args[3][n])}) for n in range(3)]
    expected = np.stack([dense(*x, **options) for x, options in rows])

    def layer(carry: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        out = jax.checkpoint(call, policy=policy)(*x)
        return carry + out.sum(), out

    def loss(*x: jax.Array) -> Any:
        _, out = layer(jnp.float32(0), x)
        return (out * DOUT).sum(), out

    total, outs = jax.jit(lambda *args: jax.lax.scan(layer, jnp.float32(0), args))(*args)
    close(outs, expected)
    close(total, expected.sum(), 1e-4)
    batched, outs = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2, 3), has_aux=True)))(*args)
    close(outs, expected)
    for n, (x, options) in enumerate(rows):
        grads = dense_gradients(*x, **options)
        close([x[n] for x in batched], (*grads[:3], grads.dbias))


@pytest.mark.nightly(unless=["False"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_replicated_parameters_get_their_gradient_once(*, check_vma: bool) -> None:
    """Replicated sinks on a mesh with data parallelism get one summed gradient, not several."""
    tokens = P("dp", "cp")
    function: Any = jax.shard_map(
        lambda q, k, v, sinks: CALL(q, k, v, sinks=sinks), mesh=mesh_of(dp=2, cp=4),
        in_specs=(tokens,) * 3 + (P(),), out_specs=tokens, check_vma=check_vma,
    )  # fmt: skip
    more = {"sinks": random(4, seed=5)}
    check_passes(lambda *x, sinks: function(*x, sinks), qkv(), DOUT, more, causal=True)


SLOPES = 2.0 ** -np.arange(1, 5, dtype=np.float32)


@pytest.mark.nightly(unless=["zigzag-explicit"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layout", "strategy"),
    [*RINGS.values(), (ChunkLayout(((0, 3), (1, 2))), "ring")], ids=[*RINGS, "chunks"],
)  # fmt: skip
def test_context_parallel(kind: str, layout: Any, strategy: str) -> None:
    """All options of global arrays, on a mesh that splits the batch and heads."""
    mesh = mesh_of(KINDS[kind], dp=2, cp=2, tp=2)
    axes: tuple[Any, Any] = ("dp", "tp") if kind == "explicit" else (("dp", "tp"), None)
    cp = ContextParallel(mesh, "cp", *axes, layout)
    ids = np.sort(np.random.default_rng(4).integers(0, 3, Q[:2])).astype(np.int32)
    mask = np.array(random(4, 4, 16, 16, seed=7)) < 0.3
    mask[..., 3, :] = False  # a row that sees nothing
    # In whole rows the bias is very negative: devices know their largest number.
    more = {
        "sinks": random(4, seed=5),
        "bias": random(1, 4, 16, 16, seed=6).at[:, :, -4:].add(-1e10),
    }
    fixed: dict[str, Any] = {"dropout_p": 0.25, "dropout_seed": 7, "softcap": 3.0, "causal": True}

    def call(q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> Any:
        options: dict[str, Any] = fixed | {
            "bias": cp.shard(bias, dim=2), "mask": cp.shard(jnp.asarray(mask), dim=2), "sinks": sinks,
            "segment_ids": cp.shard(jnp.asarray(ids)), "alibi_slopes": jnp.asarray(SLOPES),
        }  # fmt: skip
        return cp.unshard(cp.attention(*map(cp.shard, (q, k, v)), strategy=strategy, **options))

    hidden = np.where(mask, more["bias"], -np.inf)
    with jax.set_mesh(mesh) if kind == "explicit" else nullcontext():
        options: dict[str, Any] = {"segment_ids": ids, "alibi_slopes": SLOPES, "bias": hidden}
        check_passes(call, qkv(), DOUT, more, **options, **fixed)


def test_calls_that_nothing_compiles(caplog: pytest.LogCaptureFixture) -> None:
    """Calls outside of jit run one program, compiled once, whatever the seed.

    Before jax 0.12 their gradients run operation by operation.
    """
    cp = ContextParallel(mesh_of(dp=2, cp=2), "cp", batch_axis="dp")
    args, weight = [cp.shard(x) for x in qkv()], cp.shard(DOUT)
    fixed: dict[str, Any] = {"causal": True, "dropout_p": 0.25, "alibi_slopes": jnp.asarray(SLOPES)}
    programs = []
    for seed in (5, 6):
        call = partial(cp.attention, dropout_seed=seed, **fixed)
        with caplog.at_level("WARNING"):
            with jax.log_compiles():
                again = call(*args)
            with jax.log_compiles() if jax.__version_info__ >= (0, 12) else nullcontext():
                out, pull = jax.vjp(call, *args)
                grads = pull(weight)
        programs.append(sum(text.startswith("Compiling jit(") for text in caplog.messages))
        caplog.clear()
        options = {"dropout_p": 0.25, "dropout_seed": seed, "alibi_slopes": SLOPES}
        expected = dense(*qkv(), **options)
        results = [cp.unshard(x) for x in (out, again, *grads)]
        close(results, (expected, expected, *dense_gradients(*qkv(), **options)[:3]))
    assert 0 < programs[0] < 20
    assert programs[1] == 0


def test_signatures_have_the_same_options() -> None:
    """Their names and defaults, in this order; those of all public functions are in `tests/api`."""
    call = inspect.signature(ring_attention).parameters
    first, options = [*call][:5], [*call][5:]
    assert first == ["q", "k", "v", "axis_name", "layout"]
    defaults = {name: call[name].default for name in options}
    assert list(AttentionOptions.__annotations__) == [x for x in options if x != "return_lse"]
    assert list(defaults.items()) == list(CallOptions._field_defaults.items())
    for method in (ContextParallel.attention, ContextParallel.explain):
        shown = inspect.signature(method).parameters
        assert [*shown] == ["self", "q", "k", "v", *options]
        assert {x: shown[x].default for x in options} == defaults


def test_explain_says_what_would_run() -> None:
    cp = context(kind="explicit")
    q, k, v = qkv()
    text = cp.explain(q, k, v, causal=True)
    program = ring_program(
        make_plan(Mask(causal=True), seq_len=q.shape[1], cp_size=2, layout="zigzag")
    )
    size = "4 launches or loops of them, forward and backward; 176 bytes of constants: 176 of work"
    packages = {"triton (cuda)": "gpu", "cudnn (cuda)": "gpu", "pallas (tpu)": "tpu"}
    absent = "".join(
        f"  not {name}: needs ring-jax-{package} {__version__}, which is not installed\n"
        for name, package in packages.items()
    )
    why = "devices of a CPU share its cores and its memory, and a ring was faster there"
    assert text == (
        f"kernel xla (any device)\n{absent}strategy ring, transport xla\n  not gather: {why}\n"
        "  not ulysses: it was not measured on cpu\n"
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
    mesh, x = mesh_of(AxisType.Explicit, cp=2), random(1, 8, 2, 4)

    def loss(x: jax.Array) -> jax.Array:
        return ring_attention(x, x, x, axis_name=None, causal=True, sinks=jnp.ones(2)).sum()

    expected = jax.jit(jax.grad(loss))(x)
    replicated = jax.device_put(x, NamedSharding(mesh, P()))
    close(jax.jit(jax.grad(loss))(replicated), expected)  # recompiled for two devices
    split = jax.device_put(x, NamedSharding(mesh, TOKENS))
    refused(r"axis_name=None runs on one device.*use ContextParallel", loss, split)


def test_donated_inputs() -> None:
    def step(*args: jax.Array) -> Any:
        grads = jax.grad(lambda *x: (ring()(*x) * DOUT).sum(), (0, 1, 2))(*args)
        return [x - 0.1 * g for x, g in zip(args, grads, strict=True)]

    expected = [x - 0.1 * g for x, g in zip(qkv(), dense_gradients(*qkv())[:3], strict=True)]
    donated = [jax.device_put(x, NamedSharding(mesh_of(cp=2), TOKENS)) for x in qkv()]
    close(jax.jit(step, donate_argnums=(0, 1, 2))(*donated), expected)
    assert all(x.is_deleted() for x in donated)


TWO_AXES: dict[str, Any] = {
    **{name: Mesh(np.array(jax.devices()[2:6]).reshape(2, 2), ("cp", "tp"), axis_types=(kind,) * 2)
       for name, kind in KINDS.items()},
    "abstract": AbstractMesh((2, 2), ("cp", "tp"), (AxisType.Auto,) * 2),
}  # fmt: skip
SPLIT = ContextParallel(TWO_AXES["auto"], "cp", head_axis="tp")
FOUR_HEADS = random(1, 8, 4, 4)


@pytest.mark.parametrize("mesh", TWO_AXES.values(), ids=TWO_AXES)
def test_pickles(mesh: Any) -> None:
    cp = ContextParallel(mesh, "cp", head_axis="tp", layout="striped")
    for again in (pickle.loads(pickle.dumps(cp)), copy.deepcopy(cp), copy.copy(cp)):
        assert vars(again) == vars(cp) and type(again) is ContextParallel
        if isinstance(mesh, Mesh):
            outs = [x.attention(FOUR_HEADS, FOUR_HEADS, FOUR_HEADS) for x in (again, cp)]
            np.testing.assert_array_equal(outs[0], outs[1])


def test_a_pickle_of_more_devices() -> None:
    state = SPLIT.__getstate__()
    state["mesh"] = state["mesh"]._replace(ids=state["mesh"].ids + 1000)
    with pytest.raises(ValueError, match=r"cpu devices \[1002, 1003, 1004, 1005\]"):
        SPLIT.__class__.__new__(ContextParallel).__setstate__(state)


def test_heads_that_an_axis_does_not_divide() -> None:
    q, k = FOUR_HEADS, FOUR_HEADS[:, :, :1]
    words = r"heads of k, 1, .*jnp\.repeat\(k, n, axis=2\).*head_axis out"
    refused(words, SPLIT.attention, q, k, k)
    out = SPLIT.attention(q, *[jnp.repeat(k, 2, axis=2)] * 2)  # follows the error's advice
    close(out, ContextParallel(SPLIT.mesh, "cp").attention(q, k, k))
    refused(r"heads of q, 3, .*Instead: leave head_axis out", SPLIT.attention, q[:, :, :3], k, k)
    by_batch = ContextParallel(SPLIT.mesh, "cp", batch_axis="tp")
    refused(r"batch of q, 1, .*pad the batch", by_batch.attention, q, q, q)


CP = context()
X = random(1, 16, 2, 4)


def sharded(q: Any, k: Any, v: Any) -> Any:
    call = partial(ring_attention, axis_name="cp", causal=True, sinks=jnp.zeros(2))
    return in_ring(call)(q, k, v)


DERIVED: dict[str, Callable[..., Any]] = {
    "one device": partial(ring_attention, axis_name=None, causal=True),
    "gather": partial(CP.attention, strategy="gather", cu_seqlens=(0, 7, 16)),
    "shard_map": sharded,
}  # fmt: skip


def squares(call: Callable[..., Any], q: Any, k: Any = X) -> Any:
    return (call(q, k, X) ** 2).sum()


def gradient_along(loss: Any, x: Any, t: Any) -> Any:
    """Return the gradient of a tangent: reverse mode over forward mode.

    JAX has no rule for the tangent of a call with a gradient.
    """
    return jax.grad(lambda a: jax.jvp(loss, (a,), (a if t is None else t,))[1])(x)


#: Derivatives of a call's loss at ``x``, by the words of the error.
ASKED: dict[str, dict[str, Callable[[Callable[..., Any], Any], Any]]] = {
    "forward mode": {
        "jvp": lambda call, x: jax.jvp(partial(call, k=X, v=X), (x,), (x,)),
        "jvp of keys": lambda call, x: jax.jvp(partial(squares, call, X), (x,), (x,)),
        "jacfwd": lambda call, x: jax.jacfwd(partial(squares, call))(x),
        "linearize": lambda call, x: jax.linearize(partial(squares, call), x)[1](x),
        "grad of jvp": lambda call, x: gradient_along(partial(squares, call), x, None),
        "grad of jvp along a constant": lambda call, x: gradient_along(partial(squares, call), x, X),
        "in a batch": lambda call, x: jax.vmap(partial(gradient_along, partial(squares, call), x))(X[None]),
        "vjp of linearize": lambda call, x: jax.vjp(jax.linearize(partial(squares, call), x)[1], x)[1](1.0),
    },
    "derivative of a gradient": {
        "jvp of grad": lambda call, x: jax.jvp(jax.grad(partial(squares, call)), (x,), (x,)),
        "hessian": lambda call, x: jax.hessian(partial(squares, call))(x),
        "grad of grad": lambda call, x: jax.grad(lambda a: (jax.grad(partial(squares, call))(a) ** 2).sum())(x),
    },
}  # fmt: skip
ASKS = {name: (ask, words) for words, asks in ASKED.items() for name, ask in asks.items()}


@pytest.mark.nightly(  # per change each with one of the calls
    unless=[f"{asked}-{call}" for asked, call in zip(ASKS, cycle(DERIVED), strict=False)]
)
@pytest.mark.parametrize("call", DERIVED)
@pytest.mark.parametrize("asked", ASKS)
def test_attention_refuses_all_but_the_gradient(asked: str, call: str) -> None:
    ask, message = ASKS[asked]
    function: Any = partial(ask, DERIVED[call])
    if ([*ASKS].index(asked) + [*DERIVED].index(call)) % 2:  # every other one
        function = jax.jit(function)
    refused(f"{message}.*Instead: use gradients alone", function, X, error=UnsupportedError)


def test_other_functions_keep_the_words_of_jax() -> None:
    """The rule that refuses the tangent of a tangent is registered for a primitive of JAX's."""

    @jax.custom_vjp
    def doubled(x: Any) -> Any:
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, None), lambda _, gradient: (2 * gradient,))
    with pytest.raises(NotImplementedError, match="'custom_lin' not implemented"):
        jax.grad(lambda x: jax.jvp(lambda a: doubled(a).sum(), (x,), (x,))[1])(X)


@pytest.mark.nightly(only=["shard_map"])
@pytest.mark.parametrize("name", ["one device", "shard_map"])
def test_gradients_stay(name: str) -> None:
    call = DERIVED[name]
    expected = jax.grad(partial(squares, call))(X)

    def beside(q: Any) -> Any:
        inner = jax.lax.stop_gradient(jax.grad(partial(squares, call))(q))
        return squares(call, q) + (inner * q).sum()

    close(jax.vmap(jax.grad(partial(squares, call)))(X[None])[0], expected, 1e-5)
    close(jax.jit(jax.grad(beside))(X), 2 * expected, 1e-5)


def test_saved_residuals_spare_the_ring() -> None:
    """Keys alone are gathered again if a checkpoint policy saves ``out`` and ``lse``."""
    policies = jax.checkpoint_policies

    def count(operation: str, call: Callable[..., Any], policy: Any) -> int:
        loss = partial(squares, jax.checkpoint(call, policy=policy))
        return str(jax.make_jaxpr(jax.grad(loss))(X)).count(operation)

    saved = policies.save_only_these_names
    permutes = partial(count, "ppermute", ring(4))
    expected = permutes(policies.everything_saveable)
    assert permutes(saved(*RESIDUALS)) == expected < permutes(policies.nothing_saveable)
    products = partial(count, "dot_general", partial(DERIVED["gather"], kernel="xla"))
    assert products(saved(*RESIDUALS)) == products(saved(*RESIDUALS[:2])) < products(saved())
