"""The context ``debug``, in which functions ask for mistakes before they run."""

from __future__ import annotations

import atexit
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ring_core.base.arguments import check_size, numbers_as_python
from ring_core.tripwire import every_of
from ring_torch import attention
from ring_torch.context import ContextParallel
from ring_torch.debugging import mistakes
from ring_torch.debugging.records import ASKING, BLOCKS, Block, is_eager
from ring_torch.training import loss

VARIABLE = "RING_DEBUG"
_NAME = "the name of a function"  # in the code that asks


class _Asked(NamedTuple):
    """A function whose calls are looked at.

    Attributes:
        function: It, by a name of its own.
        signature: Its arguments.
        look: What looks at them.
    """

    function: Callable[..., Any]
    signature: inspect.Signature
    look: Callable[[dict[str, Any]], Callable[[Any], None] | None]


_asked: dict[str, _Asked] = {}


def _functions() -> dict[str, tuple[Any, Any]]:
    """Return the functions that ask, each with what looks at its calls."""
    methods = {
        name: (vars(ContextParallel)[name], getattr(mistakes, name))
        for name in ("shard", "shift", "attention")
    }
    return methods | {
        "ring_attention": (attention.ring_attention, mistakes.ring_attention),
        "cross_entropy": (loss.cross_entropy, mistakes.loss),
        "linear_cross_entropy": (loss.linear_cross_entropy, mistakes.loss),
        "torch.cross_entropy": (torch.nn.functional.cross_entropy, mistakes.torchs_loss),
        "clip_grad_norm_": (clip_grad.clip_grad_norm_, mistakes.clip),
    }


@numbers_as_python
@contextmanager
def debug(every: int = 1) -> Iterator[None]:
    """Find the commonest mistakes within the block, at the call that makes them.

    Shards and their views remember layout and length, and the results of other operations nothing:
    what has no record is not judged. Found are ``[B, H, T, D]`` given to attention; ``seq_len`` of
    another length, or forgotten where every token sees the padding; labels in natural order, or
    in another layout; torch's mean of ``cross_entropy`` over shards of labels; what is sharded and
    differs between ranks; gradients that are clipped, or taken by an optimizer, before they are
    summed; weights that differ between ranks, which take the same gradients. For the last three
    digests of 24 bytes are exchanged. Calls in graphs of ``torch.compile`` are not looked at.

    ``RING_DEBUG`` in the environment, ``1`` or ``every:100``, does the same for the process. All
    ranks need the same.

    Args:
        every: Interval of the digests: of what is sharded, of gradients that are clipped, and of
            the steps of optimizers each ``every``-th is compared, the first one included.

    Raises:
        ValueError: By the call that is wrong, on its rank; the message names the line. Or ``every``
            is no integer from 1 on, or ``RING_DEBUG`` has an unknown value.
        RankMismatchError: What is sharded differs between ranks.

    Example::

        with ring_torch.debug():
            train(steps=3)
    """
    check_size("every", every)
    with ExitStack() as undo:
        if not BLOCKS:
            for name, (function, look) in _functions().items():
                undo.callback(_let_ask(name, inspect.unwrap(function), look))
            undo.callback(register_optimizer_step_pre_hook(mistakes.step).remove)
        BLOCKS.append(Block(every, Counter()))
        undo.callback(BLOCKS.pop)
        yield


def _let_ask(name: str, function: Any, look: Any) -> Callable[[], None]:
    """Exchange a function's code, by whatever names it is known; returns what undoes it."""
    kept = function.__code__, function.__defaults__, function.__kwdefaults__
    original = FunctionType(kept[0], function.__globals__, function.__name__, kept[1])
    original.__kwdefaults__ = kept[2]
    _asked[name] = _Asked(original, inspect.signature(original), look)
    code = _asking.__code__
    constants = tuple(name if x == _NAME else x for x in code.co_consts)
    function.__code__ = code.replace(
        co_consts=constants, co_filename=ASKING, co_name=function.__name__
    )
    function.__defaults__ = function.__kwdefaults__ = None

    def undo() -> None:
        function.__code__, function.__defaults__, function.__kwdefaults__ = kept

    return undo


def _asking(*args: Any, **kwargs: Any) -> Any:
    """Ask; its code, which can have no closure, becomes that of a function, with its name."""
    from ring_torch.debugging.debug import call

    return call("the name of a function", args, kwargs)


def call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Look at a call, make it, and look at its result."""
    asked = _asked[name]
    if not is_eager():
        return asked.function(*args, **kwargs)
    try:
        bound = asked.signature.bind(*args, **kwargs)
    except TypeError:
        return asked.function(*args, **kwargs)  # which says what is wrong
    bound.apply_defaults()
    after = asked.look(bound.arguments)
    result = asked.function(*bound.args, **bound.kwargs)
    if after is not None:
        after(result)
    return result


def begin() -> None:
    """Begin a block that never ends if the environment asks for it.

    Raises:
        ValueError: ``RING_DEBUG`` has an unknown value.
    """
    if every := every_of(os.environ.get(VARIABLE), VARIABLE):
        block = debug(every)
        block.__enter__()
        atexit.register(block.__exit__, None, None, None)  # a block that nobody holds ends at once


begin()
