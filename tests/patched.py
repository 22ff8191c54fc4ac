"""Kernels whose methods are replaced: calls make launches of these when they are prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from ring_torch import prepare
from ring_torch.kernels.api import Kernel, Selection
from ring_torch.prepare import _prepare


@contextmanager
def replaced(*kernels: type, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replace methods of kernels in all calls that are made while this context lasts."""
    # Calls that were prepared before have launches of the methods as they were; those that are
    # prepared meanwhile must not be found later.
    _prepare.cache_clear()
    try:
        with ExitStack() as stack:
            for kernel in kernels:
                for name, method in methods.items():
                    stack.enter_context(patch.object(kernel, name, method))
            yield
    finally:
        _prepare.cache_clear()


@contextmanager
def chosen(kernel: Kernel, *others: Any) -> Iterator[None]:
    """Let calls take a kernel, and begin and end with no call prepared, under other patches."""
    with replaced(), ExitStack() as stack:
        stack.enter_context(patch.object(prepare, "choose", lambda *_: Selection(kernel, ())))
        for other in others:
            stack.enter_context(other)
        yield
