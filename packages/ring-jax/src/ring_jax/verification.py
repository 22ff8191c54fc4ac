"""Preflight: one training step over a mesh, compared with the same step on one device.

What is wrong in silence is mostly in the user's own step: labels or positions in natural order, or
tokens that do not see the next device's. On one device, in natural order, such a step is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ring_core import UnsupportedError
from ring_core.base.arguments import numbers_as_python
from ring_jax.context import ContextParallel

#: A step of training: ``step(cp, params, batch)`` returns the loss of the whole batch.
Step = Callable[[ContextParallel, Any, Any], Any]

#: Largest error that counts as rounding, in multiples of what a second whole run differs; and how
#: much is allowed where that run differs in nothing.
_NOISE_FACTOR, _FLOOR = 4.0, 1e-6
_ARRAYS = jax.Array | np.ndarray | np.generic | int | float
#: Noise from which on nothing can be told.
_MOST_NOISE = 0.25
#: A difference that shrinks so much with fewer edges of shards may be at these.
_FEWER_EDGES = 1.5


@dataclass(frozen=True)
class Difference:
    """Difference between a split run and a whole one, relative to the whole one's size.

    Attributes:
        error: Relative difference of the split run from the whole one.
        limit: Largest error that counts as rounding.
    """

    error: float
    limit: float

    @property
    def is_within(self) -> bool:
        """True if the error is small enough to be rounding; NaN is not."""
        return self.error <= self.limit

    def __str__(self) -> str:
        return f"{self.error:.1e} (limit {self.limit:.1e})"


@dataclass(frozen=True)
class PreflightReport:
    """Findings of a preflight.

    Attributes:
        passed: True if the split step is the whole one but for rounding.
        findings: What is wrong, and the likeliest cause.
        loss: Difference of the losses.
        gradients: Differences of the parameters' gradients, by their paths.
    """

    passed: bool
    findings: tuple[str, ...]
    loss: Difference
    gradients: dict[str, Difference]

    def __str__(self) -> str:
        if not self.passed:
            return "preflight failed: " + ". ".join(self.findings)
        worst = max((x.error for x in self.gradients.values()), default=0.0)
        return f"preflight passed: loss {self.loss}; {len(self.gradients)} gradients, at most {worst:.1e}"


@numbers_as_python
def preflight(
    cp: ContextParallel, step: Step, *, params: Any, batch: Any, rtol: float | None = None
) -> PreflightReport:
    """Run one training step over a mesh, and the same step on one device, and compare them.

    Compared are the loss and the gradients by the parameters. Where they differ, the report names
    the first parameter, and the likeliest cause, found by another run of the step with consecutive
    tokens on each device. Devices of the host will do. No optimizer steps. It takes the memory of
    whole sequences on one device: give a short batch.

    Args:
        cp: The ``ContextParallel`` of your training, over devices of this process.
        step: Your function ``step(cp, params, batch)``: it splits the whole batch by methods of
            the ``cp`` that it is given, and returns the loss of all tokens, a scalar. It is run
            under ``jax.jit``.
        params: The parameters, a pytree of floating-point arrays.
        batch: The whole batch, a pytree of arrays: anything that ``step`` takes.
        rtol: Largest relative difference that counts as rounding; ``None`` for four times what a
            second whole run differs, with parameters changed by a unit in the last place.

    Returns:
        The report: ``report.passed``, and a text.

    Raises:
        ValueError: An argument is malformed, or the step returns no scalar, or results that such a
            change of parameters turns into others.
        UnsupportedError: The mesh has devices of other processes, or none.

    Example::

        def step(cp, params, batch):
            logits = model(
                params, cp.shard(batch["tokens"]), cp.positions(batch["tokens"].shape[1])
            )
            return cross_entropy(logits, cp.shard(batch["labels"]))


        report = ring_jax.preflight(cp, step, params=params, batch=batch)
        if not report.passed:
            raise SystemExit(str(report))
    """
    if not isinstance(cp, ContextParallel):
        raise ValueError(f"cp must be a ring_jax.ContextParallel, got {type(cp).__name__}")
    if not callable(step):
        raise ValueError(f"step must be a function, got {type(step).__name__}")
    if rtol is not None and not (isinstance(rtol, int | float) and 0 <= rtol < math.inf):
        raise ValueError(f"rtol must be a number from 0 on, or None, got {rtol!r}")
    for name, tree in (("params", params), ("batch", batch)):
        wrong = [x for x in jax.tree.leaves(tree) if not isinstance(x, _ARRAYS)]
        if wrong:
            raise ValueError(
                f"{name} must be a pytree of arrays, got {type(wrong[0]).__name__} in it"
            )
    leaves = jax.tree_util.tree_leaves_with_path(params)
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    if not paths or not all(jnp.issubdtype(jnp.result_type(x), jnp.floating) for _, x in leaves):
        raise ValueError("params must be a pytree of floating-point arrays, one at least")
    if not isinstance(cp.mesh, Mesh) or cp.mesh.is_multi_process:
        raise UnsupportedError(
            "preflight compares arrays of all devices, and this mesh has devices of other processes, or "
            "none. Instead: give a mesh of one process's devices; those of a host will do"
        )
    whole = _on_one_device(cp)
    results = _run(whole, step, params, batch)
    noise = _distances(_run(whole, step, _changed(params), batch), results)
    limits = [_NOISE_FACTOR * x + _FLOOR if rtol is None else rtol for x in noise]
    if rtol is None and not max(noise) < _MOST_NOISE:
        raise ValueError(
            "preflight: on one device the step's results are not finite, or parameters that are changed by "
            "a unit in the last place turn them into others. Give other parameters, or an rtol"
        )
    errors = _distances(_run(cp, step, params, batch), results)
    loss, *gradients = map(Difference, errors, limits)
    named = dict(zip(paths, gradients, strict=True))
    findings: tuple[str, ...] = ()
    if not all(x.is_within for x in (loss, *gradients)):
        natural = _with(cp, cp.mesh, "contiguous")
        in_natural_order = _distances(_run(natural, step, params, batch), results)
        findings = (
            _first_difference(loss, named),
            *_causes(cp, errors, in_natural_order, limits),
        )
    return PreflightReport(not findings, findings, loss, named)


def _with(cp: ContextParallel, mesh: Mesh, layout: Any) -> ContextParallel:
    """Return a ``ContextParallel`` with the axes of another, and a mesh and layout of its own."""
    return ContextParallel(mesh, cp.axis_name, cp.batch_axis, cp.head_axis, layout)


def _on_one_device(cp: ContextParallel) -> ContextParallel:
    """Return a ``ContextParallel`` over the first device, with the same axes, all of size 1."""
    mesh = cp.mesh
    first = mesh.devices.flat[:1].reshape((1,) * mesh.devices.ndim)
    return _with(cp, Mesh(first, mesh.axis_names, axis_types=mesh.axis_types), "contiguous")


def _run(cp: ContextParallel, step: Step, params: Any, batch: Any) -> list[Any]:
    """Return the loss and the gradients of a step, float64 of numpy."""
    everywhere = NamedSharding(cp.mesh, PartitionSpec())

    def loss_of(params: Any, batch: Any) -> Any:
        loss = step(cp, params, batch)
        if jnp.shape(loss) or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            raise ValueError(
                f"step must return the loss, a floating-point scalar, got {jnp.result_type(loss)} "
                f"{list(jnp.shape(loss))}"
            )
        return loss

    with jax.set_mesh(cp.mesh):
        arguments = jax.device_put((params, batch), everywhere)
        loss, gradients = jax.jit(jax.value_and_grad(loss_of))(*arguments)
    return [
        np.asarray(x.astype(jnp.float32), np.float64) for x in (loss, *jax.tree.leaves(gradients))
    ]


def _changed(params: Any) -> Any:
    """Return parameters, each element changed by a unit in the last place."""
    random = np.random.default_rng(0)

    def change(x: Any) -> Any:
        signs = jnp.asarray(random.integers(0, 2, jnp.shape(x)) * 2 - 1, jnp.result_type(x))
        return x * (1 + signs * jnp.finfo(jnp.result_type(x)).eps)

    return jax.tree.map(change, params)


def _distances(results: list[Any], whole: list[Any]) -> list[float]:
    """Return the relative difference of each result from that of the whole step."""
    norms = [
        (np.linalg.norm(x - y), np.linalg.norm(y)) for x, y in zip(results, whole, strict=True)
    ]
    return [float(error / max(size, 1e-30)) for error, size in norms]


def _first_difference(loss: Difference, gradients: dict[str, Difference]) -> str:
    """Return what differs first."""
    wrong = [(path, x) for path, x in gradients.items() if not x.is_within]
    text = "" if loss.is_within else f"the loss differs by {loss}"
    if wrong:
        path, difference = wrong[0]
        text += f"{', and ' if text else ''}{len(wrong)} of {len(gradients)} gradients differ, first that of params{path} by {difference}"
    return text


def _causes(
    cp: ContextParallel, errors: list[float], natural: list[float], limits: list[float]
) -> Iterator[str]:
    """Yield the likeliest cause, by the errors of a step with consecutive tokens on each device."""
    is_right = all(x <= limit for x, limit in zip(natural, limits, strict=True))
    if is_right and cp.layout != "contiguous":
        yield (
            f"in the layout 'contiguous' it is right, so something is in natural order that has to be in "
            f"that of {str(cp.layout)!r}: labels, positions, masks or documents. Split each by cp.shard, take "
            f"positions of cp.positions(seq_len), and neighbours of cp.shift or cp.halo"
        )
    elif cp.cp_size > 1 and (
        cp.layout == "contiguous" or max(natural) * _FEWER_EDGES < max(errors)
    ):
        yield (
            "a convolution, a shift of labels or a difference of neighbours may not see the next device's "
            "tokens. Use cp.halo, cp.shift, or shift labels before they are split"
        )
