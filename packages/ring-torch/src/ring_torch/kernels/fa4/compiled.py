"""Repeat launches of flash-attn-4 by the compiled functions that an earlier call has used.

A forward through ``_flash_attn_fwd`` takes the host 0.09 ms, in which the library works out which
of its compiled functions to call, and with which arguments. On Hopper that is remembered, and later
calls that are alike call the compiled functions directly. Calls are alike if their tensors have the
same dtypes, devices, shapes and strides, begin at multiples of 16 bytes, and have the same options;
the library's own keys distinguish less. Streams are read at each launch. Functions, shapes and
numbers are remembered, but no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_torch.kernels.fa4.private import (
    PLAIN,
    RECORDING,
    Calls,
    Function,
    MainArguments,
    Modded,
    around_sinks,
    calls_of,
    forward_arguments,
    interface,
    library_backward,
    library_forward,
    main_arguments,
    offsets,
    prepare_arguments,
    recorded_window_and_aux,
    round_arguments,
)
from ring_torch.kernels.library import (
    Documents,
    ForwardLaunch,
    ItemBackward,
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
        aux = None, modded.numbers
        self.launch(*forward_arguments(q, k, v, out, lse, options, modded, self.window, aux))


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
                semaphores, (None, modded.numbers),
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
            with calls_of(interface()._flash_attn_fwd) as (calls,):
                library_forward(q, k, v, out, lse, options, modded)
            compiled = _forward_of(calls, q, k, v, out, lse, options, modded)
            _remember(self._forwards, key, compiled)

    def prepared_forward(
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
        launch, has_lse = compiled.launch, lse is not None
        before_sinks, after_sinks = around_sinks(
            forward_arguments(q, k, v, out, lse, options, PLAIN, compiled.window, (None, None))
        )

        def run(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None
        ) -> None:
            launch(
                q.detach() if q.requires_grad else q, k, v, out, lse if has_lse else None, *before_sinks,
                sinks, *after_sinks,
            )  # fmt: skip

        return run

    def prepared_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: LaunchOptions, dst: Tensor,
    ) -> ItemBackward | None:  # fmt: skip
        """Return a launch for calls with tensors like these, of which one was made before.

        It is ``None`` if there was none, and for calls with documents.
        """
        if options.documents is not None or not _can_record(dout, q, k, v, out, lse, dst):
            return None
        key = _backward_key(dout, q, k, v, out, lse, options, PLAIN, dst)
        compiled = self._backwards.get(key)
        if compiled is None:
            return None

        def run(
            q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dq: Tensor
        ) -> tuple[Tensor, Tensor]:
            _, dk, dv = compiled(dout, q, k, v, out, lse, options, PLAIN, dq)
            return dk, dv

        return run

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
        module = interface()
        with calls_of(
            module._bwd_preprocess, module._flash_attn_bwd, module._bwd_postprocess_convert
        ) as calls:
            grads = library_backward(*arguments)
        _remember(self._backwards, key, _backward_of(calls, grads, *arguments[:-1]))
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


def _forward_of(
    calls: Calls, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None,
    options: LaunchOptions, modded: Modded,
) -> _Forward | None:  # fmt: skip
    """Return the compiled function that a forward called, to be called directly from now on.

    It is ``None`` if the library called it with other arguments than those expected here.
    """
    if len(calls) != 1:
        return None
    launch, arguments = calls[0]
    window, aux = recorded_window_and_aux(arguments)
    # Built as later calls will build it: if that is what the library has passed, it may be left
    # out.
    expected = forward_arguments(q, k, v, out, lse, options, modded, window, aux)
    return _Forward(launch, window) if _alike(arguments, expected) else None


def _backward_of(
    calls: Sequence[Calls], grads: tuple[Tensor, Tensor, Tensor], dout: Tensor, q: Tensor,
    k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: LaunchOptions, modded: Modded,
) -> _Backward | None:  # fmt: skip
    """Return the compiled functions that a backward called, to be called directly from now on.

    It is ``None`` if the library called them with other arguments than those expected here.
    """
    prepare_calls, main_calls, round_calls = calls
    if len(prepare_calls) != 1 or len(main_calls) != 1 or len(round_calls) not in (1, 3):
        return None
    (prepare, actual_prepare), (main, actual_main) = prepare_calls[0], main_calls[0]
    if (recorded := MainArguments.of(actual_main)) is None:
        return None
    (round_dq, _), *round_others = round_calls
    lse_log2, delta, dq_sums, *sums = recorded.buffers
    round_dkv = (round_others[0][0], round_others[1][0]) if round_others else None
    compiled = _Backward(
        prepare, main, round_dq, round_dkv, recorded.window, tuple(delta.shape), tuple(dq_sums.shape),
        (tuple(sums[0].shape), tuple(sums[1].shape)) if round_others else None,
        tuple(None if x is None else tuple(x.shape) for x in recorded.semaphores),
    )  # fmt: skip
    documents = options.documents
    cu_q, cu_k = offsets(documents)
    expected_rounds = [round_arguments(dq_sums, grads[0], options.scale, cu_q)]
    if round_others:
        expected_rounds += [
            round_arguments(x, grad, scale, cu_k)
            for x, grad, scale in zip(sums, grads[1:], (options.scale, 1.0), strict=True)
        ]
    buffers = lse_log2, delta, dq_sums, *(sums if round_others else grads[1:])
    expected = main_arguments(
        q, k, v, dout, buffers, options, modded, recorded.window, recorded.semaphores, recorded.aux
    )
    as_expected = (
        _alike(
            actual_prepare,
            prepare_arguments(out, dout, delta, lse, lse_log2, dq_sums, documents),
        )
        and _alike(actual_main, expected)
        and all(
            _alike(actual, wanted)
            for (_, actual), wanted in zip(round_calls, expected_rounds, strict=True)
        )
    )
    return compiled if as_expected else None


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
