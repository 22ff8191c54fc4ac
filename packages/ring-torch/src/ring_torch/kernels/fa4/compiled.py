"""Repeat launches of flash-attn-4 by the compiled functions that an earlier call has used.

A forward through the library takes the host 0.09 ms, in which the library works out which of its
compiled functions to call, and with which arguments. On Hopper that is remembered, and later calls
that are alike call the compiled functions directly. Calls are alike if their tensors have the same
dtypes, devices, shapes and strides, begin at multiples of 16 bytes, and have the same options; the
library's own keys distinguish less. Streams are read at each launch. Functions, shapes and numbers
are remembered, but no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ring_torch.kernels.fa4.private import (
    PLAIN,
    RECORDING,
    CompiledBackward,
    CompiledForward,
    Modded,
    forward_arguments,
    library_backward,
    library_forward,
    main_arguments,
    offsets,
    prepare_arguments,
    recorded_backward,
    recorded_forward,
    repeated_forward,
    round_arguments,
)
from ring_torch.kernels.library import (
    BackwardLaunch,
    Documents,
    ForwardLaunch,
    LaunchOptions,
    capability,
)

_MOST_LAUNCHES = 256


def _launched_backward(
    compiled: CompiledBackward, options: LaunchOptions, modded: Modded, dout: Tensor, q: Tensor,
    k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dst: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the functions of a backward, and return ``(dq, dk, dv)``."""
    dq = torch.empty_like(q) if dst is None else dst
    grads = dq, torch.empty_like(k), torch.empty_like(v)
    floats: Any = {"dtype": torch.float32, "device": q.device}
    delta, lse_log2 = torch.empty((2, *compiled.rows), **floats).unbind()
    sums: Sequence[Tensor] = grads[1:]
    if compiled.dkv_sums is not None:
        # Sums of equal shapes are one tensor, filled by one kernel.
        k_sums, v_sums = compiled.dkv_sums
        sums = (
            [torch.zeros(x, **floats) for x in compiled.dkv_sums]
            if k_sums != v_sums
            else (torch.zeros((2, *k_sums), **floats).unbind())
        )
    sums = torch.empty(compiled.dq_sums, **floats), *sums
    semaphores = [
        None if shape is None else torch.zeros(shape, dtype=torch.int32, device=q.device)
        for shape in compiled.semaphores
    ]
    cu_q, cu_k = offsets(options.documents)
    compiled.prepare(
        *prepare_arguments(out, dout, delta, lse, lse_log2, sums[0], options.documents)
    )
    compiled.main(
        *main_arguments(
            q, k, v, dout, (lse_log2, delta, *sums), options, modded, compiled.window, semaphores
        )
    )  # fmt: skip
    compiled.round_dq(*round_arguments(sums[0], dq, options.scale, cu_q))
    if compiled.round_dkv is not None:
        round_dk, round_dv = compiled.round_dkv
        round_dk(*round_arguments(sums[1], grads[1], options.scale, cu_k))
        round_dv(*round_arguments(sums[2], grads[2], 1.0, cu_k))
    return grads


class CompiledFlash4:
    """Forward and backward of the library, by compiled functions where a call was made before."""

    def __init__(self) -> None:
        self._forwards: dict[object, CompiledForward | None] = {}
        self._backwards: dict[object, CompiledBackward | None] = {}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, options: LaunchOptions,
        modded: Modded,
    ) -> None:  # fmt: skip
        """Write ``out``, and ``lse`` if it is given."""
        is_recorded = _can_record(q, k, v, out, modded.sinks)
        key = _forward_key(q, k, v, out, lse, options, modded) if is_recorded else None
        compiled = self._forwards.get(key)
        if compiled is not None:
            compiled.function(
                *forward_arguments(q, k, v, out, lse, options, modded, compiled.window)
            )
        # `None` is kept of a call that cannot be repeated directly: it is not recorded again.
        elif key is None or key in self._forwards:
            library_forward(q, k, v, out, lse, options, modded)
        else:
            compiled = recorded_forward(q, k, v, out, lse, options, modded)
            _remember(self._forwards, key, compiled)

    def repeated_forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, options: LaunchOptions,
        modded: Modded,
    ) -> ForwardLaunch | None:  # fmt: skip
        """Return a launch for calls with tensors like these, of which one was made before.

        It is ``None`` if there was none, and for calls with documents, lists or functions.
        """
        is_plain = options.documents is None and modded._replace(sinks=None) == PLAIN
        if not is_plain or not _can_record(q, k, v, out, modded.sinks):
            return None
        compiled = self._forwards.get(_forward_key(q, k, v, out, lse, options, modded))
        if compiled is None:
            return None
        return repeated_forward(compiled.function, q, k, v, out, lse, options, compiled.window)

    def repeated_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: LaunchOptions, dst: Tensor,
    ) -> BackwardLaunch | None:  # fmt: skip
        """Return a launch for calls with tensors like these, of which one was made before.

        It is ``None`` if there was none, and for calls with documents.
        """
        if options.documents is not None or not _can_record(dout, q, k, v, out, lse, dst):
            return None
        key = _backward_key(dout, q, k, v, out, lse, options, PLAIN, dst)
        compiled = self._backwards.get(key)
        return None if compiled is None else partial(_launched_backward, compiled, options, PLAIN)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: LaunchOptions, modded: Modded, dst: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return ``(dq, dk, dv)``; ``dq`` is ``dst`` if it is given."""
        arguments = dout, q, k, v, out, lse, options, modded, dst
        is_recorded = _can_record(dout, q, k, v, out, lse, dst)
        key = _backward_key(*arguments) if is_recorded else None
        compiled = self._backwards.get(key)
        if compiled is not None:
            return _launched_backward(compiled, options, modded, dout, q, k, v, out, lse, dst)
        if key is None or key in self._backwards:
            return library_backward(*arguments)
        grads, compiled = recorded_backward(*arguments)
        _remember(self._backwards, key, compiled)
        return grads


def _forward_key(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, options: LaunchOptions, modded: Modded
) -> object:  # fmt: skip
    """Return a key of a forward: calls with equal keys have the same compiled function."""
    return (
        q.dtype, q.device, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        out.stride(), None if lse is None else lse.stride(), options.scale, options.window,
        _documents_key(options.documents), modded.key,
    )  # fmt: skip


def _backward_key(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: LaunchOptions,
    modded: Modded, dst: Tensor | None,
) -> object:  # fmt: skip
    """Return a key of a backward: calls with equal keys have the same compiled functions."""
    return (
        q.dtype, q.device, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        dout.stride(), out.stride(), lse.stride(), None if dst is None else dst.stride(),
        options.scale, options.window, options.deterministic,
        _documents_key(options.documents), modded.key,
    )  # fmt: skip


def _can_record(*tensors: Tensor | None) -> bool:
    """Return True on Hopper, if all tensors begin at multiples of 16 bytes."""
    pointers = 0
    for x in tensors:
        if x is not None:
            pointers |= x.data_ptr()
    first = tensors[0]
    return pointers % 16 == 0 and first is not None and capability(first.device.index)[0] == 9


def _documents_key(documents: Documents | None) -> object:
    """Return a key of documents: their number and largest lengths."""
    return None if documents is None else (len(documents.cu_q), documents.max_q, documents.max_k)


def _remember[T](functions: dict[object, T], key: object, function: T) -> None:
    """Keep compiled functions, or ``None``, under a key; drop the oldest if there are too many."""
    with RECORDING:
        while len(functions) >= _MOST_LAUNCHES:
            del functions[next(iter(functions))]
        functions[key] = function
