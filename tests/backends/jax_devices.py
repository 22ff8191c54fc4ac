"""Test backend for ring_jax: host devices, or GPUs, of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from cases import TOKEN_AXES, Bias, Case, Segments
from jax.sharding import PartitionSpec
from jax_meshes import mesh_of
from mutants import applied

import ring_jax
from ring_core import KernelConfig, Layout

Arrays = dict[str, npt.NDArray[Any]]
Ways = tuple[str | KernelConfig, str]  # kernel and strategy

TOKENS, ROWS, WHOLE = PartitionSpec(None, "cp"), PartitionSpec(None, None, "cp"), PartitionSpec()
SPECS = {
    **dict.fromkeys(("q", "k", "v", "dout", "q_ids", "k_ids"), TOKENS),
    **dict.fromkeys(("dlse", "bias", "shown"), ROWS), **dict.fromkeys(("sinks", "alibi_slopes"), WHOLE),
}  # fmt: skip
GRADS = ("q", "k", "v", "sinks", "bias")


class JaxBackend:
    """Runs a case on as many devices as it has ranks.

    Args:
        attention: Another package's ``ring_attention``, with kernels of its own.
    """

    dtypes = ("float64", "float32", "bfloat16", "float16")
    failures = ()

    def __init__(self, attention: Callable[..., Any] | None = None) -> None:
        self._attention = attention

    def run(
        self, case: Case, mutant: str | None = None, kernel: str = "auto", strategy: str = "auto"
    ) -> Arrays:
        """Run one case."""
        _ = case.expected  # computed and cached before the mutant breaks anything
        with applied(mutant), jax.enable_x64(case.dtype == "float64"):
            return self._run(
                case, (kernel, case.moved(strategy)), _kept if mutant is None else _program
            )

    def _run(self, case: Case, ways: Ways, make: Callable[..., Any]) -> Arrays:
        x = {name: _in_order(case, name, case.padded(name)) for name in case.inputs}
        arrays = {name: value for name, value in x.items() if name not in ("dout", "dlse")}
        attention = self._attention or ring_jax.ring_attention
        results = make(_without_values(case), ways, attention)(arrays, x["dout"], x.get("dlse"))
        return {
            name: _natural(case, name, np.asarray(value, dtype=np.float64))
            for name, value in results.items()
        }


def _without_values(case: Case) -> Case:
    """Return the case without what only changes array values, as a key to its compiled program."""
    segments: Segments | None = "pair" if case.segments else None
    bias: Bias | None = "full" if case.bias else None
    return replace(
        case, name="", spread=1.0, poison=None, numbers=None, views=None, segments=segments, bias=bias
    )  # fmt: skip


def _program(case: Case, ways: Ways, attention: Callable[..., Any]) -> Any:
    """Return a jitted forward and backward that takes the arrays, ``dout`` and ``dlse``."""
    mesh = mesh_of(cp=case.cp_size)

    def local(x: dict[str, Any]) -> tuple[Any, Any]:
        results: tuple[Any, Any] = attention(
            x["q"], x["k"], x["v"], axis_name="cp", layout=case.layout, seq_len=case.lengths,
            kernel=ways[0], strategy=ways[1], **_options(case, x),
        )  # fmt: skip
        return results

    @jax.jit
    def forward_backward(x: dict[str, Any], dout: Any, dlse: Any) -> dict[str, Any]:
        specs = {name: SPECS[name] for name in x}
        if case.shown == "rows":
            specs["shown"] = PartitionSpec("cp")
        out_specs = (SPECS["dout"], SPECS["dlse"])
        ring = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=out_specs)
        return _passes(ring, x, dout, dlse)

    return forward_backward


def _passes(call: Callable[..., Any], x: dict[str, Any], dout: Any, dlse: Any) -> dict[str, Any]:
    """Return the results and gradients of a call that takes all arrays."""
    differentiated = {name: x[name] for name in GRADS if name in x}
    (out, lse), pull = jax.vjp(lambda leaves: call({**x, **leaves}), differentiated)
    (grads,) = pull((dout, jnp.zeros_like(lse) if dlse is None else dlse.astype(lse.dtype)))
    return {"out": out, "lse": lse} | {f"d{name}": value for name, value in grads.items()}


_kept = lru_cache(maxsize=4)(_program)


def _options(case: Case, x: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a case's call, with its arrays."""
    return {
        **case.rules, **({"mask": x["shown"]} if case.shown else {}),
        "segment_ids": (x["q_ids"], x["k_ids"]) if case.segments else None,
        "softmax_scale": case.softmax_scale, "softcap": case.softcap, "sinks": x.get("sinks"),
        "bias": x.get("bias"), "alibi_slopes": x.get("alibi_slopes"), "dropout_p": case.dropout_p,
        "dropout_seed": case.dropout_seed, "return_lse": True,
    }  # fmt: skip


def alone(case: Case, config: KernelConfig, attention: Callable[..., Any]) -> Arrays:
    """Run a case on one device, without a ring."""
    x = {name: _array(case, value) for name, value in case.inputs.items()}

    def call(x: dict[str, Any]) -> Any:
        q, k, v = (x[name] for name in "qkv")
        return attention(q, k, v, axis_name=None, kernel=config, **_options(case, x))

    results = jax.jit(partial(_passes, call))(x, x["dout"], x.get("dlse"))
    return {name: np.asarray(value, dtype=np.float64) for name, value in results.items()}


def assert_vmapped(attention: Callable[..., Any], config: KernelConfig, tokens: int) -> None:
    """Assert that gradients of a vmapped call with segments are those of XLA's kernel."""
    rng, shape = np.random.default_rng(0), (2, 1, tokens, 1, 8)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(3))
    ids = jnp.asarray(rng.integers(0, 2, shape[:3]).cumsum(axis=2) // 10, jnp.int32)

    def loss(q: Any, k: Any, v: Any, ids: Any, kernel: KernelConfig) -> Any:
        out = attention(q, k, v, axis_name=None, segment_ids=ids, causal=True, kernel=kernel)
        return (out * jnp.cos(v)).sum()

    grads = jax.vmap(jax.grad(loss, (0, 1, 2)), in_axes=(0, 0, 0, 0, None))
    results, expected = (grads(q, k, v, ids, x) for x in (config, KernelConfig("xla")))
    for result, x in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, x, atol=1e-5)


def _array(case: Case, value: npt.NDArray[Any]) -> jax.Array:
    return jnp.asarray(value, dtype=None if value.dtype.kind in "ib" else case.dtype)


def _order(case: Case, name: str) -> tuple[int, npt.NDArray[np.int64]] | None:
    """Return the sharded axis of an array and the token positions in layout order."""
    if name in ("sinks", "alibi_slopes", "dsinks"):
        return None
    is_keys = name in ("k", "v", "k_ids", "dk", "dv")
    layout: Layout = case.plan.k_layout if is_keys else case.plan.q_layout
    ranks = range(case.cp_size)
    return TOKEN_AXES[name], np.concatenate([layout.positions(rank) for rank in ranks])


def _in_order(case: Case, name: str, value: npt.NDArray[Any]) -> jax.Array:
    """Return a global array permuted into layout order."""
    order = _order(case, name)
    value = value if order is None else np.take(value, order[1], axis=order[0])
    return _array(case, value)


def _natural(case: Case, name: str, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a global array in natural token order, without padding."""
    order = _order(case, name)
    if order is None:
        return value
    return case.without_padding(name, np.take(value, np.argsort(order[1]), axis=order[0]))
