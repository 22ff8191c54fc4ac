"""``ring_jax.check`` and ``preflight``: right calls and steps pass, and each fault is found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec as P
from jax_meshes import KINDS, TOKENS, context, in_ring, mesh_of, random
from mutants import Edits, changed
from refused import refused

import ring_jax
from ring_core import LayoutName, UnsupportedError, WrongResultError, hops as plans
from ring_core.hops import Hop
from ring_jax import ContextParallel, autodiff, movement, preflight, ring_attention
from ring_jax.collectives import Ranks
from ring_jax.records import Item
from ring_jax.tripwire import traffic

ATTEND, GRADS = (f"ring_jax.kernels.xla:XlaKernel.{x}_into" for x in ("attend", "grads"))
STEP = "ring_jax.strategies.steps:StepRunner.attend"
LAUNCH = 'return _launch("attend_into", spec, rows, columns, work, into=into)'
LO, HI = (Item._fields.index(side) for side in ("lo", "hi"))
IN_KERNELS: dict[str, dict[str, str]] = {
    "scale_dropped": {"spec.call, rows": "replace(spec.call, scale=16**-0.5), rows"},
    "window_inverted": {
        "columns, work)": "columns, work._replace(items=work.items"
        f".at[:, {LO}].set(-work.items[:, {HI}]).at[:, {HI}].set(-work.items[:, {LO}])))",
    },
}  # fmt: skip
SCALED = "return (lambda x: x._replace({0}=x.{0}.at[:, {1}].multiply(1.01)))(ScoreBlocks"
FAULTS: dict[str, Edits] = {
    **{name: dict.fromkeys((ATTEND, GRADS), edits) for name, edits in IN_KERNELS.items()},
    "one_head_wrong": {
        ATTEND: {"return ScoreBlocks": SCALED.format("out", -1), "block, into\n    )": "block, into\n    ))"},
    },
    "one_head_of_dk_wrong": {
        GRADS: {"return ScoreBlocks": SCALED.format("dkv", 0), "upstream), into\n    )": "upstream), into\n    ))"},
    },
    "keys_one_hop_late": {STEP: {"work, q, held)": "work, q, own_message(self.inputs))"}},
    "stale_keys_in_the_backward": {
        "ring_jax.autodiff:_forward": {"out, lse, last)": "out, lse, jax.tree.map(lambda x: x[:, :, ::-1], last))"},
    },
    "nothing_is_sent": {
        "ring_jax.collectives:Ranks.move": {"    targets = range": "    return x\n    targets = range"},
    },
    "gradients_to_the_wrong_owner": {
        "ring_jax.strategies.ring:_ring_backward": {
            "not_none(state.own_dkv), query": "runner.ranks.move(not_none(state.own_dkv), 1), query",
        },
    },
    "last_step_dropped": {
        STEP: {"if work is None:": "if work is None or launches.shifts == (self.call.program.steps[-1].shift,):"},
    },
    "counted_twice": {  # own keys, as happens if tokens are replicated over a ring
        STEP: {
            LAUNCH: f"into = {LAUNCH[7:]}\n    if launches.shifts != (0,):\n        return into\n"
            "    spec = LaunchSpec(self.call, overwrite=False, is_final=is_final, items=launches.items)\n"
            f"    {LAUNCH}",
        },
    },
}  # fmt: skip
#: Found when a call is traced, from its collectives.
IN_TRACES = ("nothing_is_sent", "gradients_to_the_wrong_owner")


@contextmanager
def recompiled() -> Iterator[None]:
    """Drop compiled programs before and after."""
    autodiff._compiled.cache_clear()
    jax.clear_caches()
    yield
    with suppress(jax.errors.JaxRuntimeError):  # errors of callbacks that have not been awaited
        jax.effects_barrier()
    autodiff._compiled.cache_clear()
    jax.clear_caches()


@contextmanager
def broken(fault: str) -> Iterator[None]:
    """Inject one of the faults."""
    with changed(FAULTS[fault]), recompiled():
        yield


def grads(seed: int = 0, *, backward: bool = True, size: int = 3, **options: Any) -> Any:
    """Return the gradients of a call with a window over parts of several shards."""
    kwargs: Any = {"window": (20, 3), "softmax_scale": 0.4} | options
    out_specs = (TOKENS, P(None, None, "cp")) if "return_lse" in options else TOKENS
    ring = in_ring(partial(ring_attention, axis_name="cp", **kwargs), size, out_specs=out_specs)
    x = [random(2, 12 * size, n, 16, seed=3 * seed + m) for m, n in enumerate((4, 2, 2))]

    def loss(*args: Any) -> Any:
        return sum((x**2).sum() for x in jax.tree.leaves(ring(*args)))

    return jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1, 2)) if backward else ring)(*x))


@pytest.mark.nightly(
    unless=["one_head_of_dk_wrong", "nothing_is_sent", "gradients_to_the_wrong_owner"]
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_trips(fault: str) -> None:
    of_backward = fault in ("one_head_of_dk_wrong", "stale_keys_in_the_backward")
    # A backward's fault trips after the whole program is compiled: two devices are quicker.
    size = 2 if of_backward else 3
    own = "WrongResult|carry"  # errors of this package, while tracing or in a callback
    with ring_jax.check(), broken(fault), pytest.raises(Exception, match=own) as raised:
        jax.tree.map(partial(grads, sinks=jnp.zeros(4), size=size), [0, 1, 2])
    text = str(raised.value)
    if fault in IN_TRACES:
        assert isinstance(raised.value, WrongResultError)
        assert "bytes between 3 ranks, and the program" in text
        return
    assert isinstance(raised.value, jax.errors.JaxRuntimeError)
    assert f"({'backward' if of_backward else 'forward'}) is wrong. rank " in text
    assert "by the dense formula in float64" in text
    assert "Kernel 'xla', strategy 'ring'" in text


@pytest.mark.nightly
def test_one_in_so_many_is_checked() -> None:
    with ring_jax.check(3), broken("one_head_wrong"):
        messages: list[str] = []
        for seed in range(12):
            try:
                grads(seed, backward=False)
            except jax.errors.JaxRuntimeError as error:
                messages.append(str(error))
    assert all("WrongResultError" in text for text in messages)
    assert 1 <= len(messages) <= 8


Q = random(1, 16, 2, 8)


def test_a_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context overrides the variable, and a program compiled before is compiled anew."""
    call = jax.jit(lambda x: ring_attention(x, x, x, axis_name=None))
    with broken("one_head_wrong"):
        jax.block_until_ready(call(Q))
        with ring_jax.check(), pytest.raises(jax.errors.JaxRuntimeError, match="1 ranks"):
            jax.block_until_ready(call(Q))
        jax.block_until_ready(call(Q))
    monkeypatch.setenv("RING_CHECK", "1")
    with broken("one_head_wrong"), pytest.raises(jax.errors.JaxRuntimeError, match="1 ranks"):
        jax.block_until_ready(ring_attention(Q, Q, Q, axis_name=None))
    with ring_jax.check(0), broken("one_head_wrong"):
        jax.block_until_ready(ring_attention(Q, Q, Q, axis_name=None))
    monkeypatch.setenv("RING_CHECK", "sometimes")
    refused("RING_CHECK must be 1", ring_attention, Q, Q, Q, axis_name=None)


def loss_of(x: Any) -> Any:
    """Return the summed output of a call on one device, with ``x`` ``[B, T, H, D]``."""
    return ring_attention(x, x, x, axis_name=None, causal=True).sum()


TRANSFORMED: dict[str, Callable[[Any], Any]] = {
    "vmap": jax.vmap(jax.grad(loss_of)),
    "scan": lambda x: jax.lax.scan(lambda n, y: (n, jax.grad(loss_of)(y)), 0, x)[1],
    "checkpoint": jax.grad(jax.checkpoint(lambda y: loss_of(y[0]))),
    "jit of vmap": jax.jit(jax.vmap(jax.grad(loss_of))),
}


@pytest.mark.nightly(unless=["checkpoint"])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_under_transformations(name: str) -> None:
    x = random(3, 1, 16, 2, 8)
    with ring_jax.check():
        jax.block_until_ready(TRANSFORMED[name](x))
        # jax 0.11 does not compile a bare checkpoint: the error is then raised as it is.
        raised = (WrongResultError, jax.errors.JaxRuntimeError)
        with broken("one_head_wrong"), pytest.raises(raised, match=r"\(forward\) is wrong"):
            jax.block_until_ready(TRANSFORMED[name](x))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_rings_beside_each_other_are_checked_each_by_itself(kind: str) -> None:
    """Parallel rings decide separately, from their own numbers, if a call is checked."""
    cp = ContextParallel(mesh_of(KINDS[kind], dp=2, cp=2), "cp", batch_axis="dp")
    run = jax.jit(jax.grad(lambda q: (cp.attention(q, q, q, causal=True) ** 2).sum()))
    with ring_jax.check(2):
        for seed in range(4):
            jax.block_until_ready(run(cp.shard(random(2, 16, 2, 8, seed=seed))))


@pytest.mark.nightly(unless=["2"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_rate_that_no_device_has(every: int) -> None:
    def calls(count: int, peak: float) -> None:
        with patch.object(traffic, "peak_tflops", {"cpu": peak}.get), recompiled():
            run = jax.jit(jax.grad(loss_of))
            for seed in range(count):
                jax.block_until_ready(run(random(1, 16, 2, 8, seed=seed)))

    words = r"TFLOP/s, and the device has 0: work"
    with ring_jax.check(every):
        calls(2 * every, 1e6)
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            calls(8, 1e-9)


def test_without_a_cpu_device_a_checked_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked calls raise if JAX_PLATFORMS excludes CPUs: callbacks could not run."""

    def none(backend: str | None = None) -> list[Any]:
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", none)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    words = r"JAX_PLATFORMS=.cuda.\. Instead: add .,cpu."
    with ring_jax.check(), pytest.raises(UnsupportedError, match=words):
        ring_attention(Q, Q, Q, axis_name=None)


T, SIZE = 40, 4

MOVES: dict[str, Callable[[ContextParallel, jax.Array], jax.Array]] = {
    "shift": lambda cp, x: cp.shift(x, 3, fill=2, cu_seqlens=(0, 7, 9, T - 1), seq_len=T - 1),
    "halo": lambda cp, x: cp.halo(x, 3, 2).rows,
    "relayout": lambda cp, x: cp.relayout(x, to="striped"),
}


def longest_for_all(*args: Any) -> tuple[Hop, ...]:
    """Let every rank send as many rows as the longest message has."""
    everyone = tuple(range(SIZE))
    return tuple(hop._replace(pieces=((0, hop.rows, everyone),)) for hop in plans.hops(*args))


right = Ranks.move


def more_comes_back(ranks: Ranks, x: Any, *args: Any) -> Any:
    """Let the backward send each message twice."""

    @jax.custom_vjp
    def send(x: jax.Array) -> jax.Array:
        return right(ranks, x, *args)

    def back(_: None, grad: jax.Array) -> tuple[jax.Array]:
        once, again = (jax.vjp(lambda y: right(ranks, y, *args), grad)[1](grad) for _ in "12")
        return (jnp.where(once[0] == 0, again[0], once[0]),)

    send.defvjp(lambda x: (send(x), None), back)
    return send(x)


ADDED: dict[str, tuple[Any, str, Any, str]] = {
    "forward": (movement, "hops", longest_for_all,
                r"a movement carry [\d,]+ bytes between 4 ranks, and the rows that change"),
    "backward": (Ranks, "move", more_comes_back,
                 "a backward of a movement carry"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("way", "name"),
    [(way, name) for way in ADDED for name in MOVES if (way, name) != ("forward", "relayout")],
)
def test_more_bytes_than_those_of_rows_that_move_are_an_error(way: str, name: str) -> None:
    cp, x, (target, attribute, fault, words) = context(SIZE), jnp.ones((2, T, 3)), ADDED[way]
    MOVES[name](cp, x)  # an unchecked program is not reused for a checked call
    with (
        ring_jax.check(),
        patch.object(target, attribute, fault),
        pytest.raises(WrongResultError, match=f"collectives of {words}"),
    ):
        MOVES[name](cp, x)


def test_replicated_shards_pass() -> None:
    """Gradients of replicated shards are summed over devices, which the check does not count."""

    def local(x: jax.Array) -> jax.Array:
        grad: jax.Array = jax.grad(lambda x: (ring_jax.shift(x, 1, axis_name="cp") ** 2).sum())(x)
        return grad

    run = jax.jit(in_ring(local, SIZE, in_specs=P(), out_specs=P()))
    x = jnp.ones((1, 5))
    expected = run(x)
    with ring_jax.check():
        np.testing.assert_array_equal(run(x), expected)


@pytest.mark.nightly(unless=["bfloat16"])  # it has the fewest digits
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_right_small_calls_pass(dtype: str) -> None:
    """Scores are peaked, so gradients are small differences."""

    def loss(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out = ring_attention(q, k, v, axis_name=None, window=(2, 9), softmax_scale=0.3)
        return (out * dout).astype(jnp.float32).sum()

    with ring_jax.check():
        grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        for seed in range(60):
            rng = np.random.default_rng(seed)
            x = [rng.standard_normal((2, 6, 4, 8)) * size for size in (6, 1, 1, 1)]
            jax.block_until_ready(grads(*(jnp.asarray(y, dtype) for y in x)))


LENGTH, H, D, WORDS = 16, 2, 8, 11
WORDS_OF_ROWS = np.random.default_rng(0).integers(0, WORDS, (2, LENGTH))
BATCH = {"tokens": WORDS_OF_ROWS, "labels": np.roll(WORDS_OF_ROWS, -1, 1)}
PARAMS = {
    "words": random(WORDS, H * D), "places": random(LENGTH, H * D), "head": random(H * D, WORDS, seed=1),
}  # fmt: skip


def step(cp: Any, params: Any, batch: Any, fault: str = "") -> Any:
    """Return the loss of a model of one layer, with one of the faults."""
    labels, positions = cp.shard(batch["labels"]), cp.positions(LENGTH)
    if fault == "labels":
        labels = jnp.asarray(batch["labels"])
    elif fault == "positions":
        positions = jnp.arange(LENGTH)
    elif fault == "shift":
        labels = jnp.roll(cp.shard(batch["tokens"]), -1, 1)
    words = jax.nn.one_hot(cp.shard(batch["tokens"]), WORDS) @ params["words"]
    x = words + jax.nn.one_hot(positions, LENGTH)[None] @ params["places"]
    if fault == "edges":
        roll, tokens = partial(jnp.roll, shift=1, axis=1), P(None, "cp")
        x = x + jax.shard_map(roll, mesh=cp.mesh, in_specs=tokens, out_specs=tokens)(x)
    elif fault == "noise":
        x = x * jnp.where(params["head"][0, 0] == PARAMS["head"][0, 0], 1.0, 2.0)
    heads = x.reshape(*x.shape[:2], H, D)
    logits = cp.attention(heads, heads, heads, causal=True).reshape(x.shape) @ params["head"]
    losses = -(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, WORDS)).sum(-1)
    return losses if fault == "vector" else losses.mean()


NATURAL = "in the layout 'contiguous' it is right, so something is in natural order"
FOUND: dict[str, tuple[LayoutName, str]] = {
    "labels": ("zigzag", NATURAL), "positions": ("striped", NATURAL), "shift": ("zigzag", NATURAL),
    "edges": ("contiguous", "may not see the next device's tokens"),
}  # fmt: skip
checked = partial(preflight, params=PARAMS, batch=BATCH)


@pytest.mark.nightly(unless=["auto-zigzag"])
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("kind", KINDS)
def test_right_steps_pass(kind: str, layout: Any) -> None:
    mesh = mesh_of(KINDS[kind], dp=2, cp=2)
    report = checked(ContextParallel(mesh, "cp", "dp", layout=layout), step)
    assert report.passed, str(report)
    assert [*report.gradients] == ["['head']", "['places']", "['words']"]
    assert "preflight passed: loss" in str(report)


@pytest.mark.nightly(unless=["edges", "positions"])
@pytest.mark.parametrize("fault", FOUND)
def test_wrong_steps_are_named(fault: str) -> None:
    layout, words = FOUND[fault]
    call = partial(checked, context(2, layout), partial(step, fault=fault))
    report = call()
    assert not report.passed
    assert "3 of 3 gradients differ, first that of params['head']" in report.findings[0]
    assert words in report.findings[1]
    assert str(report) == "preflight failed: " + ". ".join(report.findings)
    assert fault != "labels" or call(rtol=1e3).passed


def test_what_is_refused() -> None:
    vector, noise = (
        partial(checked, context(), partial(step, fault=x)) for x in ("vector", "noise")
    )
    refused(re.escape("a floating-point scalar, got float32 [2, 16]"), vector)
    refused("a unit in the last place turn them into others", noise)
    devices: Any = AbstractMesh((2,), ("cp",))
    words = "devices of other processes, or none. Instead:"
    refused(words, checked, ContextParallel(devices, "cp"), step, error=UnsupportedError)
