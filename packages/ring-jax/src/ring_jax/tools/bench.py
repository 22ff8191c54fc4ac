"""``python -m ring_jax bench``: time a ring on this machine against one device that does it all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from ring_core import Mask
from ring_core.tools import doctor
from ring_core.tools.bench import PASSES, TimedRound, Timing, timings
from ring_core.tools.case import Case
from ring_jax import tripwire
from ring_jax.context import ContextParallel
from ring_jax.kernels.absent import is_fault

Array = jax.Array
Attend = Callable[[Array, Array, Array], Array]


def bench(case: Case, seconds: float) -> tuple[list[doctor.Check], tuple[Timing, ...]]:
    """Check a ring against float64 on a short sequence, then time it, and one device alone.

    CPU devices share the host's cores, which one device also has for itself: there the times
    themselves are compared, elsewhere the rates per device.
    It returns the checks, and no timings if one of them failed.

    Raises:
        ValueError: There are fewer devices than ranks, or the attention refuses the case.
    """
    devices = jax.local_devices()
    if case.ranks > len(devices):
        raise ValueError(
            f"--ranks {case.ranks}: there are {len(devices)} devices here, and a rank needs one"
        )
    meshes = (
        jax.make_mesh((ranks,), ("ring",), (AxisType.Auto,), devices=devices[:ranks])
        for ranks in (case.ranks, 1)
    )
    ring, single = (ContextParallel(x, axis_name="ring", layout=case.layout) for x in meshes)
    short = [jnp.asarray(x, case.dtype) for x in doctor.inputs_for(ring.cp_size, case.head_dim)]
    run = out_and_grads(
        partial(ring.attention, mask=case.mask, kernel=case.kernel, strategy=case.strategy)
    )
    checks = list(compared(
        case.kernel, f"{ring.cp_size} {jax.default_backend()}",
        lambda: [ring.unshard(x) for x in run(*(ring.shard(x) for x in short))], short,
        mask=case.mask,
    ))  # fmt: skip
    if not all(check.passed for check in checks):
        return checks, ()
    work_fraction = 1.0 if devices[0].platform == "cpu" else 1 / case.ranks
    runs = [_run(cp, case, check) for cp, check in ((single, 0), (ring, 0), (ring, 1))]
    return checks, timings(runs, work_fraction=work_fraction, seconds=seconds)


def out_and_grads(attend: Attend) -> Callable[[Array, Array, Array, Array], tuple[Array, ...]]:
    """Return a jitted function ``(q, k, v, dout) -> (out, dq, dk, dv)``."""

    @jax.jit
    def both(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    return both


def compared(
    name: str, where: str, run: Callable[[], Sequence[Array]], inputs: list[Array], *,
    mask: Mask = doctor.CAUSAL,
) -> Iterator[doctor.Check]:  # fmt: skip
    """Compare ``run()``, ``out, dq, dk, dv`` of inputs ``q, k, v, dout``, with float64.

    Errors may be a few times those of JAX's dense attention, so they also pass on platforms whose
    matmuls round their inputs.
    """
    positions = np.arange(inputs[0].shape[1])
    dense = partial(
        jax.nn.dot_product_attention, mask=mask.dense(positions, positions)[None, None],
        implementation="xla",
    )  # fmt: skip
    yield from doctor.compared(
        name, where, inputs, lambda: jax.block_until_ready(run()),
        lambda: out_and_grads(dense)(*inputs), float(jnp.finfo(inputs[0].dtype).eps),
        mask=mask, is_fault=is_fault,
    )  # fmt: skip


def _run(cp: ContextParallel, case: Case, check: int) -> TimedRound:
    """Return a function of a seed that times one forward, and one forward with backward.

    The tripwire checks one in ``check`` calls; 0 checks none. The first run compiles, within the
    time that it returns.
    """
    attend = partial(cp.attention, mask=case.mask, kernel=case.kernel, strategy=case.strategy)
    forward, both = jax.jit(attend), out_and_grads(attend)

    def run(seed: int) -> dict[str, float]:
        keys = jax.random.split(jax.random.key(seed), 4)
        heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
        q, k, v, dout = jax.block_until_ready([
            cp.shard(jax.random.normal(key, (1, case.seq_len, n, case.head_dim), case.dtype))
            for key, n in zip(keys, heads, strict=True)
        ])  # fmt: skip
        seconds, calls = {}, (partial(forward, q, k, v), partial(both, q, k, v, dout))
        with tripwire.check(check):
            for name, call in zip(PASSES, calls, strict=True):
                start = time.perf_counter()
                jax.block_until_ready(call())
                seconds[name] = time.perf_counter() - start
        return seconds

    return run
