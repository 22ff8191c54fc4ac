"""The text of :meth:`ContextParallel.explain`, and the small call by which kernels are tried."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax

from ring_core import KernelConfig, Mask, Request, make_plan, ring_program
from ring_core.viz.text import heading
from ring_jax.kernels import ask, notes_of, sample_dtype
from ring_jax.kernels.absent import AbsentKernel, or_broken
from ring_jax.rank_view import Constants
from ring_jax.records import BackwardInputs, CallSpec, Grads, Inputs, Kernel, LocalShape
from ring_jax.strategies import STRATEGIES, Way

_TOKENS, _HEAD_DIM = 512, 64  # of the call by which a kernel is tried


def explained(call: CallSpec, way: Way) -> str:
    """Return the text of :meth:`ContextParallel.explain`, for a call that was checked."""
    inner = call.inner
    launches = STRATEGIES[inner.strategy].launches(inner.program)
    size = Constants(*map(sum, zip(*(x.constants(inner.plan) for x in launches), strict=True)))
    kernels, request = way.kernels.kernels, way.kernels.request
    of_kernels = {
        f"tiles of {kernel.capabilities.name}": len(launches) * added
        for kernel in kernels
        if isinstance(
            added := or_broken(kernel, partial(kernel.constant_bytes, inner.program)), int
        )
    }
    contents = {
        "work items of all ranks": size.items, "kinds of a predicate's tiles": size.kinds,
        "boundaries of documents": size.boundaries, "positions of all ranks": size.positions, **of_kernels,
    }  # fmt: skip
    parts = ", ".join(f"{added:,} of {what}" for what, added in contents.items() if added)
    failing = {kernel.capabilities.name: trial_error(kernel) for kernel in kernels}
    return "\n".join([
        way.describe([x for kernel in kernels for x in notes_of(kernel, request, call.config, inner.program)]),
        *(f"  {name} is broken: {reason}" for name, reason in failing.items() if reason),
        (
            f"program            {len(launches)} launches or loops of them, forward and backward; "
            f"{sum(contents.values()):,} bytes of constants: {parts or 'none'}"
        ),
        heading(call.program),
        *STRATEGIES[call.strategy].figures(call),
    ])  # fmt: skip


@cache
def trial_error(kernel: Kernel) -> str:
    """Trace a small causal call with this kernel and return the error, or an empty string.

    A kernel that refuses the call, or is for every platform, has none.
    """
    can, dtype = kernel.capabilities, sample_dtype(kernel.capabilities)
    if not can.devices:
        return ""
    program = ring_program(make_plan(Mask(causal=True), seq_len=_TOKENS, cp_size=1))
    config = KernelConfig(can.name)
    call = CallSpec(program, None, 0.125, None, 0.0, (kernel,), config, dtype, _HEAD_DIM)
    x: Any = jax.ShapeDtypeStruct((1, _TOKENS, 2, _HEAD_DIM), dtype)
    local = LocalShape(
        lists=1, q_len=_TOKENS, k_lengths=(_TOKENS,), head_dim=_HEAD_DIM, v_head_dim=_HEAD_DIM,
        itemsize=x.dtype.itemsize, has_bias=False, has_dropout=False,
        device_kind=jax.local_devices()[0].device_kind, dtype=dtype, bias_dtype=None,
        has_mask=False, deterministic=False,
    )  # fmt: skip

    def gradients(inputs: Inputs) -> Grads:
        strategy = STRATEGIES[call.strategy]
        state, last = strategy.forward(call, inputs)
        upstream = BackwardInputs(state.out.astype(dtype), state.lse, state.lse, state.out)
        return strategy.backward(call, inputs, upstream, last)

    def traced() -> object:
        request = Request(can.devices[0], dtype, _HEAD_DIM, _HEAD_DIM)
        answers = ask(kernel, request, config, program, local)
        return answers.forward or jax.eval_shape(gradients, Inputs(x, x, x, *[None] * 7))

    result = or_broken(kernel, traced)
    return result.reason if isinstance(result, AbsentKernel) else ""
