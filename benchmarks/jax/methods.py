"""Attention over a sequence split over GPUs in JAX: ours, and two methods in plain JAX.

The plain ones run cuDNN's kernels, and have gradients. ``all-gather`` fetches
all keys to every GPU, then attends; ``zigzag`` is a ring of ``lax.scan`` and ``lax.ppermute`` that
merges parts. Both are written for causal masks over the zigzag layout; with windows and packed
documents ``all-gather`` takes contiguous shards.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import ring_jax_gpu
from benchmarks.common.cases import CAUSAL
from ring_core import Layout, LayoutSpec, Mask, balanced_layout

AXIS = "cp"
_BLOCK = 128  # tokens; lengths that kernels get are multiples of it
Attend = Callable[..., Any]
Implementation = Literal["xla", "cudnn"]  # the first for tests without a GPU
Part = tuple[Any, Any]  # out [B, T, H, D] and lse [B, T, H], float32


def kernel(
    q: Any, k: Any, v: Any, bias: Any = None, *, mask: Mask, name: str = "auto", **options: Any
) -> Any:
    """Run our kernels on one device, those that ``auto`` takes or of a name."""
    return ring_jax_gpu.ring_attention(
        q, k, v, axis_name=None, mask=mask, bias=bias, kernel=name, **options
    )


def cudnn(q: Any, k: Any, v: Any, bias: Any = None, *, mask: Mask) -> Any:
    """Run cuDNN as JAX calls it; V is zero-padded to the head dim of Q and K."""
    padded = jnp.pad(v, [(0, 0)] * 3 + [(0, q.shape[3] - v.shape[3])])
    window: Any = mask.window
    out = jax.nn.dot_product_attention(
        q, k, padded, bias, is_causal=mask.causal, local_window_size=window, implementation="cudnn"
    )
    return out[..., : v.shape[3]]


def exact(q: Any, k: Any, v: Any, bias: Any = None, *, mask: Mask, **options: Any) -> Any:
    """Compute attention by its definition, or with options by the kernel ``xla``, in float32."""
    if options:
        return kernel(q, k, v, bias, mask=mask, name="xla", **options)
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") * q.shape[3] ** -0.5
    scores = scores if bias is None else scores + bias
    visible = mask.dense(np.arange(q.shape[1]), np.arange(k.shape[1]))
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", weights, v, precision="highest")


def both(attend: Attend, *arrays: Any) -> Any:
    """Return the output, and the gradients of all arrays but the last one, ``dout``."""
    *x, dout = arrays
    out, pull = jax.vjp(attend, *x)
    return (out, *pull(dout.astype(out.dtype)))


def random_arrays(shapes: Sequence[Sequence[int]], seed: int) -> list[Any]:
    """Return a random bfloat16 array for each shape."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [
        jax.random.normal(key, tuple(shape), "float32").astype("bfloat16")
        for key, shape in zip(keys, shapes, strict=True)
    ]


def seconds(run: Callable[[], Any], calls: int = 1) -> float:
    """Return the seconds of ``calls`` queued calls, until the last one is ready."""
    start = time.perf_counter()
    for _ in range(calls):
        last = run()
    jax.block_until_ready(last)
    return time.perf_counter() - start


def mesh_of(gpus: int) -> Mesh:
    """Return a mesh of this machine's first ``gpus`` GPUs, with one axis."""
    devices = jax.devices()[:gpus]
    return jax.make_mesh((gpus,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


class Method(NamedTuple):
    """An attention method over a mesh, for a mask."""

    attend: Attend  # of q, k and v over all devices, in the order of the layout
    layout: LayoutSpec = "zigzag"  # the order of tokens over devices
    chosen: Callable[..., dict[str, str]] = lambda *_: {}  # what `auto` takes, if it is ours


Maker = Callable[[Mesh, Mask, int], Method]  # the last is the number of tokens


def ours(
    mesh: Mesh, mask: Mask, seq_len: int, *, strategy: Any = "ring", chunks: bool = False,
    kernel: str = "auto",
) -> Method:  # fmt: skip
    """Return ``ring_jax`` over the zigzag layout, or over ``chunks`` balanced for the mask."""
    layout: LayoutSpec = (
        balanced_layout(mask, seq_len=seq_len, cp_size=mesh.size) if chunks else "zigzag"
    )
    cp = ring_jax_gpu.ContextParallel(mesh, axis_name=AXIS, layout=layout)
    attend = partial(cp.attention, mask=mask, kernel=kernel, strategy=strategy)

    def chosen(*qkv: Any) -> dict[str, str]:
        text = cp.explain(*qkv, mask=mask, kernel=kernel)
        lines = re.findall(r"^(strategy|kernel) (\w+)", text, re.MULTILINE)
        return {key.replace("strategy", "auto"): name for key, name in reversed(lines)}

    return Method(attend, layout, chosen)


def one(_: Mesh, mask: Mask, _seq_len: int, *, kernel: str = "auto") -> Method:
    """Return attention over the whole sequence on one GPU."""
    run = partial(ring_jax_gpu.ring_attention, axis_name=None, mask=mask, kernel=kernel)
    return Method(run, "contiguous")


def all_gather(mesh: Mesh, mask: Mask, seq_len: int, *, implementation: Implementation) -> Method:
    """Return attention to all gathered K/V: zigzag queries if causal, else contiguous shards."""
    size = mesh.shape[AXIS]

    def causal(q: Any, k: Any, v: Any) -> Any:
        k, v = (_in_order(lax.all_gather(x, AXIS), size) for x in (k, v))
        branches = [partial(_two_chunks, rank, size, implementation) for rank in range(size)]
        return lax.switch(lax.axis_index(AXIS), branches, q, k, v)

    def contiguous(q: Any, k: Any, v: Any) -> Any:
        k, v = (lax.all_gather(x, AXIS, axis=1, tiled=True) for x in (k, v))
        starts = range(0, seq_len, seq_len // size)
        branches = [partial(_behind_earlier_rows, x, mask, implementation) for x in starts]
        return lax.switch(lax.axis_index(AXIS), branches, q, k, v)

    if mask == CAUSAL:
        return Method(_over(mesh, causal))
    return Method(_over(mesh, contiguous), "contiguous")


def zigzag(mesh: Mesh, mask: Mask, _: int, *, implementation: Implementation) -> Method:
    """Return a ring over the zigzag layout.

    All queries see half of an earlier rank's keys; half of them see all keys of a later rank.
    """
    if mask != CAUSAL:
        raise ValueError("zigzag is written for causal masks")
    size = mesh.shape[AXIS]
    turn = [(n, (n + 1) % size) for n in range(size)]

    def local(q: Any, k: Any, v: Any) -> Any:
        rank, half = lax.axis_index(AXIS), q.shape[1] // 2

        def from_before(k: Any, v: Any) -> Part:
            return _part(q, k[:, :half], v[:, :half], implementation)

        def from_behind(k: Any, v: Any) -> Part:
            out, lse = _part(q[:, half:], k, v, implementation)
            edges = ((0, 0), (half, 0), (0, 0))
            return (jnp.pad(out, (*edges, (0, 0))), jnp.pad(lse, edges, constant_values=-jnp.inf))

        def step(carry: Any, n: Any) -> tuple[Any, None]:
            k, v, whole = carry
            following = [lax.ppermute(x, AXIS, turn) for x in (k, v)]
            part = lax.cond(n <= rank, from_before, from_behind, k, v)
            return (*following, _merged(whole, part)), None

        first = [lax.ppermute(x, AXIS, turn) for x in (k, v)]
        whole = _part(q, k, v, implementation, is_causal=True)
        (_, _, (out, _)), _ = lax.scan(step, (*first, whole), jnp.arange(1, size))
        return out.astype(q.dtype)

    return Method(_over(mesh, local))


METHODS: dict[str, Maker] = {
    "one": one, "ring": ours, "gather": partial(ours, strategy="gather"),
    "ulysses": partial(ours, strategy="ulysses"),
    "ring, chunks": partial(ours, chunks=True),
    "gather, chunks": partial(ours, strategy="gather", chunks=True),
    "all-gather cudnn": partial(all_gather, implementation="cudnn"),
    "zigzag cudnn": partial(zigzag, implementation="cudnn"),
}  # fmt: skip


def sharding_of(mesh: Mesh) -> NamedSharding:
    """Return the sharding of tokens over the GPUs of a mesh."""
    return NamedSharding(mesh, PartitionSpec(None, AXIS))


def in_order(layout: LayoutSpec, seq_len: int, size: int) -> Any:
    """Return the positions of tokens in the order of a layout, rank 0 first."""
    placed = Layout(layout, seq_len, size)
    return np.concatenate([placed.positions(rank) for rank in range(size)])


def _over(mesh: Mesh, local: Attend) -> Attend:
    spec = PartitionSpec(None, AXIS)
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def _in_order(gathered: Any, size: int) -> Any:
    """Reorder ``[P, B, T, K, D]`` in zigzag order to ``[B, P * T, K, D]`` in natural order."""
    half = gathered.shape[2] // 2
    chunks = [gathered[n, :, :half] for n in range(size)]
    chunks += [gathered[n, :, half:] for n in reversed(range(size))]
    return jnp.concatenate(chunks, axis=1)


def _two_chunks(rank: int, size: int, by: Implementation, q: Any, k: Any, v: Any) -> Any:
    """Attend with both chunks of a rank's queries: to all before, and causally to itself."""
    half = q.shape[1] // 2
    outs = []
    for n, chunk in enumerate((rank, 2 * size - 1 - rank)):
        rows, k_stop = q[:, n * half : (n + 1) * half], chunk * half
        own = slice(k_stop, k_stop + half)
        whole = _part(rows, k[:, own], v[:, own], by, is_causal=True)
        if k_stop:
            whole = _merged(whole, _part(rows, k[:, :k_stop], v[:, :k_stop], by))
        outs.append(whole[0].astype(q.dtype))
    return jnp.concatenate(outs, axis=1)


def _behind_earlier_rows(start: int, mask: Mask, by: Implementation, q: Any, k: Any, v: Any) -> Any:
    """Attend with a shard's queries, the first at ``start``, to all keys that they see.

    Rows of zeros before the queries make a square of it, so that ``is_causal`` and
    ``local_window_size`` mean what they should.
    """
    stop, first, visible = start + q.shape[1], 0, None
    if mask.window is not None and mask.window[0] is not None:
        first = max(0, start - mask.window[0])
    if mask.cu_seqlens is not None:
        ends = np.asarray(mask.cu_seqlens)
        first = max(first, int(ends[ends <= start].max()))
    first -= first % _BLOCK
    if mask.cu_seqlens is not None:
        ids = jnp.asarray(np.searchsorted(ends, np.arange(first, stop), side="right"))
        visible = (ids[:, None] == ids[None])[None, None]
    rows = jnp.pad(q, ((0, 0), (start - first, 0), (0, 0), (0, 0)))
    window: Any = mask.window
    out = jax.nn.dot_product_attention(
        rows, k[:, first:stop], v[:, first:stop], mask=visible, is_causal=True,
        local_window_size=window, implementation=by,
    )  # fmt: skip
    return out[:, start - first :]


def _part(q: Any, k: Any, v: Any, by: Implementation, *, is_causal: bool = False) -> Part:
    """Attend on one device, by a kernel of ours that gives the lse in float32, and its gradient.

    ``jax.nn.dot_product_attention`` rounds the lse to bfloat16, and drops its gradient.
    """
    out, lse = ring_jax_gpu.ring_attention(
        q, k, v, axis_name=None, causal=is_causal, kernel=by, return_lse=True
    )
    return out.astype("float32"), lse.swapaxes(1, 2)


def _merged(a: Part, b: Part) -> Part:
    lse = jnp.logaddexp(a[1], b[1])
    weights = (jnp.exp(x[1] - lse)[..., None] for x in (a, b))
    out = sum(x[0] * weight for x, weight in zip((a, b), weights, strict=True))
    return out, lse
