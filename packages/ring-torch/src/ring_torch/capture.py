"""Tensors that calls share: cached, and kept for CUDA graphs, which read them whenever replayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, wraps

import torch


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launch on this GPU; entering that takes the host longer than asking whether it is needed."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()


def as_own(x: torch.Tensor) -> torch.Tensor:
    """A tensor that shares no memory."""
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


def capture_safe_cache[**P, T](maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """``lru_cache`` for functions that make tensors: one that a graph has captured is not dropped.

    Args:
        maxsize: How many results are kept that no graph has captured.
    """

    def cache_of(function: Callable[P, T]) -> Callable[P, T]:
        @lru_cache(maxsize)
        def cache(*args: P.args, **kwargs: P.kwargs) -> T:
            with torch.inference_mode(mode=False):  # calls that train share them
                return function(*args, **kwargs)

        kept: dict[int, T] = {}

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            result: T = cache(*args, **kwargs)  # type: ignore[arg-type] # they are hashable
            if is_capturing():
                kept[id(result)] = result
            return result

        return call

    return cache_of
