"""Train a language model on sequences split over devices, and on one device: equal losses.

The text is English: the help topics that come with Python. A byte-level causal transformer, in JAX
alone, reads it 4,096 bytes at a time. Each of four devices (of this machine's CPU, where there are
no others) holds a quarter of the sequence, from embedding to loss; only attention needs the rest,
and :class:`ring_jax.ContextParallel` fetches it. The same code then runs on one device::

    python examples/train_bytes_jax.py
    python examples/train_bytes_jax.py --layout striped --cp 8
    python examples/train_bytes_jax.py --packed --window 512 --dtype float64

The exit code is 0 if both learn and agree, 1 if not, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ring_core import LAYOUTS, STRATEGIES, Layout, LayoutName
from ring_jax import ContextParallel

Array = jax.Array
Weights = dict[str, Any]
Attend = Callable[[Array, Array, Array], Array]

BYTES, HEAD_DIM, WARMUP = 256, 32, 10
BETA1, BETA2, EPSILON, DECAY, MOST_NORM = 0.9, 0.95, 1e-8, 0.01, 1.0  # of AdamW
IGNORED = -1  # the label of a byte that has nothing to predict
LIMITS = {"float32": 1e-5, "float64": 1e-10}  # largest relative differences of losses
LONG, LEARNED = 60, 1.0  # in this many steps the loss has to fall by this much


@dataclass(frozen=True)
class Config:
    """Settings of a training run; ``cp`` is how many devices share its sequences."""

    cp: int
    layout: LayoutName
    strategy: str
    seq_len: int
    window: int | None
    packed: bool
    steps: int
    dtype: str
    layers: int
    dim: int
    lr: float
    seed: int

    def __str__(self) -> str:
        return f"{self.cp} device{'s' if self.cp > 1 else ''}"


@dataclass(frozen=True)
class Run:
    """Results of a training run: the loss of every step, and times."""

    losses: tuple[float, ...]
    compiling: float  # seconds, the first step included
    seconds: float  # of the other steps


class Batch(NamedTuple):
    """A sequence in natural order; ``documents`` numbers the help topic of each byte."""

    tokens: Array  # int32 [1, T]
    labels: Array  # int32 [1, T]
    documents: Array | None  # int32 [1, T]


class State(NamedTuple):
    """Training state: weights, and AdamW's first and second moments."""

    weights: Weights
    mean: Weights
    square: Weights
    step: Array


def initial(config: Config) -> State:
    """Return the initial state: weights depend on the seed alone.

    Weights of all layers are stacked in one array, for ``lax.scan``.
    """
    dim, random = config.dim, np.random.default_rng(config.seed)
    dtype = jnp.promote_types(config.dtype, jnp.float32)  # not below float32: updates are small

    def normal(*shape: int, std: float = 0.02) -> Array:
        return jnp.asarray(std * random.standard_normal(shape), dtype)

    shapes = {"query": dim, "key_value": dim, "out": dim, "up": 2 * dim, "gate": 2 * dim}
    blocks = {name: normal(config.layers, dim, width) for name, width in shapes.items()}
    blocks["down"] = normal(config.layers, 2 * dim, dim)
    for norm in ("norm_attention", "norm_mlp"):
        blocks[norm] = jnp.ones((config.layers, dim), dtype)
    weights: Weights = {
        "embedding": normal(BYTES, dim, std=1.0), "blocks": blocks, "norm": jnp.ones(dim, dtype),
        "head": normal(dim, BYTES),
    }  # fmt: skip
    mean, square = (jax.tree.map(jnp.zeros_like, weights) for _ in range(2))
    return State(weights, mean, square, jnp.zeros((), jnp.int32))


def model(weights: Weights, tokens: Array, positions: Array, attend: Attend) -> Array:
    """Return logits ``[B, T, 256]`` of ``tokens [B, T]`` at global ``positions [T]``."""
    exponents = np.arange(0, 1, 2 / HEAD_DIM)
    frequencies = jnp.asarray(10000.0**-exponents, jnp.float32)
    angles = jnp.outer(positions, frequencies)[None, :, None]  # [1, T, 1, D / 2]
    x = weights["embedding"][tokens]
    block = partial(transformer_block, angles=angles, attend=attend)
    x, _ = lax.scan(lambda x, layer: (block(x, layer), None), x, weights["blocks"])
    logits: Array = normed(x, weights["norm"]) @ weights["head"]
    return logits


def transformer_block(x: Array, layer: Weights, *, angles: Array, attend: Attend) -> Array:
    """Apply attention, two query heads to a K/V head, and a gated MLP to ``x [B, T, dim]``."""
    y = normed(x, layer["norm_attention"])
    q = (y @ layer["query"]).reshape(*y.shape[:2], -1, HEAD_DIM)  # [B, T, H, D]
    kv = (y @ layer["key_value"]).reshape(*y.shape[:2], -1, HEAD_DIM)
    k, v = jnp.split(kv, 2, axis=2)  # [B, T, H / 2, D]
    seen = attend(rotate(q, angles), rotate(k, angles), v)
    x = x + seen.reshape(*y.shape[:2], -1) @ layer["out"]
    y = normed(x, layer["norm_mlp"])
    mlp: Array = (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
    return x + mlp


def normed(x: Array, weight: Array) -> Array:
    """Apply RMS norm (Zhang and Sennrich, arXiv 1910.07467)."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight[None, None]


def rotate(x: Array, angles: Array) -> Array:
    """Apply rotary embedding to heads ``x [B, T, H, D]`` (Su et al., arXiv 2104.09864)."""
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def loss_of(weights: Weights, batch: Batch, cp: ContextParallel, config: Config) -> Array:
    """Return the mean cross entropy of a batch, which is split over the devices of ``cp``."""
    tokens, labels = cp.shard(batch.tokens), cp.shard(batch.labels)
    documents = None if batch.documents is None else cp.shard(batch.documents)
    window = None if config.window is None else (config.window, 0)
    attend = partial(
        cp.attention, causal=True, window=window, segment_ids=documents, strategy=config.strategy
    )
    cast = jax.tree.map(lambda x: x.astype(config.dtype), weights)
    logits = model(cast, tokens, cp.positions(config.seq_len), attend)
    wide = jax.nn.log_softmax(logits.astype(jnp.promote_types(config.dtype, jnp.float32)))
    chosen = jnp.take_along_axis(wide, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    counted = labels != IGNORED
    return -jnp.sum(jnp.where(counted, chosen, 0)) / jnp.sum(counted)


def adamw(state: State, grads: Weights, lr: float) -> State:
    """Take a step of AdamW (Loshchilov and Hutter, arXiv 1711.05101), warmed up and clipped."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1, MOST_NORM / norm), grads)
    step = state.step + 1
    rate = lr * jnp.minimum(1, step / WARMUP)
    mean = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state.mean, grads)
    square = jax.tree.map(lambda s, g: BETA2 * s + (1 - BETA2) * g * g, state.square, grads)

    def moved(w: Array, m: Array, s: Array) -> Array:
        m, s = m / (1 - BETA1**step), s / (1 - BETA2**step)
        return (w - rate * (m / (jnp.sqrt(s) + EPSILON) + DECAY * w)).astype(w.dtype)

    return State(jax.tree.map(moved, state.weights, mean, square), mean, square, step)


def sequence(config: Config, step: int) -> Batch:
    """Return the sequence of a step.

    If packed, each topic is a document, and the label of a document's last byte is ignored: the
    next byte belongs to another one. Documents are given as segment ids, so that one compiled
    program serves all steps; ``cu_seqlens`` would be part of the program.
    """
    topic = [text.encode() for text in topics.values()]
    text, ends = np.frombuffer(b"".join(topic), np.uint8), np.cumsum([len(x) for x in topic])
    start = np.random.default_rng((config.seed, step)).choice(ends if config.packed else len(text))
    places = start + np.arange(config.seq_len + 1)
    taken = np.take(text, places, mode="wrap").astype(np.int32)
    tokens, labels, documents = taken[None, :-1], taken[None, 1:], None
    if config.packed:
        rounds, inside = np.divmod(places, len(text))
        which = rounds * len(ends) + np.searchsorted(ends, inside, side="right")
        labels = np.where(np.diff(which) > 0, IGNORED, labels)
        documents = jnp.asarray(which[None, :-1] - which[0], jnp.int32)
    return Batch(jnp.asarray(tokens), jnp.asarray(labels), documents)


def train(config: Config) -> Run:
    """Train a model on ``config.cp`` devices, and return its losses and times."""
    devices = jax.devices()[: config.cp]
    mesh = jax.make_mesh((config.cp,), ("cp",), (AxisType.Auto,), devices=devices)
    cp = ContextParallel(mesh, "cp", layout=config.layout)
    replicated = NamedSharding(mesh, PartitionSpec())

    @partial(jax.jit, donate_argnums=0)
    def train_step(state: State, batch: Batch) -> tuple[State, Array]:
        loss, grads = jax.value_and_grad(loss_of)(state.weights, batch, cp, config)
        return adamw(state, grads, config.lr), loss

    state = jax.device_put(initial(config), replicated)
    losses: list[float] = []
    marks = [time.perf_counter()]
    for step in progress(config, losses):
        state, loss = train_step(state, jax.device_put(sequence(config, step), replicated))
        losses.append(float(loss))
        marks.append(time.perf_counter())
    return Run(tuple(losses), marks[1] - marks[0], marks[-1] - marks[1])


def progress(config: Config, losses: Sequence[float]) -> Iterator[int]:
    """Yield the steps to do; show a bar if there is a terminal, else print a few lines."""
    name, steps = f"{config}, {config.dtype}", range(config.steps)
    if bar := sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
        from tqdm import tqdm
    for step in tqdm(steps, desc=name, unit="step") if bar else steps:
        yield step
        if not bar and (step + 1) % 10 == 0:
            print(f"{name}: step {step + 1:3}, loss {losses[-1]:.3f}", file=sys.stderr, flush=True)


def difference(ring: Run, single: Run) -> float:
    """Return the largest relative difference of two runs' losses."""
    return float(np.abs(np.array(ring.losses) / np.array(single.losses) - 1).max())


def failures(config: Config, ring: Run, single: Run) -> Iterator[str]:
    """Yield what is wrong with the losses; a dtype without a limit is not checked."""
    if config.dtype not in LIMITS:
        return
    if (
        not (difference_found := difference(ring, single)) <= LIMITS[config.dtype]
    ):  # NaN is wrong too
        yield f"losses differ by {difference_found:.1e}, by more than {LIMITS[config.dtype]:.0e}"
    fall = ring.losses[0] - ring.losses[-1]
    if config.steps >= LONG and not fall >= LEARNED:
        yield f"the loss fell by {fall:.3f}, not by {LEARNED:g} or more"


def report(config: Config, ring: Run, single: Run) -> None:
    """Print the losses of the ring beside those of one device."""
    print(f"step  {config!s:>12}     1 device   difference")
    for step, (loss, other) in enumerate(zip(ring.losses, single.losses, strict=True)):
        print(f"{step + 1:4}  {loss:12.9f}{other:13.9f}{loss - other:13.1e}")
    print(f"\nloss: from {ring.losses[0]:.3f} to {ring.losses[-1]:.3f} nats a byte")
    for name, run in ((config, ring), (replace(config, cp=1), single)):
        print(
            f"{name}: {run.compiling:.1f} s to compile and step once, {run.seconds:.1f} s for the rest"
        )
    print(f"largest relative difference: {difference(ring, single):.1e} in {config.steps} steps")
    if config.dtype not in LIMITS:
        print(f"{config.dtype} is coarse: neither the difference nor the loss was checked")


def arguments(argv: Sequence[str] | None) -> Config:
    """Read the command line."""
    parser = argparse.ArgumentParser(usage="%(prog)s [options]")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add("--cp", type=int, default=4, help="devices that share a sequence")
    add("--layout", choices=LAYOUTS, default="zigzag", help="which device holds which bytes")
    add("--strategy", choices=("auto", *STRATEGIES), default="auto", help="how they move")
    add("--seq-len", type=int, default=4096, help="bytes in a sequence")
    add("--window", type=int, metavar="LEFT", help="how many bytes back a byte sees")
    add("--packed", action="store_true", help="keep help topics apart, with segment ids")
    add("--steps", type=int, default=60, help="sequences to train on")
    add("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    add("--layers", type=int, default=2, help="of the model")
    add("--dim", type=int, default=64, help="width of the model")
    add("--lr", type=float, default=3e-3, help="learning rate")
    add("--seed", type=int, default=0, help="of weights and data")
    config = Config(**vars(parser.parse_args(argv)))
    if wrong := next(mistakes(config), None):
        parser.error(wrong)
    return config


def mistakes(config: Config) -> Iterator[str]:
    """Yield an error message for each wrong argument."""
    limits = {"cp": 0, "seq_len": 0, "window": -1, "steps": 0, "layers": 0, "lr": 0, "seed": -1}
    for name, limit in limits.items():
        if (value := getattr(config, name)) is not None and not value > limit:
            yield f"--{name.replace('_', '-')} must be more than {limit}, got {value}"
    try:
        Layout(config.layout, config.seq_len, config.cp)
    except ValueError as error:
        yield f"--seq-len: {error}"
    if config.dim < 1 or config.dim % (2 * HEAD_DIM):
        yield f"--dim must be a multiple of {2 * HEAD_DIM}, got {config.dim}"


def main(argv: Sequence[str] | None = None) -> int:
    """Train on a ring and on one device and compare; returns the exit code."""
    config = arguments(argv)
    # Host devices wait for each other in threads of one pool: too few threads would deadlock.
    os.environ.setdefault("NPROC", str(max(32, 8 * config.cp)))
    jax.config.update("jax_num_cpu_devices", config.cp)
    jax.config.update("jax_enable_x64", config.dtype == "float64")
    jax.config.update("jax_default_matmul_precision", "highest")  # or GPUs take TF32 for float32
    if (device_count := len(jax.devices())) < config.cp:
        print(f"error: --cp is {config.cp}, and JAX has {device_count} devices", file=sys.stderr)
        return 2
    ring, single = train(config), train(replace(config, cp=1))
    report(config, ring, single)
    wrong = list(failures(config, ring, single))
    sys.stderr.writelines(f"error: {config.dtype}: {text}\n" for text in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
