"""Lists the packages' public names and signatures: ``python tests/public_api.py`` writes them.

It writes a file for each package that can be imported; a test compares the files.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Union, get_origin

FOLDER = Path(__file__).parent / "api"
MODULES = {
    "core": (
        "ring_core", "ring_core.tools.bench", "ring_core.checks", "ring_core.cost", "ring_core.tools.doctor",
        "ring_core.philox", "ring_core.reference", "ring_core.viz",
    ),
    "torch": (
        "ring_torch", "ring_torch.compat", "ring_torch.hf", "ring_torch.local",
        "ring_torch.recurrent", "ring_torch.training",
    ),
    "jax": (
        "ring_jax", "ring_jax.compat", "ring_jax.equinox", "ring_jax.flax", "ring_jax.maxtext",
        "ring_jax.nn",
    ),
    "jax-gpu": ("ring_jax_gpu",),
    "jax-tpu": ("ring_jax_tpu",),
}  # fmt: skip


def described(backend: str) -> str:
    """Return a line for each public name of a backend's public modules."""
    modules = [importlib.import_module(name) for name in MODULES[backend]]
    return "".join(f"{line}\n" for module in modules for line in _of_module(module))


def file_of(backend: str) -> Path:
    """Return the path of a backend's list of public names."""
    return FOLDER / f"{MODULES[backend][0]}.txt"


def _of_module(module: ModuleType) -> Iterator[str]:
    for name in sorted(_public_names(module)):
        value = getattr(module, name)
        if not isinstance(value, ModuleType):
            yield from _of_value(f"{module.__name__}.{name}", value)


def _public_names(module: ModuleType) -> set[str]:
    """Return the names that type checkers regard as public.

    These are the names in ``__all__`` or, without it, those defined or imported ``as`` themselves.
    """
    if hasattr(module, "__all__"):
        return set(module.__all__)
    names: set[str] = set()
    assert module.__file__ is not None
    for node in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def is_union(value: Any) -> bool:
    """Return True for `X | Y`, whatever its class."""
    return get_origin(value) in (Union, UnionType)


def _of_value(name: str, value: Any) -> Iterator[str]:
    if not callable(value) or get_origin(value) is not None:  # an alias of a type
        # The class of a union depends on its members (numpy's types): write one name for all.
        yield f"{name}: {'Union' if is_union(value) else type(value).__name__}"
        return
    yield f"{name}{_signature(value)}"
    if not inspect.isclass(value):
        return
    for member in sorted(n for n in vars(value) if not n.startswith("_")):
        inner = inspect.getattr_static(value, member)
        if isinstance(inner, staticmethod | classmethod):
            inner = inner.__func__
        if inspect.isfunction(inner):
            yield f"{name}.{member}{_signature(inner)}"
        elif isinstance(inner, property) or hasattr(inner, "func"):
            yield f"{name}.{member}: property"


def _signature(value: Any) -> str:
    """Return the parameters with defaults, without types: they are long and checked elsewhere."""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return "(...)"
    empty = inspect.Parameter.empty
    plain = [
        p.replace(annotation=empty, default=p.default if p.default is empty else _Shown(p.default))
        for p in signature.parameters.values()
    ]
    return str(signature.replace(parameters=plain, return_annotation=empty))


class _Shown:
    """Default value printed without the address that some objects print."""

    def __init__(self, value: Any) -> None:
        self._text = getattr(value, "__name__", None) or repr(value)

    def __repr__(self) -> str:
        return self._text.partition(" object at ")[0]


def main() -> int:
    """Write the files of all packages that can be imported."""
    FOLDER.mkdir(exist_ok=True)
    for backend, modules in MODULES.items():
        if find_spec(modules[0]) is not None:
            file_of(backend).write_text(described(backend))
    return 0


if __name__ == "__main__":
    sys.exit(main())
