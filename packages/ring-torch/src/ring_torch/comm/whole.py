"""Blocks in which a rank acts alone and holds whole sequences: ``with cp.whole():``.

A block belongs to its thread. Autograd computes backwards in threads of its own and checkpoints
compute parts of a forward again there, maybe when the block has ended; what belongs to a forward in
a block has to stay in it. So each thread keeps the numbers that autograd gives its nodes at the
beginning and the end of its blocks: in a backward, the number of the node under way tells the
forward that it is of. The history is in torch's thread-local state, which autograd's threads take
over from the thread that calls ``backward``.
"""

from __future__ import annotations

import ctypes
import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
from torch._C import (  # torch has no public names for them
    _autograd,
    _current_autograd_node,
    _current_graph_task_id,
    _get_obj_in_tls,
    _is_key_in_tls,
    _stash_obj_in_tls,
)
from torch.autograd.variable import Variable
from torch.overrides import TorchFunctionMode

from ring_core import UnsupportedError

_KEY = "ring_torch.whole"
_NO_BACKWARD = -1
_LEAF = 1 << 63  # nodes that accumulate gradients are of no forward, and have numbers above it

Blocks = tuple[frozenset[int], ...]  # for each block under way, the ranks that act alone in it


class _History:
    """Blocks that a thread was in while autograd made its nodes.

    Attributes:
        current: Blocks under way in the thread.
    """

    def __init__(self) -> None:
        self.current: Blocks = ()
        self._numbers = [0]  # ascending: from this node on ...
        self._blocks: list[Blocks] = [()]  # ... the thread was in these blocks
        # Outermost backward, blocks of its node, and what lives as long as it: it may fail.
        self._backward: tuple[int, Blocks, ref[_Backward]] | None = None

    def enter(self, blocks: Blocks) -> None:
        """Go on in these blocks."""
        self.current, self._backward = blocks, None
        number = _autograd._get_sequence_nr()  # noqa: SLF001 - no public way
        if number == self._numbers[-1]:  # no node was made since the last block
            self._blocks[-1] = blocks
        elif blocks != self._blocks[-1]:
            self._numbers.append(number)
            self._blocks.append(blocks)

    def now(self) -> Blocks:
        """Return the blocks of the code that runs: in a backward, those of its forward."""
        backward: int = _current_graph_task_id()
        node = _current_autograd_node()
        if backward == _NO_BACKWARD:
            self._backward = None
        number = _LEAF if node is None else node._sequence_nr()  # noqa: SLF001 - no public way
        if backward == _NO_BACKWARD or number >= _LEAF:
            return self.current
        outermost = self._backward
        if outermost is not None and outermost[2]() is None:
            outermost = None
        # A backward within a backward is of nodes that a checkpoint has made in it.
        if outermost is not None and outermost[0] != backward:
            return outermost[1]
        blocks = self._blocks[bisect_right(self._numbers, number) - 1]
        if outermost is None:
            life = _Backward()
            Variable._execution_engine.queue_callback(life)  # noqa: SLF001 - no public way
        self._backward = backward, blocks, ref(life) if outermost is None else outermost[2]
        return blocks


class _Backward:
    """Callback that does nothing, which autograd holds for as long as a backward runs."""

    def __call__(self) -> None:
        """Do nothing at the end of the backward."""


def blocks() -> Blocks:
    """Return the global ranks that act alone, for each block that the code that runs is of."""
    if not _is_key_in_tls(_KEY):
        return ()
    history: _History = _get_obj_in_tls(_KEY)
    return history.now()


_OTHER_SIDE = (
    "a checkpoint computes a compiled function again in a backward, where the compiler takes a graph "
    "that was made on the other side of whole() than the forward. Instead: compile the function that "
    "calls the checkpoint; or call torch.compiler.reset() when you enter and leave whole(), and "
    "backward on the forward's side"
)


def check_trace() -> None:
    """Refuse a trace in a backward for a graph that others in this block would use.

    Raises:
        UnsupportedError: The forward was on the other side of a block.
    """
    if _is_key_in_tls(_KEY) and blocks() != _get_obj_in_tls(_KEY).current:
        raise UnsupportedError(_OTHER_SIDE)


def check_graph(members: tuple[int, ...], *, is_whole: bool) -> None:
    """Refuse a graph of the other side of a block, in a backward that computes a forward again.

    The compiler picks a graph by the block that ``backward`` is called in.

    Args:
        members: Global ranks that the graph is for.
        is_whole: True if it is for a rank that acts alone.

    Raises:
        UnsupportedError: The forward was on the other side.
    """
    if _current_autograd_node() is None:
        return
    if is_whole != (bool(blocks()) if is_whole else acts_alone(members)):
        raise UnsupportedError(_OTHER_SIDE)


def acts_alone(members: tuple[int, ...]) -> bool:
    """Return True if these global ranks act alone in the code that runs."""
    return any(alone.issuperset(members) for alone in blocks())


def _keep(history: _History) -> None:
    """Put a history into torch's state of this thread."""
    references = sys.getrefcount(history)
    _stash_obj_in_tls(_KEY, history)
    if sys.getrefcount(history) == references:  # torch 2.11 holds a reference that it did not count
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(history))


@contextmanager
def acting_alone(members: tuple[int, ...]) -> Iterator[None]:
    """Let global ranks act alone in a block of this thread; see :meth:`ContextParallel.whole`."""
    if torch.compiler.is_compiling() or _current_graph_task_id() != _NO_BACKWARD:
        raise UnsupportedError(
            "whole() cannot begin in a function that torch.compile compiles, nor in a backward, where "
            "checkpoints compute functions again. Instead: enter it around the call of that function"
        )
    if not _is_key_in_tls(_KEY):
        _keep(_History())
    history: _History = _get_obj_in_tls(_KEY)
    before = history.current
    history.enter((*before, frozenset(members)))
    try:
        with _mode_of(frozenset(members))():
            yield
    finally:
        history.enter(before)


class _Mode(TorchFunctionMode):
    """Mode that changes nothing: a graph that was compiled under another one is not used here."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=64)
def _mode_of(members: frozenset[int]) -> type[_Mode]:
    """Return a class of modes for these ranks: the compiler tells modes apart by their classes."""
    return type(_Mode.__name__, (_Mode,), {"members": members})
