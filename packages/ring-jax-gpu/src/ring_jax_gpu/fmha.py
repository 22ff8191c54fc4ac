"""cuDNN's attention as ``jax.nn.dot_product_attention(implementation="cudnn")`` calls it.

A ring has to give the backward the ``lse`` and the output of all steps, so the two operations are
called apart. JAX has no public name for them, and their parameters differ among its releases: what
is not known here is refused.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from ring_jax.records import Array

_ARRAYS = (
    "query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets",
    "page_table_k", "page_table_v",
)  # fmt: skip
_SAVED = ("activation", "fwd_output", "grad_output")
_OPTIONS = (
    "scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout",
    "sliding_window_length",
)  # fmt: skip
_SCORE_MOD = ("score_mod_args", "score_mod_name", "score_mod_jaxpr")  # from jax 0.12 on


class Binding(NamedTuple):
    """The operations, and what they take beside arrays."""

    forward: Any  # primitives
    backward: Any
    no_mask: Any
    causal: Any
    layout: int  # of arrays as callers have them, heads behind tokens
    unused: tuple[str, ...]  # parameters that are ``None``


@dataclass(frozen=True)
class Pattern:
    """What is known of a call when it is traced; hashable."""

    scale: float
    causal: bool
    window: int | None  # keys that a query sees, its own included
    bias_grad: bool = False


def attend(
    pattern: Pattern, q: Array, k: Array, v: Array, bias: Array | None
) -> tuple[Array, Array]:
    """``(out [B, H, T, Dv], lse [B, H, T])`` of arrays that are heads first."""
    arrays = [x.swapaxes(1, 2) for x in (q, k, v)]
    out, lse = sequential_vmap(partial(call_forward, pattern))(*arrays, *_given(bias))
    return out.swapaxes(1, 2), lse


def differentiate(
    pattern: Pattern, q: Array, k: Array, v: Array, bias: Array | None, lse: Array, out: Array,
    dout: Array,
) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
    """``(dq, dk, dv, dbias)``, heads first; ``lse`` and ``out`` are those of all steps."""
    q, k, v, out, dout = (x.swapaxes(1, 2) for x in (q, k, v, out, dout))
    run = sequential_vmap(partial(call_backward, pattern))
    found = run(q, k, v, lse, out, dout, *_given(bias))
    dq, dk, dv = (x.swapaxes(1, 2) for x in found[:3])
    return dq, dk, dv, found[3] if len(found) > 3 else None


def call_forward(
    pattern: Pattern, q: Array, k: Array, v: Array, *bias: Array
) -> tuple[Array, Array]:
    """``(out [B, T, H, Dv], lse [B, H, T])`` of arrays as callers have them."""
    found, none = _binding(), jnp.zeros(0, q.dtype)
    out, lse = found.forward.bind(
        q, k, v, *(bias or (none,)), *[none] * 6, **_params(pattern, found, bias), is_training=True
    )
    return out, lse


def call_backward(
    pattern: Pattern,
    q: Array,
    k: Array,
    v: Array,
    lse: Array,
    out: Array,
    dout: Array,
    *bias: Array,
) -> tuple[Array, ...]:
    """``(dq, dk, dv)``, and ``dbias`` if it is asked for."""
    found, none = _binding(), jnp.zeros(0, q.dtype)
    return tuple(
        found.backward.bind(
            q, k, v, *(bias or (none,)), *[none] * 6, lse, out, dout,
            **_params(pattern, found, bias),
        )
    )  # fmt: skip


@lru_cache(maxsize=1)
def found_binding() -> Binding | str:
    """The operations, or why they cannot be called."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as module

        forward = inspect.signature(module._dot_product_attention_fwd_cuda_lowering)  # noqa: SLF001
        backward = inspect.signature(module._dot_product_attention_bwd_cuda_lowering)  # noqa: SLF001
        binding = Binding(
            module._dot_product_attention_fwd_p, module._dot_product_attention_bwd_p,  # noqa: SLF001
            module.MaskType.NO_MASK, module.MaskType.CAUSAL, module.AttentionLayout.BTNH.value,
            tuple(name for name in _SCORE_MOD[1:] if name in forward.parameters),
        )  # fmt: skip
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"jax {jax.__version__} calls cuDNN in another way ({error})"
    for signature, arrays, options in (
        (forward, _ARRAYS, (*_OPTIONS, "is_training")),
        (backward, (*_ARRAYS, *_SAVED), _OPTIONS),
    ):
        _, *names = signature.parameters
        others = set(names[len(arrays) :]) - set(_SCORE_MOD)
        if tuple(names[: len(arrays)]) != arrays or others != set(options):
            return f"jax {jax.__version__} calls cuDNN with other arguments"
    return binding


def cudnn_version() -> int | None:
    """As cuDNN counts it, 91002 for 9.10.2; ``None`` where there is none."""
    try:
        from jax._src.lib import cuda_versions

        return None if cuda_versions is None else int(cuda_versions.cudnn_get_version())
    except (ImportError, RuntimeError):
        return None


def _binding() -> Binding:
    found = found_binding()
    assert isinstance(found, Binding), found
    return found


def _given(bias: Array | None) -> tuple[Array, ...]:
    return () if bias is None else (bias,)


def _params(pattern: Pattern, found: Binding, bias: tuple[Array, ...]) -> dict[str, Any]:
    return {
        "scale": pattern.scale, "seed": 0, "dropout_rate": 0.0,
        "variadic_args": (bool(bias), bool(bias) and pattern.bias_grad),
        "mask_type": found.causal if pattern.causal else found.no_mask, "layout": found.layout,
        "sliding_window_length": pattern.window, **dict.fromkeys(found.unused),
    }  # fmt: skip
