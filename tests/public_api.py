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
    lines: list[str] = []
    for module in map(importlib.import_module, MODULES[backend]):
        values = {name: getattr(module, name) for name in sorted(_public_names(module))}
        for name, value in values.items():
            if not isinstance(value, ModuleType):
                lines += _of_value(f"{module.__name__}.{name}", value)
    return "".join(f"{line}\n" for line in lines)


def file_of(backend: str) -> Path:
    """Return the path of a backend's list of public names."""
    return FOLDER / f"{MODULES[backend][0]}.txt"


def _public_names(module: ModuleType) -> set[str]:
    """Return the names that type checkers regard as public."""
    assert module.__file__ is not None
    return public_names(Path(module.__file__))


def public_names(path: Path) -> set[str]:
    """Return what is in ``__all__`` of a file or, without it, what it defines or imports ``as``."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                names |= {alias.name for alias in aliases if alias.asname == alias.name}
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return set(ast.literal_eval(value))
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return {name for name in names if not name.startswith("_")}


def _of_value(name: str, value: Any) -> Iterator[str]:
    if not callable(value) or get_origin(value) is not None:  # an alias of a type
        # The class of a union depends on its members (numpy's types): write one name for all.
        is_union = get_origin(value) in (Union, UnionType)
        yield f"{name}: {'Union' if is_union else type(value).__name__}"
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
