"""Names that the code of a class uses and reads, found in its bytecode without running it."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain, pairwise
from types import CodeType, FunctionType
from typing import Any, cast

#: Methods that do not run in a forward.
_SKIPPED = frozenset({"__init__", "_init_weights", "generate", "prepare_inputs_for_generation"})


def _cache[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Cache a function's results, with its own type: mypy takes no class for hashable."""
    return cast("Callable[P, T]", lru_cache(maxsize=4096)(function))


def forward_of(cls: type[Any]) -> FunctionType | None:
    """Return a class's function ``forward`` without decorators; ``None`` if it is no function."""
    function = _undecorated(cls.forward)
    return function if isinstance(function, FunctionType) else None


def _undecorated(function: Any) -> Any:
    """Return the function under decorators, even under those that set no ``__wrapped__``.

    Some of transformers 5.14 do not. Then it is found by its name, ``forward``, among the values
    that the wrapper encloses.
    """
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or function.__name__ == "forward":
        return function
    enclosed = inspect.getclosurevars(function).nonlocals.values()
    inner = [_undecorated(x) for x in enclosed if isinstance(x, FunctionType)]
    return next((x for x in inner if x.__name__ == "forward"), function)


def parameters_of(cls: type) -> frozenset[str]:
    """Return the names of ``forward``'s parameters, ``**`` for one that takes any keyword."""
    function = forward_of(cls)
    if function is None:
        return frozenset({"**"})
    return frozenset(
        "**" if p.kind is p.VAR_KEYWORD else p.name
        for p in inspect.signature(function).parameters.values()
    )


def by_name(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call of ``forward`` by the names of its parameters.

    Raises:
        TypeError: There are too many, or one is given twice, as Python would raise without hooks.
    """
    forward = forward_of(type(module)) or type(module).forward
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][: len(args)]
    if len(names) < len(args) or not kwargs.keys().isdisjoint(names):
        raise TypeError(
            f"forward of {type(module).__name__} was given {len(args)} arguments by position, and "
            f"{', '.join(kwargs)} by name: too many, or one twice"
        )
    return dict(zip(names, args, strict=True)) | kwargs


@_cache
def names_in(cls: type) -> frozenset[str]:
    """Return names in a class's methods and the functions they use: globals, attributes, keywords.

    Functions count if they are of the same module. Methods inherited from torch and from
    transformers' base class do not count.
    """
    return frozenset(
        name
        for function in _functions_of(cls)
        for code in _with_inner(function.__code__)
        for name in _names_used(code)
    )


@_cache
def reads_global(cls: type, class_name: str) -> bool:
    """Return True if a class's methods, or functions they use, read a global of that class."""
    return any(
        type(function.__globals__.get(name)).__name__ == class_name
        for function in _functions_of(cls)
        for code in _with_inner(function.__code__)
        for name in code.co_names
    )


@_cache
def names_in_forward(cls: type) -> frozenset[str]:
    """Return globals, attributes, keywords and local variables named in ``forward`` itself."""
    function = forward_of(cls)
    if function is None:
        return frozenset()
    return frozenset(
        name
        for code in _with_inner(function.__code__)
        for name in (*_names_used(code), *code.co_varnames)
    )


def names_and_strings(function: FunctionType) -> tuple[set[str], set[str]]:
    """Return the globals and attributes that a function's code names, and its string constants."""
    codes = [*_with_inner(function.__code__)]
    strings = {x for code in codes for x in code.co_consts if isinstance(x, str)}
    return {name for code in codes for name in code.co_names}, strings


@_cache
def functions_in_forward(cls: type) -> frozenset[str]:
    """Return the globals of its module, in it or imported, that ``forward`` reads and may call."""
    function = forward_of(cls)
    if function is None:
        return frozenset()
    read = {x.argval for x in dis.get_instructions(function) if x.opname == "LOAD_GLOBAL"}
    values = {name: function.__globals__.get(name) for name in read}
    return frozenset(name for name, x in values.items() if callable(x) and not isinstance(x, type))


@_cache
def reads_in_forward(cls: type, name: str) -> frozenset[str]:
    """Return the attributes of local variable ``name`` that ``forward`` reads."""
    function = forward_of(cls)
    if function is None:
        return frozenset()
    steps = [x for x in dis.get_instructions(function) if x.opname not in ("CACHE", "NOP")]
    return frozenset(
        str(after.argval)
        for step, after in pairwise(steps)
        if step.opname.startswith("LOAD_FAST")
        and step.argval == name
        and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
    )


def _functions_of(cls: type) -> Iterator[FunctionType]:
    """Yield the methods of a class, and the functions of the same module that they name."""
    for base in cls.__mro__:
        if base.__module__.startswith(("torch.", "transformers.modeling_", "builtins")):
            continue
        for name, value in vars(base).items():
            function = _undecorated(value) if callable(value) else value
            if isinstance(function, FunctionType) and name not in _SKIPPED:
                yield function
                yield from _functions_named_in(function)


def _functions_named_in(function: FunctionType) -> Iterator[FunctionType]:
    """Yield the functions of the same module that a function names."""
    values = (function.__globals__.get(name) for name in function.__code__.co_names)
    functions = (inspect.unwrap(x) if callable(x) else x for x in values)
    return (
        x for x in functions if isinstance(x, FunctionType) and x.__module__ == function.__module__
    )


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and the code objects of functions defined in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _with_inner(value)


def _names_used(code: CodeType) -> Iterator[str]:
    """Yield the names that a code object uses: globals, attributes and keywords of calls.

    Keywords are constants, tuples of strings; other such tuples of the code count as well.
    """
    keywords = (x for value in code.co_consts if isinstance(value, tuple) for x in value)
    return chain(code.co_names, (x for x in keywords if isinstance(x, str)))
