"""Modules whose forward runs in a mode that answers calls of ``scaled_dot_product_attention``.

A mode of torch's functions sees every call, however the model imported the function, in eager code
and while ``torch.compile`` traces. It is entered by the forward of each module, not of the whole
model alone: a checkpoint computes a module again in the backward, where only that module's forward
runs. So each module gets a class derived from its own, as ``fully_shard`` does it; modules that
have one class and one scope share the new class.
The compiler compares classes before it uses a graph, so no graph is used for a module that is not
replaced; hooks of modules it does not compare.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from ring_core import UnsupportedError
from ring_torch.replaced.calls import Scope, scaled_dot_product_attention
from ring_torch.replaced.heads import attend_with_heads
from ring_torch.replaced.mode import RingMode, current_mode
from ring_torch.replaced.names import hiding_object
from ring_torch.replaced.watch import sizes_of

#: Modules of torch whose forwards attend, or run a graph that may. Its others are left alone.
_ATTENDING = ("torch.nn.modules.transformer", "torch.export.unflatten")


def replace_forwards(
    module: nn.Module, scope_of: Callable[[nn.Module], Scope]
) -> Iterator[Callable[[], None]]:
    """Give modules classes whose forward runs in a mode; yield a function that undoes it for each.

    All modules are checked before the first one changes. Each changes when its function is asked
    for.

    Args:
        module: The module; those inside it are replaced, too.
        scope_of: Returns the scope of a module.

    Raises:
        ValueError: A module is replaced already, or has a forward that is not of its class.
        UnsupportedError: A module is a script, a ``MultiheadAttention`` that adds keys, or a model
            whose own context parallelism is on.
    """
    chosen = [(name, x) for name, x in module.named_modules() if _is_replaced(x, module)]
    for name, x in chosen:
        _check_module(name, x, scope_of(x))
    classes: dict[tuple[type, Scope, bool], type] = {}
    for _, x in chosen:
        # Modules of one class share the new one, as the compiler's guards compare classes.
        kind = type(x), scope_of(x), x is module
        if kind not in classes:
            classes[kind] = _class_on_ring(*kind[:2], is_root=kind[2])
        x.__class__ = classes[kind]
        yield functools.partial(_set_back, x, classes[kind], kind[0])


def _is_replaced(module: nn.Module, root: nn.Module) -> bool:
    """Return True unless the module's forward is one of torch that calls no attention.

    That of the root is replaced even so, as it finds out whether anything attended.
    """
    forward = type(module).forward
    where = getattr(forward, "__module__", None) or ""  # a graph of torch.fx has none
    if isinstance(module, nn.MultiheadAttention) or not where.startswith("torch."):
        return True
    return where in _ATTENDING or (module is root and forward is not nn.Module.forward)


def _check_module(name: str, module: nn.Module, scope: Scope) -> None:
    """Refuse a module whose class cannot be replaced; errors as in :func:`replace_forwards`."""
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"replace_sdpa: {name} is a ScriptModule, whose forward Python does not see"
        )
    _check_other_ring(module)
    if "forward" in vars(module):
        raise ValueError(
            f"replace_sdpa: {name} has a forward of its own, as hooks of accelerate set. Call replace_sdpa "
            f"before they are set"
        )
    if isinstance(module, nn.MultiheadAttention) and (
        module.bias_k is not None or module.add_zero_attn
    ):
        raise UnsupportedError(
            f"replace_sdpa: {name or type(module).__name__} is a MultiheadAttention with add_bias_kv or add_zero_attn, "
            f"whose added keys would count once for each rank: leave them out"
        )
    if scope.is_split and (hidden := hiding_object(module)) is not None:
        raise UnsupportedError(
            f"replace_sdpa: {name or type(module).__name__} calls {hidden}, whose attention Python does not see, so it "
            f"would attend to this rank's keys alone: call it without torch.jit.script and custom_op, or "
            f"name the module in local="
        )
    replaced = getattr(type(module), "_ring_scope", None)
    if replaced is not None and replaced.state.computes != "off":
        raise ValueError(
            f"replace_sdpa: the attention of {name or type(module).__name__} is replaced already: call remove() of the "
            f"first handle, or give modules that do not overlap"
        )


def _check_other_ring(module: nn.Module) -> None:
    """Refuse a model of diffusers whose own context parallelism is on.

    Raises:
        UnsupportedError: It is.
    """
    config = getattr(module, "_parallel_config", None)
    if getattr(config, "context_parallel_config", None) is not None:
        raise UnsupportedError(
            f"replace_sdpa: {type(module).__name__} has diffusers' own context parallelism, so its "
            f"tokens would be split twice: leave enable_parallelism(config=...) out"
        )


def _set_back(module: nn.Module, new: type, old: type) -> None:
    """Give a module its class back, unless another library has derived one since."""
    if type(module) is new:
        module.__class__ = old


def _class_on_ring(base: type[nn.Module], scope: Scope, *, is_root: bool) -> type[nn.Module]:
    """Return a class like ``base`` whose forward runs in a mode of the scope."""
    is_heads = inspect.unwrap(base.forward) is nn.MultiheadAttention.forward
    forward = (
        _forward_of_heads(base.forward, scope)
        if is_heads
        else _forward_in_mode(base.forward, scope, is_root=is_root)
    )
    body: dict[str, Any] = {
        "forward": forward, "_ring_scope": scope, "__module__": base.__module__,
        "__qualname__": base.__qualname__, "__doc__": base.__doc__,
    }  # fmt: skip
    if issubclass(base, GraphModule):

        def recompile(self: GraphModule) -> Any:
            """Write the class's forward anew, as a copy or a changed graph does."""
            code, kind = base.recompile(self), type(self)
            kind.__call__ = nn.Module.__call__  # type: ignore[method-assign]
            kind.forward = _forward_in_mode(kind.forward, scope, is_root=is_root)
            return code

        # Under another name than its own, torch derives the class of a copy from this one. Its way
        # of a call, which explains errors, does not end in a class that is derived.
        body |= {
            "recompile": recompile, "__qualname__": f"{base.__qualname__}OnRing",
            "__call__": nn.Module.__call__,
        }  # fmt: skip
    # The name stays: checkpoints, wrappers and messages go by it.
    return types.new_class(base.__name__, (base,), {}, lambda namespace: namespace.update(body))


def _forward_in_mode(original: Any, scope: Scope, *, is_root: bool) -> Any:
    """Return a forward that runs ``original`` in the scope's mode, unless that is the mode now.

    While the scope is off it runs ``original`` alone. It raises UnsupportedError if a module inside
    has attended to a rank's keys alone, that of the root also if nothing attended over the ring.
    """

    @functools.wraps(original)
    def forward_on_ring(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = scope.state
        if state.computes == "off":
            return original(self, *args, **kwargs)
        if is_root:
            _check_other_ring(self)
        depth, mode = _enter(self, scope, args, kwargs), current_mode()
        collects = state.collecting_padding(args, kwargs) if is_root else nullcontext()
        # Nested modules run in the mode of the outermost; a checkpoint runs one of them alone,
        # which then enters it.
        if mode is not None and mode.scope is scope:
            output = original(self, *args, **kwargs)
        else:
            with RingMode(scope), collects:
                output = original(self, *args, **kwargs)
        if is_root and not torch.compiler.is_compiling() and not state.modules:
            raise UnsupportedError(
                f"replace_sdpa: the forward of {type(self).__name__} called no scaled_dot_product_attention, so "
                f"nothing attended over the ring: its attention is written out, or of another library "
                f"(flash-attn, xformers); configure it to use torch's SDPA"
            )
        _leave(scope, depth)
        return output

    return forward_on_ring


def _enter(module: nn.Module, scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Note that a forward begins; returns how many are around it."""
    state, mode = scope.state, current_mode()
    if torch.compiler.is_compiling():
        name = type(module).__name__
    else:
        name = state.names.get(id(module)) or type(module).__name__
    is_outermost = mode is None or mode.scope.state is not state
    sizes = sizes_of((*args, *kwargs.values())) if is_outermost else None
    return state.watch.enter(name, scope.is_split, sizes)


def _leave(scope: Scope, depth: int) -> None:
    """Note that a forward ends; raises UnsupportedError if the outermost one is wrong."""
    if (reason := scope.state.watch.leave(depth)) is not None:
        raise UnsupportedError(f"replace_sdpa: {reason}")


def _forward_of_heads(original: Any, scope: Scope) -> Any:
    """Return the forward of a ``MultiheadAttention``, which returns ``None`` for its weights.

    So it does even if weights are asked for. While the scope is off it runs ``original``.
    """

    @functools.wraps(original)
    def forward_on_ring(
        self: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if scope.state.computes == "off":
            result: tuple[Tensor, Tensor | None] = original(
                self,
                query,
                key,
                value,
                key_padding_mask,
                need_weights,
                attn_mask,
                average_attn_weights,
                is_causal,
            )
            return result
        depth = _enter(self, scope, (query,), {})
        attend = functools.partial(scaled_dot_product_attention, scope)
        out = attend_with_heads(
            attend,
            self,
            query,
            key,
            value,
            key_padding_mask,
            attn_mask,
            is_causal=is_causal,
            need_weights=need_weights,
            is_split=scope.is_split,
        )
        _leave(scope, depth)
        return out, None

    return forward_on_ring
