"""Python's frames between a call of attention and the module that makes it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch.utils.checkpoint
from torch import nn
from torch.autograd.function import BackwardCFunction, Function

#: Name of the function that takes the place of a module's forward.
FORWARD_NAME = "forward_on_ring"
_CHECKPOINT_FILE = inspect.getfile(torch.utils.checkpoint)


@dataclass(eq=False)
class Caller:
    """Origin of a call.

    Attributes:
        module: The innermost module whose forward is under way, of those with a replaced one.
        is_checkpointed: True if a checkpoint of torch has been entered inside it.
        nodes: Nodes of the functions with an own backward that have been entered inside it.
        has_setup_context: True if one of those keeps its node to itself.
    """

    module: Any = None
    is_checkpointed: bool = False
    nodes: list[Any] = field(default_factory=list)
    has_setup_context: bool = False

    @property
    def may_repeat(self) -> bool:
        """True if the call may be made again in a backward, outside of every module's forward."""
        return self.is_checkpointed or self.has_setup_context or bool(self.nodes)


def caller() -> Caller:
    """Return the origin of the call that is under way."""
    made_by, frame = Caller(), inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if FORWARD_NAME in code.co_name:  # or the rest of it, behind a break of a graph
            made_by.module = frame.f_locals.get("self")
            break
        made_by.is_checkpointed |= code.co_filename == _CHECKPOINT_FILE
        if "forward" in code.co_name and code.co_varnames:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, BackwardCFunction):
                made_by.nodes.append(first)
            elif not isinstance(first, nn.Module):
                made_by.has_setup_context |= any(_is_of(code, x.forward) for x in _functions())
        frame = frame.f_back
    return made_by


def _is_of(code: CodeType, forward: Any) -> bool:
    """Return True if code is a function's, or what the compiler has made of a part of it."""
    own: CodeType = forward.__code__
    if own is code or own.co_filename != code.co_filename:
        return own is code
    lines = [line for *_, line in own.co_lines() if line is not None]
    return own.co_firstlineno <= code.co_firstlineno <= max(lines, default=0)


def _functions() -> list[Any]:
    """Return all classes of functions with an own backward whose forward is not given its node."""
    classes: list[Any] = [Function]
    for known in classes:
        classes += known.__subclasses__()
    return [x for x in classes if x.setup_context is not Function.setup_context]
