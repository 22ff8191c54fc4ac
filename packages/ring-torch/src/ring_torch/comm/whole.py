"""Blocks in which a rank acts alone and holds whole sequences: ``with cp.whole():``.

A block belongs to its thread. Autograd computes backwards in threads of its own and checkpoints
compute parts of a forward again there, maybe when the block has ended; what belongs to a forward in
a block has to stay in it. So each thread keeps the numbers that autograd gives its nodes at the
beginning and the end of its blocks: in a backward, the number of the node under way tells the
forward that it is of. The history is in torch's thread-local state, which autograd's threads take
over from the thread that calls ``backward``. Another thread, and a graph of a backward, have no
such numbers: what checkpoints leave in autograd takes its blocks along.
"""

from __future__ import annotations

import inspect
import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast
from weakref import WeakValueDictionary, ref

import torch
from torch._C import (  # torch has no public names for them
    _autograd,
    _current_autograd_node,
    _current_graph_task_id,
    _get_obj_in_tls,
    _is_key_in_tls,
    _stash_obj_in_tls,
)
from torch.autograd.function import BackwardCFunction
from torch.autograd.variable import Variable
from torch.overrides import TorchFunctionMode

from ring_core import UnsupportedError
from ring_torch.capture import untraced

_KEY = "ring_torch.whole"
_NOTED = "_ring_blocks"  # attribute of a node that takes blocks along
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
        self._backward = backward, blocks, _until_end() if outermost is None else outermost[2]
        return blocks


class _Backward:
    """A callback that does nothing, which autograd holds for as long as a backward runs."""

    def __call__(self) -> None:
        """Do nothing at the end of the backward."""


def _until_end() -> ref[_Backward]:
    """Return a reference to what lives as long as the backward under way, which may fail."""
    life = _Backward()
    Variable._execution_engine.queue_callback(life)  # noqa: SLF001 - no public way
    return ref(life)


_OWN = threading.local()  # holds the history of each thread
#: Histories by a number that torch's state of the thread holds: an integer that Python never frees,
#: as torch 2.11 does not count its reference.
_HISTORIES: WeakValueDictionary[int, _History] = WeakValueDictionary()
_SLOTS = 256


def blocks() -> Blocks:
    """Return the global ranks that act alone, for each block that the code that runs is of."""
    taken: Any = getattr(_OWN, "taken", None)
    if taken is not None and (taken[1] is None or taken[1]() is not None):
        return cast("Blocks", taken[0])
    if not _is_key_in_tls(_KEY):
        return ()
    return _HISTORIES[_get_obj_in_tls(_KEY)].now()


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
    current = _HISTORIES[_get_obj_in_tls(_KEY)].current if _is_key_in_tls(_KEY) else ()
    if blocks() != current:
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
    current = blocks()
    if current and _current_graph_task_id() == _NO_BACKWARD:
        _take_along(current)
    return any(alone.issuperset(members) for alone in current)


def _take_along(current: Blocks) -> None:
    """Let what may compute this code again in a backward do it in these blocks, in any thread."""
    hooks: Any = _autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001 - no public way
    taken = hooks[1] if hooks and isinstance(hooks[1], _Unpack) else _Unpack(hooks and hooks[1], ())
    if hooks and taken.blocks != current:
        unpack = _Unpack(taken.function, current) if current else taken.function
        _autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001
        _autograd._push_saved_tensors_default_hooks(hooks[0], unpack)  # noqa: SLF001
    frame = inspect.currentframe() if current else None
    while frame is not None:
        name = (*frame.f_code.co_varnames, "")[0]
        node: Any = frame.f_locals.get(name) if "forward" in frame.f_code.co_name else None
        if isinstance(node, BackwardCFunction) and not hasattr(node, _NOTED):
            setattr(node, _NOTED, True)
            node.register_prehook(lambda _: _enter(current, in_backward=True))
            node.register_hook(lambda *_: _leave())
        frame = frame.f_back


@untraced
def _enter(blocks: Blocks, *, in_backward: bool) -> None:
    """Go on in the blocks of a forward, of which a part is computed again in this thread."""
    _OWN.taken = blocks, _until_end() if in_backward else None, getattr(_OWN, "taken", None)


@untraced
def _leave() -> None:
    """Go back to the blocks before."""
    _OWN.taken = _OWN.taken[-1]


class _Unpack:
    """A function that unpacks a saved tensor, and maybe computes it again, in its own blocks."""

    def __init__(self, function: Any, blocks: Blocks) -> None:
        self.function, self.blocks = function, blocks

    @untraced
    def __call__(self, packed: Any) -> Any:
        _enter(self.blocks, in_backward=False)
        try:
            return self.function(packed)
        finally:
            _leave()


def _own_history() -> _History:
    """Return the history of this thread, made at its first block."""
    if (history := getattr(_OWN, "history", None)) is None:
        _OWN.history = history = _History()
        slot = next(
            (n for n in range(_SLOTS) if _HISTORIES.setdefault(n, history) is history), None
        )
        if slot is None:
            raise UnsupportedError(
                f"whole() in more than {_SLOTS} threads at once: use it in fewer, or end some"
            )
        _stash_obj_in_tls(_KEY, slot)
    return cast("_History", history)


@contextmanager
def acting_alone(members: tuple[int, ...]) -> Iterator[None]:
    """Let global ranks act alone in a block of this thread; see :meth:`ContextParallel.whole`."""
    if torch.compiler.is_compiling() or _current_graph_task_id() != _NO_BACKWARD:
        raise UnsupportedError(
            "whole() cannot begin in a function that torch.compile compiles, nor in a backward, where "
            "checkpoints compute functions again. Instead: enter it around the call of that function"
        )
    history = _own_history()
    before = history.current
    history.enter((*before, frozenset(members)))
    try:
        with _mode_of(frozenset(members))():
            yield
    finally:
        history.enter(before)
        _take_along(before)  # hooks may go on behind the block


class _Mode(TorchFunctionMode):
    """Mode that changes nothing: a graph that was compiled under another one is not used here."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=64)
def _mode_of(members: frozenset[int]) -> type[_Mode]:
    """Return a class of modes for these ranks: the compiler tells modes apart by their classes."""
    return type(_Mode.__name__, (_Mode,), {"members": members})
