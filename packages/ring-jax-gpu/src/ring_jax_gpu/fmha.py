"""Call cuDNN's attention through the primitives of ``jax.nn.dot_product_attention``.

A ring must pass the ``lse`` and the output of all steps to the backward, so forward and backward
are called separately. JAX has no public names for these primitives, and their parameters differ
between its releases: signatures that are not known here are refused.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ring_core import UnsupportedError
from ring_jax.kernels.absent import wrong_platform
from ring_jax.records import Array, Direction

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
    """JAX's primitives of cuDNN's attention, and the constants that they take."""

    forward: Any  # primitive
    backward: Any  # primitive
    no_mask: Any  # mask type
    causal: Any  # mask type
    layout: int  # [B, T, H, D]
    unused: tuple[str, ...]  # names of parameters to be set to ``None``


@dataclass(frozen=True)
class Pattern:
    """The static parameters of a cuDNN call; hashable."""

    scale: float
    causal: bool
    window: int | None  # number of keys that a query sees, its own included
    bias_grad: bool = False


def attend(
    pattern: Pattern, q: Array, k: Array, v: Array, bias: Array | None
) -> tuple[Array, Array]:
    """Return ``(out [B, H, T, Dv], lse [B, H, T])`` for arrays ``[B, heads, T, D]``.

    ``bias`` is ``[B or 1, H or 1, T, S]``. A program that is lowered for another platform than CUDA
    is refused.
    """
    arrays = [x.swapaxes(1, 2) for x in (q, k, v)]
    out, lse = sequential_vmap(partial(call_forward, pattern))(*arrays, *_as_tuple(bias))
    return out.swapaxes(1, 2), lse


def differentiate(
    pattern: Pattern, q: Array, k: Array, v: Array, bias: Array | None, lse: Array, out: Array,
    dout: Array,
) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
    """Return ``(dq, dk, dv, dbias)`` for arrays ``[B, heads, T, D]``.

    ``lse`` and ``out`` are those over all keys, not only over ``k``. ``dbias`` is ``None`` unless
    ``pattern.bias_grad``.
    """
    q, k, v, out, dout = (x.swapaxes(1, 2) for x in (q, k, v, out, dout))
    run = sequential_vmap(partial(call_backward, pattern))
    grads = run(q, k, v, lse, out, dout, *_as_tuple(bias))
    dq, dk, dv = (x.swapaxes(1, 2) for x in grads[:3])
    return dq, dk, dv, grads[3] if len(grads) > 3 else None


def call_forward(
    pattern: Pattern, q: Array, k: Array, v: Array, *bias: Array
) -> tuple[Array, Array]:
    """Return ``(out [B, T, H, Dv], lse [B, H, T])`` for arrays ``[B, T, heads, D]``."""
    none = jnp.zeros(0, q.dtype)
    out, lse = cudnn_p.bind(
        q, k, v, *(bias or (none,)), *[none] * 6, **_params(pattern, _binding(), bias),
        is_training=True, direction="forward",
    )  # fmt: skip
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
    """Return ``(dq, dk, dv)``, and ``dbias`` with ``pattern.bias_grad``; ``[B, T, heads, D]``."""
    none = jnp.zeros(0, q.dtype)
    return tuple(
        cudnn_p.bind(
            q, k, v, *(bias or (none,)), *[none] * 6, lse, out, dout,
            **_params(pattern, _binding(), bias), direction="backward",
        )
    )  # fmt: skip


#: Either of JAX's primitives, of which JAX says that a program with one is lowered for devices that
#: are there, whatever platform it is for. Inside of this one they are lowered for CUDA alone.
cudnn_p = Primitive("ring_cudnn")
cudnn_p.multiple_results = True


def _bind(*arrays: Any, direction: Direction, **params: Any) -> Any:
    """Call the primitive of a pass."""
    return getattr(_binding(), direction).bind(*arrays, **params)


def _types(*types: Any, direction: Direction, **params: Any) -> Any:
    """Return the types of the primitive's results, and its effects."""
    return getattr(_binding(), direction).abstract_eval(*types, **params)


def _run(*arrays: Array, **params: Any) -> Any:
    """Run a program of one call, under ``jax.disable_jit``, too."""
    with jax.disable_jit(disable=False):
        return jax.jit(partial(cudnn_p.bind, **params))(*arrays)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    """Raise the error of a program that names the kernel and is lowered for another platform."""
    raise UnsupportedError(wrong_platform("cuda", "cudnn"))


cudnn_p.def_impl(_run)
cudnn_p.def_effectful_abstract_eval(_types)
mlir.register_lowering(cudnn_p, _refuse)
mlir.register_lowering(cudnn_p, mlir.lower_fun(_bind), platform="cuda")


@lru_cache(maxsize=1)
def found_binding() -> Binding | str:
    """Find the primitives in this jax; return them, or the reason why they cannot be called."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as module

        forward = inspect.signature(module._dot_product_attention_fwd_cuda_lowering)  # noqa: SLF001 - what JAX checks by itself
        backward = inspect.signature(module._dot_product_attention_bwd_cuda_lowering)  # noqa: SLF001 - JAX has no public way
        binding = Binding(
            module._dot_product_attention_fwd_p, module._dot_product_attention_bwd_p,  # noqa: SLF001 - JAX has no public way
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
    """Return cuDNN's version, 91002 for 9.10.2; ``None`` if it is not installed."""
    try:
        from jax._src.lib import cuda_versions

        return None if cuda_versions is None else int(cuda_versions.cudnn_get_version())
    except (ImportError, RuntimeError):
        return None


def _binding() -> Binding:
    binding = found_binding()
    assert isinstance(binding, Binding), binding
    return binding


def _as_tuple(bias: Array | None) -> tuple[Array, ...]:
    return () if bias is None else (bias,)


def _params(pattern: Pattern, binding: Binding, bias: tuple[Array, ...]) -> dict[str, Any]:
    """Return the keyword parameters of either primitive."""
    return {
        "scale": pattern.scale, "seed": 0, "dropout_rate": 0.0,
        "variadic_args": (bool(bias), bool(bias) and pattern.bias_grad),
        "mask_type": binding.causal if pattern.causal else binding.no_mask,
        "layout": binding.layout, "sliding_window_length": pattern.window,
        **dict.fromkeys(binding.unused),
    }  # fmt: skip
