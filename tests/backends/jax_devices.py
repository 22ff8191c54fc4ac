"""Test backend for ring_jax: host devices, or GPUs, of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from cases import TOKEN_AXES, Bias, Case, Segments
from jax.sharding import AxisType, PartitionSpec
from mutants import applied

import ring_jax
from ring_core import KernelConfig, Layout

Arrays = dict[str, npt.NDArray[Any]]
Ways = tuple[str | KernelConfig, str]  # kernel and strategy

SPECS = {
    "q": PartitionSpec(None, "cp"), "k": PartitionSpec(None, "cp"), "v": PartitionSpec(None, "cp"),
    "dout": PartitionSpec(None, "cp"), "dlse": PartitionSpec(None, None, "cp"),
    "q_ids": PartitionSpec(None, "cp"), "k_ids": PartitionSpec(None, "cp"),
    "bias": PartitionSpec(None, None, "cp"), "sinks": PartitionSpec(),
    "alibi_slopes": PartitionSpec(), "shown": PartitionSpec(None, None, "cp"),
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
        return _natural_all(case, results)


def _natural_all(case: Case, results: dict[str, Any]) -> Arrays:
    return {
        name: _natural(case, name, np.asarray(value, dtype=np.float64))
        for name, value in results.items()
    }


def _without_values(case: Case) -> Case:
    """Return the case without what only changes array values, as a key to its compiled program."""
    segments: Segments | None = "pair" if case.segments else None
    bias: Bias | None = "full" if case.bias else None
    return replace(
        case,
        name="",
        spread=1.0,
        poison=None,
        numbers=None,
        views=None,
        segments=segments,
        bias=bias,
    )


def _program(case: Case, ways: Ways, attention: Callable[..., Any]) -> Any:
    """Return a jitted forward and backward that takes the arrays, ``dout`` and ``dlse``."""
    mesh = jax.make_mesh(
        (case.cp_size,), ("cp",), axis_types=(AxisType.Auto,), devices=jax.devices()[: case.cp_size]
    )

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
        differentiated = {name: x[name] for name in GRADS if name in x}
        (out, lse), pull = jax.vjp(lambda leaves: ring({**x, **leaves}), differentiated)
        (grads,) = pull((dout, jnp.zeros_like(lse) if dlse is None else dlse.astype(lse.dtype)))
        return {"out": out, "lse": lse} | {f"d{name}": value for name, value in grads.items()}

    return forward_backward


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

    def call(some: dict[str, Any]) -> Any:
        y = {**x, **some}
        options = _options(case, y)
        return attention(y["q"], y["k"], y["v"], axis_name=None, kernel=config, **options)

    @jax.jit
    def both(some: dict[str, Any], dout: Any, dlse: Any) -> dict[str, Any]:
        (out, lse), pull = jax.vjp(call, some)
        (grads,) = pull((dout, jnp.zeros_like(lse) if dlse is None else dlse))
        return {"out": out, "lse": lse} | {f"d{name}": grad for name, grad in grads.items()}

    dlse = None if "dlse" not in x else x["dlse"].astype(jnp.float32)
    results = both({name: x[name] for name in GRADS if name in x}, x["dout"], dlse)
    return {name: np.asarray(value, dtype=np.float64) for name, value in results.items()}


def _array(case: Case, value: npt.NDArray[Any]) -> jax.Array:
    return jnp.asarray(value, dtype=None if value.dtype.kind in "ib" else case.dtype)


def _order(case: Case, name: str) -> tuple[int, npt.NDArray[np.int64]] | None:
    """Return the sharded axis of an array and the token positions in layout order."""
    if name in ("sinks", "alibi_slopes", "dsinks"):
        return None
    plan = case.plan
    is_keys = name in ("k", "v", "k_ids", "dk", "dv")
    layout: Layout = plan.k_layout if is_keys else plan.q_layout
    axis = TOKEN_AXES[name]
    return axis, np.concatenate([layout.positions(r) for r in range(case.cp_size)])


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
