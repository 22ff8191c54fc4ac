"""Process of a JAX job: runs the checks that its arguments after the first three name.

``processes.py`` starts it with the coordinator's address, the number of processes and its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import ring_jax
from ring_core import RankMismatchError, StrategyConfig, UnsupportedError, reference
from ring_jax import ContextParallel

Array = jax.Array
LENGTH = 48
SHAPE = {"q": (2, LENGTH, 8, 8), "k": (2, LENGTH, 2, 8), "v": (2, LENGTH, 2, 8)}
OPTIONS: dict[str, Any] = {"causal": True, "dropout_p": 0.3, "dropout_seed": 5}


def whole() -> list[np.ndarray]:
    """Return the arrays of a call, in natural order, equal in all processes."""
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(np.float32) for shape in SHAPE.values()]


def context(kind: str, *, layout: Any = "zigzag", batch: int = 1) -> ContextParallel:
    """Return a context over all devices, on a mesh with ``batch`` rows that split the batch."""
    axis_type = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[kind]
    shape = (batch, jax.device_count() // batch)
    mesh = jax.make_mesh(shape, ("data", "cp"), axis_types=(axis_type,) * 2)
    return ContextParallel(mesh, "cp", batch_axis="data", layout=layout)


def from_hosts(cp: ContextParallel, x: np.ndarray) -> Array:
    """Make an array in layout order; each process provides only its own devices' tokens."""
    layout = cp.layout_of(x.shape[1])
    sharding: Any = NamedSharding(cp.mesh, P("data", "cp"))
    order = np.concatenate([layout.positions(rank) for rank in range(cp.cp_size)])
    indices = sharding.addressable_devices_indices_map(x.shape).values()
    rows, columns = (
        sorted({n for index in indices for n in range(*index[dim].indices(x.shape[dim]))})
        for dim in (0, 1)
    )
    own = x[rows][:, order[columns]]
    return cast("Array", jax.make_array_from_process_local_data(sharding, own, x.shape))


def assert_close(got: Any, expected: Any, tolerance: float = 5e-5) -> None:
    """Compare a global array with a whole one."""
    got = process_allgather(got, tiled=True)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def attend(kind: str, strategy: str) -> None:
    """Check a strategy on a kind of mesh against the oracle, with dropout on auto axes."""
    layout = "contiguous" if strategy == "balanced" else "zigzag"
    options = OPTIONS if kind == "auto" else {"causal": True}  # dropout is slow to compile
    x = whole()
    cp = context(kind, layout=layout)
    local = [from_hosts(cp, y) for y in x]
    with jax.set_mesh(cp.mesh):
        cp.check_agreement(*local, strategy=strategy, **options)

        def loss(*shards: Array) -> tuple[Array, Array]:
            out = cp.attention(*shards, strategy=strategy, **options)
            return (out * out).sum(), out

        grads, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*local)
        results = [cp.unshard(y) for y in (out, *grads)]
    expected, _ = reference.attention(*x, **options)
    exact = reference.attention_grads(2 * expected, *x, **options)
    for got, correct in zip(results, (expected, *exact[:3]), strict=True):
        assert_close(got, correct)


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
    q, k, v = (from_hosts(cp, y) for y in whole())
    others = ", ".join(map(str, range(jax.process_count() - 1)))
    first = f"process{'es' * (jax.process_count() > 2)} {others}"
    one = f"process {jax.process_count() - 1}"
    cp.check_agreement(q, k, v, causal=True)

    def differs(call: Callable[[], None], kind: type[Exception], words: str) -> None:
        with pytest.raises(kind, match=re.escape(words)):
            call()

    check = partial(cp.check_agreement, q, k, v, causal=True)
    ends = (0, 20 + last, LENGTH)
    differs(
        lambda: check(cu_seqlens=ends), RankMismatchError,
        f"cu_seqlens: (0, 20, 48) in {first}; (0, 21, 48) in {one}",
    )  # fmt: skip
    differs(
        lambda: check(dropout_p=0.1, dropout_seed=int(last)), RankMismatchError,
        f"processes disagree on dropout_seed: 0 in {first}; 1 in {one}",
    )  # fmt: skip
    differs(
        lambda: check(window=(-1 if last else 1, 0)), RankMismatchError, f"refusal: none in {first}"
    )
    differs(
        lambda: check(return_lse=last, dropout_p=0.1, dropout_seed=jnp.uint32(last)),
        RankMismatchError, f"dropout_seed: 0 in {first}; 1 in {one}; on return_lse: False in {first}",
    )  # fmt: skip
    for wrong in ("is_causal", "no_such"):
        options: dict[str, Any] = {wrong: 1} if last else {}
        differs(partial(check, **options), RankMismatchError, f"refusal: none in {first}")
    groups = StrategyConfig("hybrid")  # of a host, and which device is where is not known
    differs(lambda: check(strategy=groups), UnsupportedError, "strategy 'hybrid'")
    sized = StrategyConfig("hybrid", ulysses_size=4 if last else 2)
    differs(
        lambda: check(strategy=sized), RankMismatchError,
        f"disagree on groups: (2, 'ring') in {first}; (4, ",
    )  # fmt: skip
    for traced in (
        jax.jit(check),
        lambda: jax.eval_shape(cp.check_agreement, q, k, v),
        lambda: jax.grad(lambda q: (cp.check_agreement(q, k, v), q.sum())[1])(q),
    ):
        differs(traced, UnsupportedError, "outside of jax.jit")


def checks() -> None:
    """Check that a call passes under ``ring_jax.check`` and is right."""
    cp, x = context("auto"), whole()
    local = [from_hosts(cp, y) for y in x]
    with ring_jax.check():
        out = jax.jit(partial(cp.attention, **OPTIONS))(*local)
    assert_close(cp.unshard(out), reference.attention(*x, **OPTIONS)[0])


def _loss(cp: ContextParallel, weights: dict[str, Array], tokens: Array) -> Array:
    """Return the loss of a layer of attention."""
    q, k, v = (jnp.einsum("btw,whd->bthd", tokens, weights[name]) for name in ("q", "k", "v"))
    return (cp.attention(q, k, v, causal=True) ** 2).mean()


def checkpoint(folder: str) -> None:
    """Save weights on a ring over all devices, and restore them on a ring over half of them."""
    ocp: Any = import_module("orbax.checkpoint")  # only this check needs it; it has no types

    random = np.random.default_rng(1)
    cp = context("auto")
    weights = {
        name: jax.make_array_from_callback(
            (16, 2, 8), NamedSharding(cp.mesh, P("cp")), random.standard_normal((16, 2, 8)).astype(np.float32).__getitem__
        )
        for name in ("q", "k", "v")
    }  # fmt: skip
    text = random.standard_normal((2, LENGTH, 16)).astype(np.float32)
    step = jax.jit(jax.value_and_grad(partial(_loss, cp)))
    _, grads = step(weights, from_hosts(cp, text))
    weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
    expected, _ = step(weights, from_hosts(cp, text))
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
    loss, _ = jax.jit(jax.value_and_grad(partial(_loss, half)))(restored, from_hosts(half, text))
    np.testing.assert_allclose(float(loss), float(expected), rtol=1e-6)
    sys.stdout.write(f"loss {float(loss)}\n")


CHECKS: dict[str, Callable[..., None]] = {
    "attend": attend, "within": within_processes, "agreement": agreement, "checks": checks,
    "checkpoint": checkpoint,
}  # fmt: skip


def main() -> None:
    """Run the checks, which are arguments like ``name:argument:argument``."""
    address, count, number, *wanted = sys.argv[1:]
    jax.distributed.initialize(address, num_processes=int(count), process_id=int(number))
    assert jax.device_count() == 2 * jax.process_count() == 2 * int(count)
    for each in wanted:
        name, *arguments = each.split(":")
        CHECKS[name](*arguments)
        sys.stdout.write(f"done {each}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
