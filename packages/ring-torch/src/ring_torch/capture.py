"""Helpers for CUDA graphs, compiled graphs and devices.

A CUDA graph reads the tensors that it has captured whenever it is replayed, so a cache must not
free them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import lru_cache, partial, wraps

import torch
from torch._C import _get_dispatch_mode, _is_tracing, _TorchDispatchModeKey
from torch._subclasses.fake_tensor import FakeTensor

#: Returns the mode in which tensors have shapes and no numbers (``FakeTensorMode``), or ``None``.
fake_mode = partial(_get_dispatch_mode, _TorchDispatchModeKey.FAKE)
#: Returns the mode in which ``make_fx`` traces, or ``None``.
proxy_mode = partial(_get_dispatch_mode, _TorchDispatchModeKey.PROXY)
#: Returns True while ``torch.jit.trace`` records operations.
is_jit_tracing = _is_tracing
#: Compute capability of the GPU that ``explain`` is asked about, which this machine need not have.
ASSUMED_CAPABILITY: ContextVar[tuple[int, int] | None] = ContextVar(
    "ring_torch.capture.assumed_capability", default=None
)
NO_CONTEXT: AbstractContextManager[None] = nullcontext()  # it may be entered any number of times


def is_traced(x: object) -> bool:
    """Return True if a call with argument ``x`` is to be one operation, into which nobody looks.

    That is while ``torch.compile`` or ``make_fx`` traces, and for tensors that have no numbers,
    inside of their mode or outside.
    """
    return (
        torch.compiler.is_compiling()
        or fake_mode() is not None
        or proxy_mode() is not None
        or isinstance(x, FakeTensor)
    )


def is_capturing() -> bool:
    """Return True while a CUDA graph is captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on this GPU, empty if it is the current one.

    The empty one is cheaper: entering torch's costs the host more than the check.
    """
    if device.type != "cuda" or ASSUMED_CAPABILITY.get() is not None:
        return NO_CONTEXT
    return NO_CONTEXT if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def as_own(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if it is a view of a larger one, so that it shares no memory."""
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


def as_stored(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its numbers, not their conjugates or negatives.

    torch keeps ``x.conj()`` and ``x.conj().imag`` as views with a bit, which their bytes lack.
    """
    return x.resolve_conj().resolve_neg()


def untraced[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Keep a function and what it calls out of the graphs of ``torch.compile``."""
    decorated: Callable[P, T] = torch.compiler.disable(function)
    return decorated


def constant_in_graphs[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Run a function while ``torch.compile`` traces, and put its result into the graph."""
    decorated: Callable[P, T] = torch.compiler.assume_constant_result(function)
    return decorated


def capture_safe_cache[**P, T](maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator like ``lru_cache`` for functions that make tensors, safe with CUDA graphs.

    A result that is used while a graph is captured is never dropped.

    Args:
        maxsize: Number of other results to keep.

    Example::

        @capture_safe_cache(maxsize=16)
        def arange_of(length: int, device: torch.device) -> Tensor:
            return torch.arange(length, device=device)
    """

    def cache_of(function: Callable[P, T]) -> Callable[P, T]:
        @lru_cache(maxsize)
        def cache(*args: P.args, **kwargs: P.kwargs) -> T:
            # Training calls may share the result, and could not save an inference tensor.
            with torch.inference_mode(mode=False):
                return function(*args, **kwargs)

        captured: dict[int, T] = {}

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            result: T = cache(*args, **kwargs)  # type: ignore[arg-type] # they are hashable
            if is_capturing():
                captured[id(result)] = result
            return result

        return call

    return cache_of
