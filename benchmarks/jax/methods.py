"""Ways to attend over a sequence split over GPUs in JAX: ours, and three written in plain JAX.

The plain ones are causal and forward only, with cuDNN's kernels or with ours (``triton``), over
the zigzag layout. ``all-gather`` fetches all keys to every GPU, then attends; ``two-stage`` fetches
them while a GPU attends to its own, then attends to the others'; ``zigzag`` is a ring of
``lax.scan`` and ``lax.ppermute`` that merges parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

import ring_jax_gpu
from benchmarks.jax.columns import Attend

AXIS = "cp"
Implementation = Literal["xla", "cudnn", "triton", "auto"]  # the last two are ours
StepTable = tuple[Any, Any]  # out [B, T, H, D] and lse [B, T, H], float32

KERNELS: tuple[Implementation, ...] = ("cudnn", "triton")


def mesh_of(gpus: int) -> Mesh:
    """The first GPUs of this machine in a row."""
    devices = jax.devices()[:gpus]
    return jax.make_mesh((gpus,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def ours(mesh: Mesh, kernel: str, strategy: str = "ring") -> Attend:
    """``ring_jax`` over the zigzag layout with the kernel of a name."""
    cp = ring_jax_gpu.ContextParallel(mesh, axis_name=AXIS, layout="zigzag")
    return partial(cp.attention, causal=True, kernel=kernel, strategy=strategy)


def all_gather(mesh: Mesh, implementation: Implementation) -> Attend:
    """All keys on all GPUs; queries in zigzag order."""
    size = mesh.shape[AXIS]

    def local(q: Any, k: Any, v: Any) -> Any:
        k, v = (_in_order(lax.all_gather(x, AXIS), size) for x in (k, v))
        branches = [partial(_two_chunks, rank, size, implementation) for rank in range(size)]
        return lax.switch(lax.axis_index(AXIS), branches, q, k, v)

    return _over(mesh, local)


def two_stage(mesh: Mesh, implementation: Implementation) -> Attend:
    """Its own keys while all travel, then all the others' at once."""
    size = mesh.shape[AXIS]

    def local(q: Any, k: Any, v: Any) -> Any:
        # As one message: XLA lets one transfer go at a time.
        fetched = lax.all_gather(jnp.concatenate([k, v], axis=-1), AXIS)
        own = _part(q, k, v, implementation, is_causal=True)
        own, fetched = lax.optimization_barrier((own, fetched))
        branches = [partial(_elsewhere, rank, size, implementation) for rank in range(size)]
        peer_kv = jnp.split(_in_order(fetched, size), [k.shape[-1]], axis=-1)
        other = lax.switch(lax.axis_index(AXIS), branches, q, *peer_kv)
        return _merged(own, other)[0].astype(q.dtype)

    return _over(mesh, local)


def zigzag(mesh: Mesh, implementation: Implementation) -> Attend:
    """A ring: what arrives is seen whole by half of the queries, or half of it by all."""
    size = mesh.shape[AXIS]
    turn = [(n, (n + 1) % size) for n in range(size)]

    def local(q: Any, k: Any, v: Any) -> Any:
        rank, half = lax.axis_index(AXIS), q.shape[1] // 2

        def from_before(k: Any, v: Any) -> StepTable:
            return _part(q, k[:, :half], v[:, :half], implementation)

        def from_behind(k: Any, v: Any) -> StepTable:
            out, lse = _part(q[:, half:], k, v, implementation)
            edges = ((0, 0), (half, 0), (0, 0))
            return (
                jnp.pad(out, (*edges, (0, 0))),
                jnp.pad(lse, edges, constant_values=-jnp.inf),
            )

        def step(carry: Any, n: Any) -> tuple[Any, None]:
            k, v, whole = carry
            following = [lax.ppermute(x, AXIS, turn) for x in (k, v)]
            part = lax.cond(n <= rank, from_before, from_behind, k, v)
            return (*following, _merged(whole, part)), None

        first = [lax.ppermute(x, AXIS, turn) for x in (k, v)]
        whole = _part(q, k, v, implementation, is_causal=True)
        (_, _, (out, _)), _ = lax.scan(step, (*first, whole), jnp.arange(1, size))
        return out.astype(q.dtype)

    return _over(mesh, local)


RIVALS: dict[str, Callable[[Mesh, Implementation], Attend]] = {
    "all-gather": all_gather,
    "two-stage": two_stage,
    "zigzag": zigzag,
}
OURS: dict[str, tuple[Callable[..., Attend], str]] = {
    "triton": (ours, "triton"),
    "triton gather": (partial(ours, strategy="gather"), "triton"),
}
METHODS = OURS | {
    f"{name} {kernel}": (make, kernel) for (name, make), kernel in product(RIVALS.items(), KERNELS)
}


def _over(mesh: Mesh, local: Attend) -> Attend:
    spec = PartitionSpec(None, AXIS)
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def _in_order(gathered: Any, size: int) -> Any:
    """``[P, B, T, K, D]`` in zigzag order as ``[B, P * T, K, D]`` in natural order."""
    half = gathered.shape[2] // 2
    chunks = [gathered[n, :, :half] for n in range(size)]
    chunks += [gathered[n, :, half:] for n in reversed(range(size))]
    return jnp.concatenate(chunks, axis=1)


def _two_chunks(
    rank: int, size: int, implementation: Implementation, q: Any, k: Any, v: Any
) -> Any:
    """Both chunks of a rank's queries: each sees all before it, and itself causally."""
    half = q.shape[1] // 2
    outs = []
    for n, chunk in enumerate((rank, 2 * size - 1 - rank)):
        rows, k_stop = q[:, n * half : (n + 1) * half], chunk * half
        own = slice(k_stop, k_stop + half)
        whole = _part(rows, k[:, own], v[:, own], implementation, is_causal=True)
        if k_stop:
            whole = _merged(whole, _part(rows, k[:, :k_stop], v[:, :k_stop], implementation))
        outs.append(whole[0].astype(q.dtype))
    return jnp.concatenate(outs, axis=1)


def _elsewhere(
    rank: int, size: int, implementation: Implementation, q: Any, k: Any, v: Any
) -> StepTable:
    """Both chunks of a rank's queries with all that they see of other ranks."""
    half, parts = q.shape[1] // 2, []
    first, last = rank * half, (2 * size - 1 - rank) * half
    for n, spans in enumerate(([(0, first)], [(0, first), (first + half, last)])):
        rows = q[:, n * half : (n + 1) * half]
        keys, values = (
            jnp.concatenate([x[:, begin:end] for begin, end in spans], axis=1) for x in (k, v)
        )
        if keys.shape[1]:
            parts.append(_part(rows, keys, values, implementation))
        else:
            nothing = jnp.full(rows.shape[:3], -jnp.inf, "float32")
            parts.append((jnp.zeros(rows.shape, "float32"), nothing))
    out, lse = (jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    return out, lse


def _part(
    q: Any, k: Any, v: Any, implementation: Implementation, *, is_causal: bool = False
) -> StepTable:
    if implementation in ("triton", "auto"):
        out, lse = ring_jax_gpu.ring_attention(
            q, k, v, axis_name=None, causal=is_causal, kernel=implementation, return_lse=True
        )
        return out.astype("float32"), lse.swapaxes(1, 2)
    its: Literal["xla", "cudnn"] = "xla" if implementation == "xla" else "cudnn"
    out, lse = jax.nn.dot_product_attention(
        q, k, v, is_causal=is_causal, implementation=its, return_residual=True
    )
    return out.astype("float32"), lse.astype("float32")


def _merged(a: StepTable, b: StepTable) -> StepTable:
    lse = jnp.logaddexp(a[1], b[1])
    weights = (jnp.exp(x[1] - lse)[..., None] for x in (a, b))
    out = sum(x[0] * weight for x, weight in zip((a, b), weights, strict=True))
    return out, lse
