"""What the code of a class names and reads, found without running it."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FunctionType

from torch import nn

_SKIPPED = frozenset({"__init__", "_init_weights", "generate", "prepare_inputs_for_generation"})


def forward_of(cls: type[nn.Module]) -> FunctionType | None:
    """The function under the decorators of ``forward``."""
    function = inspect.unwrap(cls.forward)
    return function if isinstance(function, FunctionType) else None


def parameters_of(cls: type[nn.Module]) -> frozenset[str]:
    """Names that ``forward`` takes; ``**`` where it takes any."""
    parameters = inspect.signature(cls.forward).parameters.values()
    return frozenset("**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters)


@lru_cache(maxsize=4096)
def names_in(cls: type[nn.Module]) -> frozenset[str]:
    """Globals, attributes and keywords that the methods of a class use, those of torch left out."""
    return frozenset(name for code in _codes_of(cls) for name in _names(code))


@lru_cache(maxsize=4096)
def names_in_forward(cls: type[nn.Module]) -> frozenset[str]:
    """The same, and local variables, of ``forward`` alone."""
    function = forward_of(cls)
    if function is None:
        return frozenset()
    codes = list(_with_inner(function.__code__))
    return frozenset(name for code in codes for name in (*_names(code), *code.co_varnames))


@lru_cache(maxsize=4096)
def reads_in_forward(cls: type[nn.Module], variable: str) -> frozenset[str]:
    """Attributes of a local variable that ``forward`` reads."""
    function = forward_of(cls)
    if function is None:
        return frozenset()
    steps = [x for x in dis.get_instructions(function) if x.opname not in ("CACHE", "NOP")]
    return frozenset(
        str(after.argval)
        for step, after in pairwise(steps)
        if step.opname.startswith("LOAD_FAST")
        and step.argval == variable
        and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
    )


def _codes_of(cls: type) -> Iterator[CodeType]:
    for base in cls.__mro__:
        if base.__module__.startswith(("torch.", "transformers.modeling_", "builtins")):
            continue
        for name, value in vars(base).items():
            function = inspect.unwrap(value) if callable(value) else value
            if isinstance(function, FunctionType) and name not in _SKIPPED:
                yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _with_inner(value)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for value in code.co_consts:  # keywords of calls
        if isinstance(value, tuple):
            yield from (x for x in value if isinstance(x, str))
