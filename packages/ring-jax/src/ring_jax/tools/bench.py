"""``python -m ring_jax bench``: time a ring on this machine against one device that does it all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from ring_core import Mask
from ring_core.tools import doctor
from ring_core.tools.bench import PASSES, BenchCase, TimedRound, Timing, default_case, timings
from ring_jax import tripwire
from ring_jax.context import ContextParallel

Array = jax.Array
Attend = Callable[[Array, Array, Array], Array]


def defaults() -> BenchCase:
    """Return the default setting of the benchmark: all local devices, smaller sizes on a CPU."""
    return default_case(jax.local_device_count(), on_cpu=jax.default_backend() == "cpu")


def bench(setting: BenchCase, seconds: float) -> tuple[list[doctor.Check], tuple[Timing, ...]]:
    """Check a ring against float64 on a short sequence, then time it, and one device alone.

    The ring is timed twice, as it is and with the tripwire on every call.

    CPU devices share the host's cores, which one device also has for itself: there the times
    themselves are compared, elsewhere the rates per device.

    Args:
        setting: Sizes, mask, layout, kernel and strategy.
        seconds: Time limit of all rounds together.

    Returns:
        The checks, and no timings if one of them failed.

    Raises:
        ValueError: There are fewer devices than ranks, or the attention refuses the setting.
    """
    devices = jax.local_devices()
    if setting.ranks > len(devices):
        raise ValueError(
            f"--ranks {setting.ranks}: there are {len(devices)} devices here, and a rank needs one"
        )
    ring, single = (_make_ring(setting, ranks) for ranks in (setting.ranks, 1))
    short = [
        jnp.asarray(x, setting.dtype) for x in doctor.inputs_for(ring.cp_size, setting.head_dim)
    ]
    results = out_and_grads(_attention(ring, setting))(*(ring.shard(x) for x in short))
    checks = list(compared(
        setting.kernel, [ring.unshard(x) for x in results], short,
        where=f"{ring.cp_size} {jax.default_backend()}", mask=setting.mask,
    ))  # fmt: skip
    if not all(check.passed for check in checks):
        return checks, ()
    work_fraction = 1.0 if devices[0].platform == "cpu" else 1 / setting.ranks
    runs = [_run(cp, setting, check) for cp, check in ((single, 0), (ring, 0), (ring, 1))]
    return checks, timings(*runs, work_fraction=work_fraction, seconds=seconds)


def _make_ring(setting: BenchCase, ranks: int) -> ContextParallel:
    """Make a context over the first ``ranks`` local devices."""
    mesh = jax.make_mesh((ranks,), ("ring",), (AxisType.Auto,), devices=jax.local_devices()[:ranks])
    return ContextParallel(mesh, axis_name="ring", layout=setting.layout)


def _attention(cp: ContextParallel, setting: BenchCase) -> Attend:
    """Return the attention of a context with the options of a setting."""
    return partial(
        cp.attention, mask=setting.mask, kernel=setting.kernel, strategy=setting.strategy
    )


def out_and_grads(attend: Attend) -> Callable[[Array, Array, Array, Array], tuple[Array, ...]]:
    """Return a jitted function ``(q, k, v, dout) -> (out, dq, dk, dv)``."""

    @jax.jit
    def both(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    return both


def compared(
    name: str, results: list[Array], inputs: list[Array], *, where: str, mask: Mask
) -> Iterator[doctor.Check]:
    """Compare results with float64; errors may be a few times those of JAX's dense attention.

    Args:
        name: The kernel's name.
        results: ``out, dq, dk, dv`` in natural order.
        inputs: ``q, k, v, dout`` that they were computed from.
        where: Number and platform of the devices.
        mask: The mask.
    """
    positions = np.arange(inputs[0].shape[1])
    dense = partial(
        jax.nn.dot_product_attention, mask=mask.dense(positions, positions)[None, None],
        implementation="xla",
    )  # fmt: skip
    actual, exact, plain = (
        [np.asarray(x, np.float64) for x in arrays]
        for arrays in (results, inputs, out_and_grads(dense)(*inputs))
    )
    eps = float(jnp.finfo(inputs[0].dtype).eps)
    yield from doctor.compared(name, where, doctor.example_of(exact, mask), actual, plain, eps)


def _run(cp: ContextParallel, setting: BenchCase, check: int) -> TimedRound:
    """Return a function of a seed that times one forward, and one forward with backward.

    The tripwire checks one in ``check`` calls; 0 checks none. The first run compiles, within the
    time that it returns.
    """
    attend = _attention(cp, setting)
    forward, both = jax.jit(attend), out_and_grads(attend)
    heads = (setting.heads, setting.kv_heads, setting.kv_heads, setting.heads)

    def run(seed: int) -> dict[str, float]:
        shapes = [(1, setting.seq_len, h, setting.head_dim) for h in heads]
        q, k, v, dout = (
            cp.shard(jax.random.normal(key, shape, setting.dtype))
            for key, shape in zip(jax.random.split(jax.random.key(seed), 4), shapes, strict=True)
        )
        jax.block_until_ready((q, k, v, dout))
        calls = partial(forward, q, k, v), partial(both, q, k, v, dout)
        with tripwire.check(check):
            return {name: _seconds(call) for name, call in zip(PASSES, calls, strict=True)}

    return run


def _seconds(run: Callable[[], object]) -> float:
    """Return the seconds until the results of ``run`` are computed."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start
