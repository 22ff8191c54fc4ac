"""``ring_jax.check``: right calls pass, and each injected fault raises on all devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from mutants import Edits, changed

import ring_jax
from ring_core import hops as plans
from ring_core.hops import Hop
from ring_jax import (
    ContextParallel,
    UnsupportedError,
    WrongResultError,
    autodiff,
    movement,
    ring_attention,
)
from ring_jax.collectives import Ranks
from ring_jax.records import Item
from ring_jax.tripwire import traffic as tripwire_traffic

Patches = list[tuple[Any, str, Any]]


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
FAULTS: dict[str, Edits] = {
    **{name: dict.fromkeys((ATTEND, GRADS), edits) for name, edits in IN_KERNELS.items()},
    "one_head_wrong": {
        ATTEND: {
            "return ScoreBlocks": "return (lambda x: x._replace(out=x.out.at[:, -1].multiply(1.01)))(ScoreBlocks",
            "block, into\n    )": "block, into\n    ))",
        },
    },
    "one_head_of_dk_wrong": {
        GRADS: {
            "return ScoreBlocks": "return (lambda x: x._replace(dkv=x.dkv.at[:, 0].multiply(1.01)))(ScoreBlocks",
            "upstream), into\n    )": "upstream), into\n    ))",
        },
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


@contextmanager
def patched(patches: Patches) -> Iterator[None]:
    """Replace functions."""
    with ExitStack() as stack:
        for target, attribute, replacement in patches:
            stack.enter_context(patch.object(target, attribute, replacement))
        stack.enter_context(recompiled())
        yield


def grads(seed: int = 0, *, backward: bool = True, size: int = 3, **options: Any) -> Any:
    """Return the gradients of a call with a window over parts of several shards."""
    mesh = jax.make_mesh((size,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:size])
    kwargs: Any = {"window": (20, 3), "softmax_scale": 0.4} | options

    def call(q: Any, k: Any, v: Any) -> Any:
        return ring_attention(q, k, v, axis_name="cp", **kwargs)

    tokens, rows = P(None, "cp"), P(None, None, "cp")
    out_specs = (tokens, rows) if kwargs.get("return_lse") else tokens
    ring = jax.shard_map(call, mesh=mesh, in_specs=(tokens,) * 3, out_specs=out_specs)
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k, v = (
        jax.random.normal(key, (2, 12 * size, heads, 16))
        for key, heads in zip(keys, (4, 2, 2), strict=True)
    )

    def loss(*args: Any) -> Any:
        return sum((x**2).sum() for x in jax.tree.leaves(ring(*args)))

    run = jax.jit(jax.grad(loss, (0, 1, 2)) if backward else ring)
    return jax.block_until_ready(run(q, k, v))


#: Pattern of errors that this package raises, while tracing or in a callback.
TEXT = r"WrongResult|carry"


def three_steps(size: int) -> None:
    """Run three calls with their backward on ``size`` devices."""
    for seed in range(3):
        grads(seed, sinks=jnp.zeros(4), size=size)


@pytest.mark.nightly(
    unless=["one_head_of_dk_wrong", "nothing_is_sent", "gradients_to_the_wrong_owner"]
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_trips(fault: str) -> None:
    of_backward = fault in ("one_head_of_dk_wrong", "stale_keys_in_the_backward")
    with ring_jax.check(), broken(fault), pytest.raises(Exception, match=TEXT) as raised:
        # A backward's fault trips after the whole program is compiled: two devices are quicker.
        three_steps(2 if of_backward else 3)
    text = str(raised.value)
    if fault in IN_TRACES:
        assert isinstance(raised.value, WrongResultError)
        assert "bytes between 3 ranks, and the program" in text
        return
    assert isinstance(raised.value, jax.errors.JaxRuntimeError)
    assert f"({'backward' if of_backward else 'forward'}) is wrong. rank " in text
    assert "by the dense formula in float64" in text
    assert "Kernel 'xla', strategy 'ring'" in text


@pytest.mark.nightly(unless=["ring-zigzag-2"])
@pytest.mark.parametrize(
    ("strategy", "layout", "size"),
    [("ring", "zigzag", 2), ("ring", "zigzag", 3), ("balanced", "contiguous", 3),
     ("gather", "striped", 3)],
)  # fmt: skip
def test_right_calls_pass(strategy: str, layout: str, size: int) -> None:
    """Checked calls, with a gradient through ``lse``, pass and give the same bits."""
    plain = grads(strategy=strategy, layout=layout, return_lse=True, size=size)
    with ring_jax.check():
        checked = grads(strategy=strategy, layout=layout, return_lse=True, size=size)
    for result, checked_result in zip(plain, checked, strict=True):
        np.testing.assert_array_equal(result, checked_result)


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


def test_a_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    q = jax.random.normal(jax.random.key(0), (1, 16, 2, 8))
    monkeypatch.setenv("RING_CHECK", "1")
    with broken("one_head_wrong"), pytest.raises(jax.errors.JaxRuntimeError, match="1 ranks"):
        jax.block_until_ready(ring_attention(q, q, q, axis_name=None))
    # The context overrides the environment variable.
    with ring_jax.check(0), broken("one_head_wrong"):
        jax.block_until_ready(ring_attention(q, q, q, axis_name=None))
    monkeypatch.setenv("RING_CHECK", "sometimes")
    with pytest.raises(ValueError, match="RING_CHECK must be 1"):
        ring_attention(q, q, q, axis_name=None)


def test_a_program_compiled_before_is_compiled_anew() -> None:
    q = jax.random.normal(jax.random.key(0), (1, 16, 2, 8))
    with broken("one_head_wrong"):
        call = jax.jit(lambda x: ring_attention(x, x, x, axis_name=None))
        jax.block_until_ready(call(q))
        with ring_jax.check(), pytest.raises(jax.errors.JaxRuntimeError):
            jax.block_until_ready(call(q))
        jax.block_until_ready(call(q))


@pytest.mark.parametrize("every", [-1, 1.5, "1", True])
def test_wrong_numbers_are_refused(every: Any) -> None:
    with pytest.raises(ValueError, match="every must be at least 0"), ring_jax.check(every):
        pass


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
    x = jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 8))
    with ring_jax.check():
        jax.block_until_ready(TRANSFORMED[name](x))
        # jax 0.11 does not compile a bare checkpoint: the error is then raised as it is.
        raised = (WrongResultError, jax.errors.JaxRuntimeError)
        with broken("one_head_wrong"), pytest.raises(raised, match=r"\(forward\) is wrong"):
            jax.block_until_ready(TRANSFORMED[name](x))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_rings_beside_each_other_are_checked_each_by_itself(kind: AxisType) -> None:
    """Parallel rings decide separately, from their own numbers, if a call is checked."""
    mesh = jax.make_mesh((2, 2), ("dp", "cp"), (kind, kind), devices=jax.devices()[:4])
    cp = ring_jax.ContextParallel(mesh, axis_name="cp", batch_axis="dp", layout="zigzag")
    run = jax.jit(jax.grad(lambda q: (cp.attention(q, q, q, causal=True) ** 2).sum()))
    with ring_jax.check(2):
        for seed in range(4):
            q = cp.shard(jax.random.normal(jax.random.key(seed), (2, 16, 2, 8)))
            jax.block_until_ready(run(q))


def device_of(tflops: float) -> Patches:
    """Return patches for a device with this peak rate."""
    return [(tripwire_traffic, "peak_tflops", lambda name: tflops if name == "cpu" else None)]


@pytest.mark.nightly(unless=["2"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_rate_that_no_device_has(every: int) -> None:
    def calls(count: int) -> None:
        run = jax.jit(jax.grad(loss_of))
        for seed in range(count):
            jax.block_until_ready(run(jax.random.normal(jax.random.key(seed), (1, 16, 2, 8))))

    with patched(device_of(1e6)), ring_jax.check(every):
        calls(2 * every)
    with (
        patched(device_of(1e-9)),
        ring_jax.check(every),
        pytest.raises(jax.errors.JaxRuntimeError, match=r"TFLOP/s, and the device has 0: work"),
    ):
        calls(8)


def test_without_a_cpu_device_a_checked_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked calls raise if JAX_PLATFORMS excludes CPUs: callbacks could not run."""

    def none(backend: str | None = None) -> list[Any]:
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", none)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    x = jnp.ones((1, 4, 1, 8))
    with (
        ring_jax.check(),
        pytest.raises(UnsupportedError, match=r"JAX_PLATFORMS=.cuda.\. Instead: add .,cpu."),
    ):
        ring_jax.ring_attention(x, x, x, axis_name=None)


T, SIZE = 40, 4

MOVES: dict[str, Callable[[ContextParallel, jax.Array], jax.Array]] = {
    "shift": lambda cp, x: cp.shift(x, 3, fill=2, cu_seqlens=(0, 7, 9, T - 1), seq_len=T - 1),
    "halo": lambda cp, x: cp.halo(x, 3, 2).rows,
    "relayout": lambda cp, x: cp.relayout(x, to="striped"),
}


def context(kind: AxisType = AxisType.Auto) -> ContextParallel:
    return ContextParallel(jax.make_mesh((SIZE,), ("cp",), axis_types=(kind,)), "cp")


@contextmanager
def longest_for_all() -> Iterator[None]:
    """Let every rank send as many rows as the longest message has."""

    def uncut(*args: Any) -> tuple[Hop, ...]:
        everyone = tuple(range(SIZE))
        return tuple(hop._replace(pieces=((0, hop.rows, everyone),)) for hop in plans.hops(*args))

    with patch.object(movement, "hops", uncut):
        yield


@contextmanager
def more_comes_back() -> Iterator[None]:
    """Let the backward send each message twice."""
    right = Ranks.move

    def wrong(ranks: Ranks, x: Any, *args: Any) -> Any:
        @jax.custom_vjp
        def send(x: jax.Array) -> jax.Array:
            return right(ranks, x, *args)

        def back(_: None, grad: jax.Array) -> tuple[jax.Array]:
            once, again = (jax.vjp(lambda y: right(ranks, y, *args), grad)[1](grad) for _ in "12")
            return (jnp.where(once[0] == 0, again[0], once[0]),)

        send.defvjp(lambda x: (send(x), None), back)
        return send(x)

    with patch.object(Ranks, "move", wrong):
        yield


@pytest.mark.parametrize("name", ["shift", "halo"])
def test_more_bytes_than_those_of_rows_that_move_are_an_error(name: str) -> None:
    cp, x = context(), jnp.ones((2, T, 3))
    MOVES[name](cp, x)  # an unchecked program is not reused for a checked call
    words = (
        r"collectives of a movement carry [\d,]+ bytes between 4 ranks, and the rows that change"
    )
    with ring_jax.check(), longest_for_all(), pytest.raises(WrongResultError, match=words):
        MOVES[name](cp, x)


@pytest.mark.parametrize("name", MOVES)
def test_more_bytes_in_the_backward_are_an_error(name: str) -> None:
    cp, x = context(), jnp.ones((2, T, 3))
    words = "collectives of a backward of a movement carry"
    with ring_jax.check(), more_comes_back(), pytest.raises(WrongResultError, match=words):
        MOVES[name](cp, x)


@pytest.mark.nightly(unless=["auto"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_right_movements_pass(kind: AxisType) -> None:
    cp, x = context(kind), jnp.arange(2 * T * 3.0).reshape(2, T, 3)

    def every(x: jax.Array) -> list[Any]:
        results: list[Any] = []
        for move in MOVES.values():
            run = partial(move, cp)
            results += [*jax.vjp(run, x)[1](run(x) ** 3), *jax.jvp(run, (x,), (x,))]
            results.append(run(x.astype(jnp.int8)))
            if kind is AxisType.Auto:
                results.append(jax.vmap(run)(x[None]))
        return results

    with jax.set_mesh(cp.mesh):
        y = cp.shard(x)
        expected = jax.jit(every)(y)
        with ring_jax.check():
            moved = jax.jit(every)(y)
    jax.tree.map(np.testing.assert_array_equal, moved, expected)


def test_replicated_shards_pass() -> None:
    """Gradients of replicated shards are summed over devices, which the check does not count."""
    mesh = jax.make_mesh((SIZE,), ("cp",))

    def local(x: jax.Array) -> jax.Array:
        grad: jax.Array = jax.grad(lambda x: (ring_jax.shift(x, 1, axis_name="cp") ** 2).sum())(x)
        return grad

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P()))
    x = jnp.ones((1, 5))
    expected = run(x)
    with ring_jax.check():
        np.testing.assert_array_equal(run(x), expected)


SMALL_CALLS = 60


@pytest.mark.nightly(unless=["bfloat16"])  # it has the fewest digits
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_right_small_calls_pass(dtype: str) -> None:
    """Scores are peaked, so gradients are small differences."""

    def loss(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out = ring_attention(q, k, v, axis_name=None, window=(2, 9), softmax_scale=0.3)
        return (out * dout).astype(jnp.float32).sum()

    with ring_jax.check():
        grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        for seed in range(SMALL_CALLS):
            rng = np.random.default_rng(seed)
            x = [rng.standard_normal((2, 6, 4, 8)) * size for size in (6, 1, 1, 1)]
            jax.block_until_ready(grads(*(jnp.asarray(y, dtype) for y in x)))
