"""The contents of a predicate: all that its result depends on, as a key that can be compared.

Plans and programs are kept by their masks, and a function is the same object after a number that
it reads has changed. So a predicate is known by its code and by the values that the code names:
cells of enclosing functions, defaults, the object of a method, globals, and so on through the
functions that it calls. What cannot be looked into is refused.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import sys
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import numpy as np

#: Packages whose classes compute, by more than the attributes that they have.
_COMPUTING = frozenset({"builtins", "numpy", "jax", "jaxlib", "torch"})
#: Modules of the standard library whose functions return something else each time.
_IMPURE = frozenset({"random", "_random", "time", "secrets", "os", "posix", "nt", "datetime", "io"})
#: Builtins by which code reads what it does not name.
_OPAQUE_BUILTINS = frozenset({
    "globals", "locals", "vars", "eval", "exec", "compile", "open", "input", "id", "__import__",
})  # fmt: skip
_SCALARS = (bool, int, float, str, bytes, complex, type(None), type(Ellipsis))
_MOST_PARTS = 4096
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # flags of CPython's types: made by a class statement


class OpaqueError(Exception):
    """A predicate reads something that can change without being seen."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{what}{'' if path == 'it' else f' as {path!r}'}")


class _Identity:
    """An object that is compared by identity alone, and kept alive by the key that holds it."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def contents_of(predicate: Callable[[Any, Any], Any]) -> Hashable:
    """Return a key of a predicate; predicates with equal keys show the same.

    >>> def band(width):
    ...     return lambda i, j: abs(i - j) < width
    >>> contents_of(band(4)) == contents_of(band(4)), contents_of(band(4)) == contents_of(band(5))
    (True, False)

    Raises:
        OpaqueError: It reads something that can change without being seen, such as a file, a
            generator, random numbers or a traced array; the message names it.
    """
    names: frozenset[str] = frozenset()
    package = _package_of(predicate)
    while True:
        reader = _Reader(names, package)
        key = reader.key(predicate, "it")
        # Objects are read by the attributes that code names, wherever that code is.
        if not reader.reads_attributes or reader.names <= names:
            return key
        names |= reader.names


def _state_of(x: object) -> dict[str, Any]:
    """Return the attributes of an object itself: those in its dictionary, and in slots."""
    slots = (getattr(kind, "__slots__", ()) for kind in type(x).__mro__)
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    return {n: getattr(x, n) for n in names if hasattr(x, n)} | getattr(x, "__dict__", {})


class _Reader:
    """Reads what a predicate holds.

    Attributes:
        wanted: Names of the attributes by which modules, classes and instances are read.
        package: The predicate's own package; functions of other installed ones are not looked into.
        names: All names in the code that was read.
        reads_attributes: Something was read by its attributes.
    """

    def __init__(self, wanted: frozenset[str], package: str) -> None:
        self.wanted = wanted
        self.package = package
        self.names: set[str] = set()
        self.reads_attributes = False
        self._numbers: dict[int, int] = {}  # of objects that were begun, by their identity
        self._kept: list[object] = []  # so that no identity is used twice

    def key(self, x: Any, path: str) -> Hashable:
        """Return the key of a value; ``path`` says in messages where the predicate has it from."""
        kind = type(x)
        if kind in _SCALARS:
            return kind, x.hex() if kind is float else x
        if id(x) in self._numbers:
            return "again", self._numbers[id(x)]
        if len(self._kept) >= _MOST_PARTS:
            raise OpaqueError(path, f"more than {_MOST_PARTS} objects")
        self._numbers[id(x)] = len(self._kept)
        self._kept.append(x)
        readers = (read for types, read in _READERS if isinstance(x, types))
        return kind, *next(readers, _Reader._of_object)(self, x, path)

    def _of_object(self, x: Any, path: str) -> Iterator[Hashable]:
        """Yield the key of what is no value, collection, function or module."""
        kind = type(x)
        if self._is_pure(x):
            yield _Identity(x)
        elif hasattr(x, "__wrapped__"):  # jax.jit, functools.cache
            yield _Identity(x)
            yield self.key(x.__wrapped__, path)
        elif isinstance(x, type):
            yield _Identity(x)
            yield from self._attributes(x, path)
        elif hasattr(x, "__array__"):
            try:
                array = np.asarray(x)
            except (
                Exception
            ) as error:  # traced arrays, those of other devices: each fails in its way
                raise OpaqueError(path, f"a {kind.__name__} that is no array here") from error
            yield from _of_array(self, array, path)
        elif _is_made_in_python(kind):
            attributes = tuple(self._attributes(x, path))
            special: tuple[Hashable, ...] = tuple(self._special_methods(kind, path))
            if _is_installed(kind.__module__) and any(hasattr(kind, n) for n in _USED_BY_SYNTAX):
                special += (self.key(_state_of(x), path),)
            yield _Identity(kind if attributes or special else x)
            yield attributes + special
        else:
            raise OpaqueError(path, f"a {kind.__module__}.{kind.__qualname__}")

    def _attributes(self, x: Any, path: str) -> Iterator[Hashable]:
        """Yield the attributes of an object that code names, each with its name."""
        self.reads_attributes = True
        for name in sorted(self.wanted):
            try:
                value = getattr(x, name)
            except Exception:  # noqa: BLE001, S112 - a property may fail in any way; code sees it, too
                continue
            if not isinstance(value, GetSetDescriptorType | MemberDescriptorType):
                yield name, self.key(value, f"{path}.{name}".removeprefix("it."))

    def _special_methods(self, kind: type, path: str) -> Iterator[Hashable]:
        """Yield the special methods of a class, which operators and subscripts call."""
        for base in kind.__mro__:
            for name, value in vars(base).items():
                is_special = name[:2] == name[-2:] == "__" and name not in _NOT_CALLED
                if is_special and isinstance(value, FunctionType) and not self._is_pure(value):
                    yield name, self.key(value, f"{path}.{name}")

    def _is_pure(self, x: Any) -> bool:
        """Return True for functions and classes of other installed packages: they stay the same."""
        if isinstance(x, BuiltinFunctionType) and not isinstance(x.__self__, ModuleType | None):
            return False  # a method of an object
        package = _package_of(x)
        return (
            (hasattr(x, "__name__") or isinstance(x, np.ufunc)) and type(x).__name__ != "vectorize"
            and (package in _COMPUTING or (package != self.package and _is_installed(package)))
            and package not in _IMPURE
        )  # fmt: skip

    def _of_function(self, function: FunctionType, _: str) -> Iterator[Hashable]:
        if self._is_pure(function):
            yield _Identity(function)
            return
        yield function.__code__
        for what, values in (
            ("default", function.__defaults__), ("default", function.__kwdefaults__)
        ):  # fmt: skip
            yield self.key(values, f"a {what} of {function.__name__}")
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            yield name, self.key(value, name)
        names = _names_in(function.__code__)
        self.names |= names.attributes
        for name in sorted(names.globals):
            if name in function.__globals__:
                yield name, self.key(function.__globals__[name], name)
            elif name in _OPAQUE_BUILTINS:
                raise OpaqueError(name, "what a builtin finds")
        for name in sorted(names.modules):  # imported inside of it
            if name in sys.modules:
                yield name, self.key(sys.modules[name], name)


def _of_array(_: _Reader, x: np.ndarray[Any, Any], path: str) -> Iterator[Hashable]:
    if x.dtype.hasobject:
        raise OpaqueError(path, "an array of objects")
    yield x.dtype.str
    yield x.shape
    yield hashlib.blake2b(np.ascontiguousarray(x).tobytes(), digest_size=16).digest()


def _of_module(reader: _Reader, x: ModuleType, path: str) -> Iterator[Hashable]:
    yield x.__name__
    package = x.__name__.partition(".")[0]
    is_own = package == reader.package or not _is_installed(package)
    if is_own or package in _IMPURE or x.__name__.endswith(".random"):
        yield from reader._attributes(x, path)  # noqa: SLF001 - one table for all kinds
    elif "random" in reader.names and hasattr(x, "random"):
        yield reader.key(x.random, f"{path}.random")


#: Kinds of values that are read by their parts, each with the function that yields these.
_READERS: tuple[tuple[Any, Callable[[_Reader, Any, str], Iterator[Hashable]]], ...] = (
    (FunctionType, _Reader._of_function),  # noqa: SLF001
    (MethodType, lambda r, x, path: iter((r.key(x.__func__, path), r.key(x.__self__, path)))),
    (enum.Enum, lambda _, x, _path: iter((x.name,))),
    (np.generic, _of_array), (np.ndarray, _of_array), (np.dtype, lambda _, x, _path: iter((x.str,))),
    ((tuple, list), lambda r, x, path: (r.key(y, f"{path}[{n}]") for n, y in enumerate(x))),
    (dict, lambda r, x, path: (r.key(y, f"{path}[{y[0]!r}]") for y in x.items())),
    ((set, frozenset), lambda r, x, path: iter((frozenset(r.key(y, path) for y in x),))),
    (range, lambda _, x, _path: iter((x,))),
    (slice, lambda r, x, path: (r.key(y, path) for y in (x.start, x.stop, x.step))),
    (functools.partial, lambda r, x, path: (
        r.key(y, path) for y in (x.func, x.args, x.keywords)
    )),
    (ModuleType, _of_module),
)  # fmt: skip
_NOT_CALLED = frozenset({
    "__init__", "__new__", "__init_subclass__", "__repr__", "__str__", "__del__", "__post_init__",
    "__setattr__", "__delattr__", "__set_name__", "__class_getitem__", "__reduce__", "__getstate__",
    "__setstate__", "__copy__", "__deepcopy__", "__dir__", "__format__",
})  # fmt: skip
_USED_BY_SYNTAX = ("__call__", "__getitem__", "__contains__", "__iter__", "__len__", "__bool__")


class _Names(NamedTuple):
    """The names in code and in the functions that it makes."""

    globals: frozenset[str]
    modules: frozenset[str]  # that it imports
    attributes: frozenset[str]  # and text that may be one, for getattr


@functools.lru_cache(maxsize=1024)
def _names_in(code: CodeType) -> _Names:
    """Return the names in code."""
    inner = [_names_in(x) for x in code.co_consts if isinstance(x, CodeType)]
    by_kind: dict[str, set[str]] = {"GLOBAL": set(), "IMPORT_NAME": set(), "ATTR": set()}
    for instruction in dis.get_instructions(code):
        name, text = instruction.opname, instruction.argval
        kind = "GLOBAL" if name in ("LOAD_GLOBAL", "LOAD_NAME") else name
        kind = "ATTR" if "ATTR" in name or name in ("LOAD_METHOD", "IMPORT_FROM") else kind
        if kind in by_kind and isinstance(text, str):
            by_kind[kind].add(text)
    texts = {x for x in code.co_consts if isinstance(x, str) and x.isidentifier()}
    own = _Names(
        *map(frozenset, (by_kind["GLOBAL"], by_kind["IMPORT_NAME"], by_kind["ATTR"] | texts))
    )
    return _Names(*(frozenset.union(*parts) for parts in zip(own, *inner, strict=True)))


def _is_made_in_python(kind: type) -> bool:
    """Return True if a class, with all that it derives from, keeps its state in attributes."""
    if kind is SimpleNamespace:
        return True
    is_own = kind.__flags__ & _HEAP_TYPE and not kind.__flags__ & _IMMUTABLE_TYPE
    in_c = any(
        isinstance(vars(base).get("__new__"), BuiltinFunctionType)
        for base in kind.__mro__
        if base is not object
    )
    return bool(is_own) and not in_c and kind.__module__.partition(".")[0] not in _COMPUTING


def _package_of(x: Any) -> str:
    """Return the top-level package of a function, a class, or an object's class."""
    return str(getattr(x, "__module__", None)).partition(".")[0]


@functools.lru_cache(maxsize=1024)
def _is_installed(module: str) -> bool:
    """Return True for modules of the standard library and of installed packages."""
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names:
        return True
    path = Path(getattr(sys.modules.get(package), "__file__", None) or "")
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return True
    return _holds_distributions(path.parent.parent if path.stem == "__init__" else path.parent)


@functools.lru_cache(maxsize=256)
def _holds_distributions(folder: Path) -> bool:
    """Return True for a folder into which packages were installed, as by ``pip --target``."""
    return any(folder.glob("*.dist-info"))
