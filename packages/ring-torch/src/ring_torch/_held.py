"""Tensors that calls share: cached, and kept for CUDA graphs, which read them whenever replayed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps

import torch


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def cached_tensors[**P, T](maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """``lru_cache`` for functions that make tensors: one that a graph has captured is not dropped.

    Args:
        maxsize: How many results are kept that no graph has captured.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        cached = lru_cache(maxsize)(function)
        captured: dict[int, T] = {}

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            result: T = cached(*args, **kwargs)  # type: ignore[arg-type] # they are hashable
            if is_capturing():
                captured[id(result)] = result
            return result

        return call

    return decorate
