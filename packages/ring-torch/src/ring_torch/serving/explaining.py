"""Texts that say what a call on a cache would do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ring_core.checks import check_choice
from ring_torch.recurrent.arguments import SplitsSequences, explained
from ring_torch.serving.decoding import decode
from ring_torch.serving.prefilling import prefill

_CALLS: dict[str, Callable[..., Any]] = {"decode": decode, "prefill": prefill}


def explain_serving(cp: SplitsSequences, name: str, *args: Any, **options: Any) -> str:
    """Return a text that says what ``decode`` or ``prefill`` would do with these arguments.

    It names the kernel, what travels, and the bytes that a rank sends. Nothing is sent, written or
    computed, so that one rank may ask.

    Args:
        cp: The ``ContextParallel``.
        name: ``"decode"`` or ``"prefill"``.
        *args: Its arguments.
        **options: Its options.

    Raises:
        ValueError: There is no such call, or the call itself would raise it.

    Example::

        print(cp.explain_serving("decode", q, cache, layer=0))
    """
    check_choice("name", name, tuple(_CALLS))
    return str(explained(_CALLS[name], cp, *args, **options))
