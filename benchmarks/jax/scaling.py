"""Time attention over several GPUs in JAX, beside methods in plain JAX: ``nox -s bench_jax_gpus``.

Every method first has to agree with float32 attention at 2,048 tokens, output and gradients; one
that does not gets no time. Batch 1, bfloat16. Times are medians of rounds of whole calls, in
which all methods of a setting take turns. Scaling efficiency is the rate per GPU over that of
``one`` GPU with the whole sequence, at 128k tokens where it did not run this one. ``GiB`` is what
XLA sets aside on a GPU for results and temporaries.

The plain methods run cuDNN's kernels, and have gradients. ``all-gather`` fetches all keys to every
GPU, then attends; ``zigzag`` is a ring of ``lax.scan`` and ``lax.ppermute`` that merges parts. Both
are written for causal masks over the zigzag layout; with windows and packed documents
``all-gather`` takes contiguous shards.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from statistics import median
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import ring_jax_gpu
from benchmarks.common import harness
from benchmarks.common.cases import (
    CAUSAL,
    JAX_SETTINGS,
    PASSES,
    SCALING_GATE,
    WRONG,
    K,
    Setting,
    mask_of,
)
from benchmarks.common.harness import Run, attempted
from ring_core import Layout, LayoutName, Mask
from ring_core.tools.bench import watched
from ring_jax.tools.doctor import versions

GATE_LENGTH = SCALING_GATE
DEFAULT = ["one", "ring", "gather", "all-gather cudnn", "zigzag cudnn"]
LONG = 256 * K  # tokens above which there are fewer rounds
SLOW = 0.2  # seconds per call above which a turn is one call
TURN, REST = 0.05, 0.05  # seconds of calls in a turn, and before it
AXIS = "cp"
_BLOCK = 128  # tokens; lengths that kernels get are multiples of it
Attend = Callable[..., Any]
Implementation = Literal["xla", "cudnn"]  # the first for tests without a GPU
Part = tuple[Any, Any]  # out [B, T, H, D] and lse [B, T, H], float32


def on_one(
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
        return on_one(q, k, v, bias, mask=mask, name="xla", **options)
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


def program_of(attend: Attend, way: str, x: Sequence[Any]) -> partial[Any]:
    """Return a pass that is compiled for its inputs, the last of which is ``dout``."""
    function, arguments = (partial(both, attend), x) if way == "both" else (attend, x[:-1])
    return partial(jax.jit(function).lower(*arguments).compile(), *arguments)


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
    layout: LayoutName = "zigzag"  # the order of tokens over devices
    chosen: Callable[..., dict[str, str]] = lambda *_: {}  # what `auto` takes, if it is ours


Maker = Callable[[Mesh, Mask, int], Method]  # the last is the number of tokens


def ours(mesh: Mesh, mask: Mask, _: int, *, strategy: Any = "ring", kernel: str = "auto") -> Method:
    """Return ``ring_jax`` over the zigzag layout."""
    cp = ring_jax_gpu.ContextParallel(mesh, axis_name=AXIS, layout="zigzag")
    attend = partial(cp.attention, mask=mask, kernel=kernel, strategy=strategy)

    def chosen(*qkv: Any) -> dict[str, str]:
        text = cp.explain(*qkv, mask=mask, kernel=kernel)
        lines = re.findall(r"^(strategy|kernel) (\w+)", text, re.MULTILINE)
        return {key.replace("strategy", "auto"): name for key, name in reversed(lines)}

    return Method(attend, chosen=chosen)


def one(_: Mesh, mask: Mask, _seq_len: int, *, kernel: str = "auto") -> Method:
    """Return attention over the whole sequence on one GPU."""
    return Method(partial(on_one, mask=mask, name=kernel), "contiguous")


def _over(mesh: Mesh, local: Attend, layout: LayoutName = "zigzag") -> Method:
    spec = PartitionSpec(None, AXIS)
    whole = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return Method(whole, layout)


def all_gather(mesh: Mesh, mask: Mask, seq_len: int, *, implementation: Implementation) -> Method:
    """Return attention to all gathered K/V: zigzag queries if causal, else contiguous shards."""
    size = mesh.shape[AXIS]
    half = seq_len // size // 2

    def causal(q: Any, k: Any, v: Any) -> Any:
        k, v = (in_order(lax.all_gather(x, AXIS)) for x in (k, v))
        branches = [partial(two_chunks, rank) for rank in range(size)]
        return lax.switch(lax.axis_index(AXIS), branches, q, k, v)

    def in_order(gathered: Any) -> Any:
        """Reorder ``[P, B, T, K, D]`` in zigzag order to ``[B, P * T, K, D]`` in natural order."""
        chunks = [gathered[n, :, :half] for n in range(size)]
        chunks += [gathered[n, :, half:] for n in reversed(range(size))]
        return jnp.concatenate(chunks, axis=1)

    def two_chunks(rank: int, q: Any, k: Any, v: Any) -> Any:
        """Attend with both chunks of a rank's queries: to all before, and causally to itself."""
        outs = []
        for n, chunk in enumerate((rank, 2 * size - 1 - rank)):
            rows, k_stop = q[:, n * half : (n + 1) * half], chunk * half
            own = slice(k_stop, k_stop + half)
            whole = _part(rows, k[:, own], v[:, own], implementation, is_causal=True)
            if k_stop:
                before = _part(rows, k[:, :k_stop], v[:, :k_stop], implementation)
                whole = _merged(whole, before)
            outs.append(whole[0].astype(q.dtype))
        return jnp.concatenate(outs, axis=1)

    def contiguous(q: Any, k: Any, v: Any) -> Any:
        k, v = (lax.all_gather(x, AXIS, axis=1, tiled=True) for x in (k, v))
        starts = range(0, seq_len, seq_len // size)
        branches = [partial(behind_earlier_rows, start) for start in starts]
        return lax.switch(lax.axis_index(AXIS), branches, q, k, v)

    def behind_earlier_rows(start: int, q: Any, k: Any, v: Any) -> Any:
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
            local_window_size=window, implementation=implementation,
        )  # fmt: skip
        return out[:, start - first :]

    return _over(mesh, causal) if mask == CAUSAL else _over(mesh, contiguous, "contiguous")


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

    return _over(mesh, local)


METHODS: dict[str, Maker] = {
    "one": one, "ring": ours, "gather": partial(ours, strategy="gather"),
    "ulysses": partial(ours, strategy="ulysses"),
    "all-gather cudnn": partial(all_gather, implementation="cudnn"),
    "zigzag cudnn": partial(zigzag, implementation="cudnn"),
}  # fmt: skip


def _part(q: Any, k: Any, v: Any, by: Implementation, *, is_causal: bool = False) -> Part:
    """Attend on one device, by a kernel of ours that gives the lse in float32, and its gradient.

    ``jax.nn.dot_product_attention`` rounds the lse to bfloat16, and drops its gradient.
    """
    out, lse = on_one(q, k, v, mask=Mask(causal=is_causal), name=by, return_lse=True)
    return out.astype("float32"), lse.swapaxes(1, 2)


def _merged(a: Part, b: Part) -> Part:
    lse = jnp.logaddexp(a[1], b[1])
    weights = (jnp.exp(x[1] - lse)[..., None] for x in (a, b))
    out = sum(x[0] * weight for x, weight in zip((a, b), weights, strict=True))
    return out, lse


def calls_of(run: Run) -> int:
    """Return how many calls fill a turn; the run has been called before."""
    once = seconds(run)
    return 1 if once > SLOW else max(2, min(60, int(TURN / max(once, 1e-5))))


def milliseconds(run: Run, calls: int) -> float:
    """Return milliseconds per call.

    A GPU's clock changes with its warmth, so a turn begins with a rest, and no run begins at the
    clock that another one left.
    """
    time.sleep(REST)
    return 1e3 * seconds(run, calls) / calls


def rows_of_setting(
    setting: Setting, names: list[str], mesh: Mesh, pool: ThreadPoolExecutor
) -> Iterator[dict[str, Any]]:
    """Yield a row for each method: all are compared first, then timed in turns."""
    meshes = {name: mesh_of(1) if name == "one" else mesh for name in names}
    rows: dict[str, dict[str, Any]] = {
        name: {"gpus": mesh.size, "setting": setting.name, "method": name} for name in names
    }

    def sharding(mesh: Mesh) -> NamedSharding:  # of tokens
        return NamedSharding(mesh, PartitionSpec(None, AXIS))

    @cache
    def arrays(length: int, mesh: Mesh) -> list[Any]:  # q, k, v and dout, split over a mesh
        make = partial(random_arrays, [(1, length, *x) for x in setting.shapes], 1)
        return list(jax.jit(make, out_shardings=sharding(mesh))())

    short = arrays(GATE_LENGTH, mesh_of(1))
    defined = partial(exact, mask=mask_of(setting.mask, GATE_LENGTH))
    wide = [x.astype("float32") for x in short[:3]]
    expected = jax.device_get(jax.jit(partial(both, defined))(*wide, short[3]))

    def compiled(name: str) -> tuple[dict[str, float], dict[str, partial[Any]]]:
        """Return a method's errors at 2,048 tokens, and its programs of both passes with inputs."""
        gate, method = (
            METHODS[name](meshes[name], mask_of(setting.mask, length), length)
            for length in (GATE_LENGTH, setting.seq_len)
        )
        layout = Layout(gate.layout, GATE_LENGTH, meshes[name].size)
        order = np.concatenate([layout.positions(rank) for rank in range(layout.cp_size)])
        inputs = jax.device_put([x[:, order] for x in short], sharding(meshes[name]))
        results = jax.jit(partial(both, gate.attend))(*inputs)
        errors = {
            key: float(np.abs(np.asarray(x, np.float32) - y[:, order]).max())
            for key, x, y in zip(("out", "dq", "dk", "dv"), results, expected, strict=True)
        }
        x = arrays(setting.seq_len, meshes[name])
        rows[name] |= method.chosen(*x[:3])
        return errors, {way: program_of(method.attend, way, x) for way in PASSES}

    def first_run(name: str) -> dict[str, partial[Any]]:
        programs: dict[str, partial[Any]] = entrants[name][1]
        for run in programs.values():
            jax.block_until_ready(run())
        return programs

    attempted({*meshes.values()}, partial(arrays, setting.seq_len))  # before threads ask for them
    entrants = attempted(names, compiled, pool.map)
    for name, entrant in entrants.items():
        if isinstance(entrant, str):
            yield rows.pop(name) | {"failed": entrant}
        elif not max(entrant[0].values()) < WRONG:
            yield rows.pop(name) | {"wrong": entrant[0]}
    passes = attempted([*rows], first_run)
    for name in [name for name, runs in passes.items() if isinstance(runs, str)]:
        yield rows.pop(name) | {"failed": passes.pop(name)}
    runs = {(name, way): run for name, of in passes.items() for way, run in of.items()}
    rounds = 3 if setting.seq_len > LONG else 5
    took = harness.take_turns(runs, rounds, calls_of, milliseconds)
    for name, row in rows.items():
        # What XLA takes on a GPU for results and temporaries.
        memory = {way: run.func.memory_analysis() for way, run in passes[name].items()}
        times = {
            way: {
                "ms": median(took[name, way]),
                "peak_gib": (x.temp_size_in_bytes + x.output_size_in_bytes) / 2**30,
            }
            for way, x in memory.items()
        }
        yield row | {"errors": entrants[name][0]} | setting.rates(times, meshes[name].size)


@harness.command(
    __doc__,
    {
        "--gpus": {"type": int, "help": "how many; by default all"},
        "--settings": {"nargs": "+", "metavar": "NAME"},
        "--methods": {"nargs": "+", "default": DEFAULT},
    },
)
def main(options: Any) -> int:
    """Time the settings asked for, one after the other; rows already in the JSON are kept."""
    gpu, flags = jax.devices()[0].device_kind, os.environ.get("XLA_FLAGS", "")
    report = harness.Report(
        options, harness.environment(gpu, versions(), XLA_FLAGS=flags), keep=True
    )
    mesh = mesh_of(options.gpus or len(jax.devices()))
    chosen = harness.selected(JAX_SETTINGS, options.settings)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for setting in watched(chosen, len(chosen), "setting"):
            key = {"gpus": mesh.size, "setting": setting.name}
            left = [name for name in options.methods if not report.has(**key, method=name)]
            for row in rows_of_setting(setting, left, mesh, pool):
                report.add(row)
    return 0
