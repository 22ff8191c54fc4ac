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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_torch.kernels.fa4.private import (
    PLAIN,
    RECORDING,
    BackwardCalls,
    ForwardCall,
    Function,
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
from ring_torch.options import Window

_MOST_LAUNCHES = 256


class _Forward(NamedTuple):
    """A compiled forward, with the arguments that a call does not say."""

    launch: Function
    window: Window  # in the form that ``launch`` takes

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, options: LaunchOptions,
        modded: Modded,
    ) -> None:  # fmt: skip
        """Launch the forward: write ``out``, and ``lse`` if it is given."""
        self.launch(*forward_arguments(q, k, v, out, lse, options, modded, self.window))


class _Backward(NamedTuple):
    """Compiled functions of a backward, and shapes of the buffers between them."""

    prepare: Function
    main: Function
    round_dq: Function
    round_dkv: tuple[Function, Function] | None  # with grouped heads, whose dK/dV are summed first
    window: Window  # in the form that ``main`` takes
    rows: tuple[int, ...]  # shape of delta, and of lse to base 2
    dq_sums: tuple[int, ...]
    dkv_sums: tuple[tuple[int, ...], tuple[int, ...]] | None
    semaphores: tuple[tuple[int, ...] | None, ...]  # of dQ, dK and dV, if deterministic

    def __call__(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: LaunchOptions, modded: Modded, dst: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return ``(dq, dk, dv)``."""
        dq = torch.empty_like(q) if dst is None else dst
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        floats: Any = {"dtype": torch.float32, "device": q.device}
        delta, lse_log2 = torch.empty((2, *self.rows), **floats).unbind()
        dq_sums = torch.empty(self.dq_sums, **floats)
        # Where each query head has its own K/V head, the main kernel rounds dK and dV itself.
        sums = (dk, dv) if self.dkv_sums is None else _zero_sums(q, *self.dkv_sums)
        semaphores = [
            None if shape is None else torch.zeros(shape, dtype=torch.int32, device=q.device)
            for shape in self.semaphores
        ]
        # Writes delta, lse to base 2, and zeros into the sums of dQ.
        self.prepare(
            *prepare_arguments(out, dout, delta, lse, lse_log2, dq_sums, options.documents)
        )
        self.main(
            *main_arguments(
                q, k, v, dout, (lse_log2, delta, dq_sums, *sums), options, modded, self.window,
                semaphores,
            )
        )  # fmt: skip
        self._round(options, (dq_sums, *sums), (dq, dk, dv))
        return dq, dk, dv

    def _round(
        self, options: LaunchOptions, sums: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> None:
        """Round the sums of dQ, and those of dK/dV if there are any, into gradients."""
        cu_q, cu_k = offsets(options.documents)
        self.round_dq(*round_arguments(sums[0], grads[0], options.scale, cu_q))
        if self.round_dkv is not None:
            round_dk, round_dv = self.round_dkv
            round_dk(*round_arguments(sums[1], grads[1], options.scale, cu_k))
            round_dv(*round_arguments(sums[2], grads[2], 1.0, cu_k))


class CompiledFlash4:
    """Forward and backward of the library, by compiled functions where a call was made before."""

    def __init__(self) -> None:
        self._forwards: dict[object, _Forward | None] = {}
        self._backwards: dict[object, _Backward | None] = {}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, options: LaunchOptions,
        modded: Modded,
    ) -> None:  # fmt: skip
        """Write ``out``, and ``lse`` if it is given."""
        is_recorded = _can_record(q, k, v, out, modded.sinks)
        key = _forward_key(q, k, v, out, lse, options, modded) if is_recorded else None
        launch = self._forwards.get(key)
        if launch is not None:
            launch(q, k, v, out, lse, options, modded)
        # `None` is kept of a call that cannot be repeated directly: it is not recorded again.
        elif key is None or key in self._forwards:
            library_forward(q, k, v, out, lse, options, modded)
        else:
            call = recorded_forward(q, k, v, out, lse, options, modded)
            compiled = _forward_of(call, q, k, v, out, lse, options, modded)
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
        return repeated_forward(compiled.launch, q, k, v, out, lse, options, compiled.window)

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
        if compiled is None:
            return None

        return partial(_repeat, compiled, options)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: LaunchOptions, modded: Modded, dst: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return ``(dq, dk, dv)``; ``dq`` is ``dst`` if it is given."""
        arguments = dout, q, k, v, out, lse, options, modded, dst
        is_recorded = _can_record(dout, q, k, v, out, lse, dst)
        key = _backward_key(*arguments) if is_recorded else None
        launch = self._backwards.get(key)
        if launch is not None:
            return launch(*arguments)
        if key is None or key in self._backwards:
            return library_backward(*arguments)
        grads, calls = recorded_backward(*arguments)
        _remember(self._backwards, key, _backward_of(calls, grads, *arguments[:-1]))
        return grads


def _repeat(
    compiled: _Backward, options: LaunchOptions, dout: Tensor, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, dq: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return compiled(dout, q, k, v, out, lse, options, PLAIN, dq)


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


def _forward_of(
    call: ForwardCall | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None,
    options: LaunchOptions, modded: Modded,
) -> _Forward | None:  # fmt: skip
    """Return the compiled function that a forward called, to be called directly from now on.

    It is ``None`` if the library called it with other arguments than those expected here.
    """
    if call is None:
        return None
    # Built as later calls will build it: if that is what the library has passed, it may be left
    # out.
    expected = forward_arguments(q, k, v, out, lse, options, modded, call.window, call.aux)
    return _Forward(call.function, call.window) if _alike(call.arguments, expected) else None


def _backward_of(
    calls: BackwardCalls | None, grads: tuple[Tensor, Tensor, Tensor], dout: Tensor, q: Tensor,
    k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: LaunchOptions, modded: Modded,
) -> _Backward | None:  # fmt: skip
    """Return the compiled functions that a backward called, to be called directly from now on.

    It is ``None`` if the library called them with other arguments than those expected here.
    """
    if calls is None:
        return None
    prepare, main, round_dq, round_dk, round_dv = calls
    dq, dk, dv = grads
    cu_q, cu_k = offsets(options.documents)
    buffers = main.lse_log2, main.delta, main.dq_sums
    rounds = [(round_dq.arguments, round_arguments(main.dq_sums, dq, options.scale, cu_q))]
    sums, round_dkv = (dk, dv), None
    if round_dk is not None and round_dv is not None:
        sums, round_dkv = (main.dk_sums, main.dv_sums), (round_dk.function, round_dv.function)
        rounds += [
            (round_dk.arguments, round_arguments(main.dk_sums, dk, options.scale, cu_k)),
            (round_dv.arguments, round_arguments(main.dv_sums, dv, 1.0, cu_k)),
        ]
    expected_prepare = prepare_arguments(
        out, dout, main.delta, lse, main.lse_log2, main.dq_sums, options.documents
    )
    expected_main = main_arguments(
        q, k, v, dout, (*buffers, *sums), options, modded, main.window, main.semaphores, main.aux
    )
    as_expected = (
        _alike(prepare.arguments, expected_prepare)
        and _alike(main.arguments, expected_main)
        and all(_alike(actual, expected) for actual, expected in rounds)
    )
    if not as_expected:
        return None
    return _Backward(
        prepare.function, main.function, round_dq.function, round_dkv, main.window,
        tuple(main.delta.shape), tuple(main.dq_sums.shape),
        None if round_dkv is None else (tuple(main.dk_sums.shape), tuple(main.dv_sums.shape)),
        tuple(None if x is None else tuple(x.shape) for x in main.semaphores),
    )  # fmt: skip


def _alike(actual: Any, expected: Any) -> bool:
    """Return True if two arguments are the same memory, or the same numbers."""
    if actual is expected:
        return True
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        return (
            actual.data_ptr() == expected.data_ptr()
            and actual.dtype == expected.dtype
            and actual.shape == expected.shape
            and actual.stride() == expected.stride()
        )
    if isinstance(actual, tuple) and isinstance(expected, tuple):
        return len(actual) == len(expected) and all(map(_alike, actual, expected))
    return type(actual) is type(expected) and bool(actual == expected)


def _remember[T](functions: dict[object, T], key: object, function: T) -> None:
    """Keep compiled functions, or ``None``, under a key; drop the oldest if there are too many."""
    with RECORDING:
        while len(functions) >= _MOST_LAUNCHES:
            del functions[next(iter(functions))]
        functions[key] = function


def _zero_sums(q: Tensor, k: tuple[int, ...], v: tuple[int, ...]) -> Sequence[Tensor]:
    """Return the sums of dK and dV; of equal shapes they are one tensor, filled by one kernel."""
    if k == v:
        return torch.zeros((2, *k), dtype=torch.float32, device=q.device).unbind()
    return [torch.zeros(x, dtype=torch.float32, device=q.device) for x in (k, v)]
