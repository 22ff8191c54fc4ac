"""Names under which torch computes attention, and the objects that hide such a call from Python."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
import torch.nn.attention.varlen
from torch import Tensor, nn
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.library import _impls

from ring_torch.capture import constant_in_graphs


def _with_overloads(names: Iterable[str], *owners: Any) -> list[Any]:
    """Return the functions of these names, those of ``torch.ops.aten`` with their overloads."""
    functions = [getattr(x, n) for x in (*owners, torch.ops.aten) for n in names if hasattr(x, n)]
    packets = [x for x in functions if isinstance(x, OpOverloadPacket)]
    return [*functions, *(getattr(x, name) for x in packets for name in x.overloads())]


def _attends(name: str) -> bool:
    """Return True if a function of torch of this name computes attention."""
    return bool(re.search(r"attention|attn|_transformer_(en|de)coder\w*_fwd", name))


def _hidden() -> list[Any]:
    """Return functions that attend inside torch, where no call of SDPA is seen."""
    owners = (torch, torch.nn.functional)
    named = [getattr(owner, name) for owner in owners for name in dir(owner) if _attends(name)]
    return [torch.ops.higher_order.flex_attention, *(x for x in named if callable(x))]


#: Kinds of functions that a mode looks at: torch's SDPA by all its names, which have the same
#: arguments; others that attend inside torch; products and softmaxes, of which attention is
#: written; the one by whose result torch's encoder takes nested tensors, which have no shards; and
#: operators that are not torch's, whose names say nothing.
Kind = Literal["seen", "hidden", "product", "softmax", "nests", "foreign"]
_OF_TORCH = {"aten", "prim", "prims", "c10d", "_c10d_functional", "quantized", "onednn", "fsdp"}
_KINDS: dict[Any, Kind] = {
    torch._nested_tensor_from_mask_left_aligned: "nests",  # noqa: SLF001 - its only name
    **dict.fromkeys(_hidden(), "hidden"),
    **dict.fromkeys(
        _with_overloads(
            ["matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "baddbmm", "baddbmm_", "einsum"],
            torch, Tensor, torch.linalg,
        ), "product",
    ),
    **dict.fromkeys(
        _with_overloads(
            ["softmax", "_softmax", "_safe_softmax"],
            torch, Tensor, torch.nn.functional, torch.special,
        ), "softmax",
    ),
    **dict.fromkeys(_with_overloads(["scaled_dot_product_attention"], torch.nn.functional), "seen"),
}  # fmt: skip


@constant_in_graphs
def kind_of(function: Any) -> Kind | None:
    """Return the kind of a function of torch, or ``None`` for one that a mode leaves alone.

    Operators of other libraries attend if their name says so; so do Ring's own in graphs, of
    modules that use Ring by themselves.
    """
    kind = _KINDS.get(function)
    if kind is None and isinstance(function, OpOverload | OpOverloadPacket):
        name = str(function)  # namespace.name, or namespace.name.overload
        is_own = name.startswith("ring_torch.")  # of a module that uses Ring by itself
        if is_own or _attends(name) or "flash_attn" in name:
            return "hidden"
        return None if name.partition(".")[0] in _OF_TORCH else "foreign"
    return kind


@constant_in_graphs
def may_stay_in_graph(operator: OpOverload | OpOverloadPacket) -> bool:
    """Return False for an operator that a graph that is traced has to leave to eager code.

    There a mode sees what a kernel in Python calls. Of ``custom_op`` the kernel's code is looked
    at; where none can be, a graph that may not break keeps the operator.
    """
    name = "::".join(str(operator).split(".")[:2])
    if (made := OPDEFS.get(name)) is not None:
        kernel = made._init_fn  # noqa: SLF001 - torch has no public name for it
        code = _all_named_by([kernel], kernel.__module__.partition(".")[0])
        return not any(map(_calls_attention, code))
    kernels = {x.rpartition("/")[2] for x in _impls if x.startswith(name.replace("::", "/") + "/")}
    return kernels <= {"Meta"} or InstructionTranslator.current_tx().one_graph


def hiding_object(module: nn.Module) -> str | None:
    """Return the name of what the module's code calls where Python does not see attention.

    That is a function or module of ``torch.jit``, or an operator made by
    ``torch.library.custom_op``, that calls SDPA or writes it out; or one of torch's own functions
    behind SDPA, which its compiler shows no mode. It is looked for in the module's
    attributes and in all that the functions of its class name: globals, closures and defaults, and
    through functions of the same package.
    """
    package = type(module).__module__.partition(".")[0]
    bases = [x for x in type(module).__mro__ if not x.__module__.startswith("torch.")]
    held = [type(module).forward, *(x for base in (*bases, module) for x in vars(base).values())]
    for value in _all_named_by(held, package):
        if _hides_attention(value):
            return getattr(value, "__name__", None) or getattr(value, "name", type(value).__name__)
    return None


def _all_named_by(pending: list[Any], package: str) -> Iterator[Any]:
    """Yield values, and what :func:`_named_by` returns for them, and so on."""
    seen: dict[int, Any] = {}
    while pending:
        value = pending.pop()
        if id(value) not in seen:
            seen[id(value)] = value
            yield value
            pending += _named_by(value, package)


def _hides_attention(value: Any) -> bool:
    """Return True for a script, or an operator of one's own, that attends.

    So do torch's own functions behind SDPA, which ``torch.compile`` shows no mode.
    """
    if isinstance(value, types.BuiltinFunctionType):
        return value.__name__.startswith("_scaled_dot_product") and value in _KINDS
    if isinstance(value, torch.jit.ScriptFunction | torch.jit.ScriptModule):
        graph = str(value.inlined_graph)
        products = re.findall(r"aten::(?:matmul|bmm|baddbmm|einsum)\b", graph)
        return "scaled_dot_product" in graph or ("softmax" in graph and len(products) > 1)
    return isinstance(value, CustomOpDef) and _calls_attention(value._init_fn)  # noqa: SLF001 - torch has no public name for it


def _calls_attention(value: Any) -> bool:
    """Return True for torch's SDPA, or a function whose code names it or ``flex_attention``."""
    if isinstance(value, types.FunctionType):
        named = {"scaled_dot_product_attention", "flex_attention"}
        return not named.isdisjoint(_names_in(value.__code__))
    return isinstance(value, types.BuiltinFunctionType) and kind_of(value) == "seen"


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield names of globals and attributes that a function's code and its inner ones read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _named_by(value: Any, package: str) -> Iterable[Any]:
    """Return the objects that a value holds, or that its code names, if it is of the package."""
    if isinstance(value, dict):
        return [*value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return [*value]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType | staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    value = inspect.unwrap(value) if callable(value) else value
    # The forward of a graph of torch.fx has no __module__.
    if (
        not isinstance(value, types.FunctionType)
        or (value.__module__ or package).split(".")[0] != package
    ):
        return []
    names = [*_names_in(value.__code__)]
    named = [value.__globals__[name] for name in names if name in value.__globals__]
    of_modules = [
        vars(x)[name]
        for x in named
        if isinstance(x, types.ModuleType)
        for name in names
        if name in vars(x)
    ]
    if "ops" in names:  # torch.ops.namespace.name
        named += [op for name, op in OPDEFS.items() if {*name.split("::")} <= {*names}]
    cells = [x.cell_contents for x in value.__closure__ or () if _is_filled(x)]
    return [*named, *of_modules, *cells, *(value.__defaults__ or ())]


def _is_filled(cell: types.CellType) -> bool:
    """Return True unless the variable of a closure has no value yet."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
