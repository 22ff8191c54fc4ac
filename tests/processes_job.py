"""Process of a JAX job: runs the checks that its arguments after the first three name.

``processes.py`` starts it with the coordinator's address, the number of processes and its own, and
``hosts.py`` on several hosts, as one of four.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jax_meshes import KINDS, mesh_of, random

import ring_jax
from ring_core import RankMismatchError, StrategyConfig, UnsupportedError, reference
from ring_jax import ContextParallel

Array = jax.Array
LENGTH = 48
OPTIONS: dict[str, Any] = {"causal": True, "dropout_p": 0.3, "dropout_seed": 5}


def whole() -> list[np.ndarray]:
    """Return the arrays of a call, in natural order, equal in all processes."""
    return [np.asarray(random(2, LENGTH, heads, 8, seed=n)) for n, heads in enumerate((8, 2, 2))]


def context(kind: str, *, layout: Any = "zigzag", batch: int = 1) -> ContextParallel:
    """Return a context over all devices, on a mesh with ``batch`` rows that split the batch."""
    mesh = mesh_of(KINDS[kind], data=batch, cp=jax.device_count() // batch)
    return ContextParallel(mesh, "cp", batch_axis="data", layout=layout)


def from_hosts(cp: ContextParallel, x: np.ndarray) -> Array:
    """Make an array in layout order; each process provides only its own devices' tokens."""
    layout = cp.layout_of(x.shape[1])
    sharding: Any = NamedSharding(cp.mesh, P("data", "cp"))
    order = np.concatenate([layout.positions(rank) for rank in range(cp.cp_size)])
    in_order = np.asarray(x)[:, order]
    return cast("Array", jax.make_array_from_callback(x.shape, sharding, in_order.__getitem__))


def assert_close(got: Array, expected: Any, tolerance: float = 5e-5) -> None:
    """Compare an array over the devices of a mesh with a whole one."""
    sharding: Any = got.sharding
    everywhere = jax.jit(lambda x: x, out_shardings=NamedSharding(sharding.mesh, P()))
    shown = np.asarray(everywhere(got).addressable_data(0))
    np.testing.assert_allclose(shown, expected, rtol=tolerance, atol=tolerance)


def checks(cp: ContextParallel, **options: Any) -> Callable[..., None]:
    """Return a function that compares attention and gradients on a ring with the oracle."""
    x = whole()
    local = [from_hosts(cp, y) for y in x]
    expected, _ = reference.attention(*x, **options)
    exact = reference.attention_grads(2 * expected, *x, **options)

    def loss(*shards: Array, strategy: str) -> tuple[Array, Array]:
        out = cp.attention(*shards, strategy=strategy, **options)
        return (out * out).sum(), out

    run = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True), static_argnames="strategy")

    def check(strategy: str = "auto") -> None:
        grads, out = run(*local, strategy=strategy)
        for got, correct in zip((out, *grads), (expected, *exact[:3]), strict=True):
            assert_close(cp.unshard(got), correct)

    return check


def attend(kind: str, strategy: str, checked: str = "") -> None:
    """Check a strategy on a kind of mesh against the oracle, with dropout on auto axes."""
    cp = context(kind, layout="contiguous" if strategy == "balanced" else "zigzag")
    options = OPTIONS if kind == "auto" else {"causal": True}  # dropout is slow to compile
    local = [from_hosts(cp, y) for y in whole()]
    with jax.set_mesh(cp.mesh), ring_jax.check() if checked else nullcontext():
        cp.check_agreement(*local, strategy=strategy, **options)
        checks(cp, **options)(strategy)


def rings() -> None:
    """Check rings of a device of each of four processes, of which some may have no part."""
    devices = np.array(jax.devices())[:: jax.local_device_count()]
    for name, order, rows in (
        ("all", [0, 1, 2, 3], 1), ("permuted", [3, 1, 0, 2], 1), ("subset", [1, 2, 3], 1),
        ("two at once", [0, 2, 3, 1], 2), ("data x context", [0, 1, 2, 3], 2),
    ):  # fmt: skip
        mesh = Mesh(
            devices[order].reshape(rows, -1), ("data", "cp"), axis_types=(AxisType.Auto,) * 2
        )
        if jax.process_index() in {device.process_index for device in mesh.devices.flat}:
            checks(ContextParallel(mesh, "cp", batch_axis="data"), causal=True)()
        print(f"ring {name}", flush=True)
    print("equal", flush=True)


def steps() -> None:
    """Make steps on a ring over all devices until a link is cut."""
    check = checks(context("auto"), causal=True)
    for step in range(100_000):
        check()
        print(f"step {step}", flush=True)


def within_processes() -> None:
    """Check rings within each process, with the batch over processes, and that this is detected."""
    count = jax.process_count()
    cp, x = context("auto", batch=count), [np.repeat(y, count, axis=0) for y in whole()]
    local = [from_hosts(cp, y) for y in x]
    assert ring_jax.meshes.in_one_process(cp.mesh, "cp") is True
    assert ring_jax.meshes.in_one_process(cp.mesh, "data") is False
    assert ring_jax.meshes.in_one_process(context("auto").mesh, "cp") is False
    expected, _ = reference.attention(*x, **OPTIONS)
    assert_close(cp.unshard(cp.attention(*local, **OPTIONS)), expected)


def agreement() -> None:
    """Check that all processes raise the same error about a difference or one's refusal.

    The error names the difference and its processes.
    """
    cp, last = context("auto"), jax.process_index() == jax.process_count() - 1
    x = [from_hosts(cp, y) for y in whole()]
    others = ", ".join(map(str, range(jax.process_count() - 1)))
    first = f"process{'es' * (jax.process_count() > 2)} {others}"
    one = f"process {jax.process_count() - 1}"
    check = partial(cp.check_agreement, *x, causal=True)
    check()
    dropout: dict[str, Any] = {"dropout_p": 0.1, "dropout_seed": int(last)}
    on_devices = dropout | {"dropout_seed": jnp.uint32(last)}
    sized = StrategyConfig("hybrid", ulysses_size=4 if last else 2)
    different: list[tuple[dict[str, Any], str]] = [
        ({"cu_seqlens": (0, 20 + last, LENGTH)}, f"cu_seqlens: (0, 20, 48) in {first}; (0, 21, 48) in {one}"),
        (dropout, f"processes disagree on dropout_seed: 0 in {first}; 1 in {one}"),
        ({"window": (-1 if last else 1, 0)}, f"refusal: none in {first}"),
        ({"return_lse": last, **on_devices}, f"dropout_seed: 0 in {first}; 1 in {one}; on return_lse: False in {first}"),
        ({"is_causal": 1} if last else {}, f"refusal: none in {first}"),
        ({"no_such": 1} if last else {}, f"refusal: none in {first}"),
        ({"strategy": sized}, f"disagree on groups: (2, 'ring') in {first}; (4, "),
    ]  # fmt: skip
    for options, words in different:
        with pytest.raises(RankMismatchError, match=re.escape(words)):
            check(**options)

    def checked(q: Array) -> Array:
        cp.check_agreement(q, *x[1:])
        return q.sum()

    groups = StrategyConfig("hybrid")  # of a host, and which device is where is not known
    refused: list[tuple[Callable[[], Any], str]] = [
        (partial(check, strategy=groups), "strategy 'hybrid'"),
        (jax.jit(check), "outside of jax.jit"),
        (partial(jax.eval_shape, cp.check_agreement, *x), "outside of jax.jit"),
        (partial(jax.grad(checked), x[0]), "outside of jax.jit"),
    ]  # fmt: skip
    for call, words in refused:
        with pytest.raises(UnsupportedError, match=re.escape(words)):
            call()


def _loss(cp: ContextParallel, weights: dict[str, Array], tokens: Array) -> Array:
    """Return the loss of a layer of attention."""
    q, k, v = (jnp.einsum("btw,whd->bthd", tokens, weights[name]) for name in ("q", "k", "v"))
    return (cp.attention(q, k, v, causal=True) ** 2).mean()


def checkpoint(folder: str) -> None:
    """Save weights on a ring over all devices, and restore them on a ring over half of them."""
    ocp: Any = import_module("orbax.checkpoint")  # only this check needs it; it has no types

    cp = context("auto")
    arrays = {name: np.asarray(random(16, 2, 8, seed=n)) for n, name in enumerate("qkv")}
    weights = {
        name: jax.make_array_from_callback(x.shape, NamedSharding(cp.mesh, P("cp")), x.__getitem__)
        for name, x in arrays.items()
    }
    text = np.asarray(random(2, LENGTH, 16, seed=3))
    expected = jax.jit(partial(_loss, cp))(weights, from_hosts(cp, text))
    path = Path(folder) / "state"
    with ocp.StandardCheckpointer() as saver:
        saver.save(path, weights)
    # One device of each process: a ring of half the size, with other shards of the weights.
    devices = [
        next(d for d in jax.devices() if d.process_index == n) for n in range(jax.process_count())
    ]
    mesh = Mesh(np.array(devices)[None], ("data", "cp"), axis_types=(AxisType.Auto,) * 2)
    half = ContextParallel(mesh, "cp", batch_axis="data")
    target = jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=NamedSharding(mesh, P("cp"))), weights
    )  # fmt: skip
    with ocp.StandardCheckpointer() as saver:
        restored = saver.restore(path, target)
    loss = jax.jit(partial(_loss, half))(restored, from_hosts(half, text))
    np.testing.assert_allclose(float(loss), float(expected), rtol=1e-6)
    print(f"loss {float(loss)}", flush=True)


def lose(how: str) -> None:
    """Lose the last process in its third step, to a signal."""
    cp = context("auto")
    x = from_hosts(cp, whole()[0])
    gradient = jax.jit(jax.grad(lambda x: cp.attention(x, x, x, causal=True).sum()))
    for step in range(3):
        if step == 2 and jax.process_index() == jax.process_count() - 1:
            print("lost", flush=True)
            os.kill(os.getpid(), getattr(signal, how))
        jax.block_until_ready(gradient(x))
        print(f"step {step}", flush=True)


CHECKS: dict[str, Callable[..., None]] = {
    "attend": attend, "within": within_processes, "agreement": agreement, "checkpoint": checkpoint,
    "lose": lose, "rings": rings, "steps": steps,
}  # fmt: skip


def main() -> None:
    """Run the checks, which are arguments like ``name:argument:argument``."""
    address, count, number, *wanted = sys.argv[1:]
    timeouts: Any = {}
    if wanted[0].startswith("lose"):
        timeouts = {"heartbeat_timeout_seconds": 10, "shutdown_timeout_seconds": 2}
    elif seconds := os.environ.get("RING_TIMEOUT"):
        timeouts = dict.fromkeys(
            ("heartbeat_timeout_seconds", "shutdown_timeout_seconds"), int(seconds)
        )
    jax.distributed.initialize(
        address, num_processes=int(count), process_id=int(number), **timeouts
    )
    assert jax.device_count() == jax.local_device_count() * int(count)
    for each in wanted:
        name, *arguments = each.split(":")
        CHECKS[name](*arguments)
        print(f"done {each}", flush=True)


if __name__ == "__main__":
    main()
