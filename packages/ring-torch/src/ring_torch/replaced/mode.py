"""The mode in which calls of torch's attention are answered, by whatever name they are made."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Never

import torch
from torch import Tensor
from torch._C import DisableTorchFunction  # torch has no public name for it, nor for this
from torch._dynamo.eval_frame import skip_code
from torch._ops import HigherOrderOperator, OpOverloadPacket
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ring_core import UnsupportedError
from ring_torch.capture import untraced
from ring_torch.replaced import names
from ring_torch.replaced.calls import Scope, scaled_dot_product_attention
from ring_torch.replaced.watch import steps_of

#: Modules of torch that run graphs.
_COMPILED = ("torch._functorch._aot_autograd.", "torch._inductor.")
_FLEX, _SCAN = torch.ops.higher_order.flex_attention, torch.ops.higher_order.scan


class RingMode(TorchFunctionMode):
    """Mode in which SDPA is that of a scope; all other functions are called as they are.

    Those that attend inside torch are refused where tokens are split. The functions that a
    higher-order operator is given (checkpoints, ``cond`` and loops in graphs) run in the mode, and
    so does the kernel of an ``operator``, whose own backward would not attend over the ring.
    """

    def __init__(self, scope: Scope, operator: str = "") -> None:
        super().__init__()
        self.scope, self.operator = scope, operator

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, or answer it by the ring.

        Raises:
            ValueError: SDPA is given both a mask and ``is_causal``.
            UnsupportedError: The function attends inside torch, where tokens are split.
        """
        kwargs = kwargs or {}
        if func is _SCAN and self.scope.is_split:
            raise UnsupportedError(
                "replace_sdpa: scan runs a function in which no call of attention is seen. Write its steps as a "
                "loop; if they attend within the rank, name the module in local="
            )
        if isinstance(func, HigherOrderOperator) and func not in (_FLEX, _SCAN):
            return self._call_in_mode(func, args, kwargs)
        kind = names.kind_of(func)
        if kind == "nests":
            return False
        is_traced = torch.compiler.is_compiling()
        if kind in (None, "foreign") or (not is_traced and _is_called_by_ring()):
            if func is Tensor.unflatten:  # whose super() the compiler of torch 2.11 does not trace
                func = torch.unflatten
            is_unseen = kind == "foreign" and not types and self.scope.is_split
            if is_unseen and not (is_traced and names.may_stay_in_graph(func)):
                func = functools.partial(_call_operator, self.scope, func)
            return func(*args, **kwargs)
        if self.operator and kind in ("seen", "hidden"):
            refuse_hidden(self.operator)
        if kind == "seen":
            _check_causal_mask(*args, **kwargs)
            attend = scaled_dot_product_attention if is_traced else _attend_eagerly
            return attend(self.scope, *args, **kwargs)
        if kind == "hidden":
            return self._call_hidden(func, args, kwargs)
        out = func(*args, **kwargs)
        for step, size in steps_of(kind == "product", args, kwargs, out):
            self.scope.state.watch.step(step, size)
        return out

    def _call_hidden(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function that attends inside torch, or refuse it."""
        text = str(func)
        if text.startswith("ring_torch."):  # in a graph; the caller uses Ring by itself
            self.scope.state.watch.call(0, 0, on_ring=False)
        elif self.scope.is_split:
            refuse_hidden(getattr(func, "__name__", text))
        with DisableTorchFunction():  # else other modes of ours refuse it
            return func(*args, **kwargs)

    def _call_in_mode(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator that runs functions, which see no mode of their own accord."""
        scope = self.scope
        # The compiler lets the inner functions enter modes if one was entered outside before.
        with RingMode(scope):
            pass
        args = [_in_mode(scope, x) if _is_function(x) else x for x in args]
        return operator(*args, **kwargs)


@untraced
def _call_operator(scope: Scope, func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call an operator whose name says nothing; refuses attention that a kernel in Python calls."""
    if isinstance(func, OpOverloadPacket):
        overload = torch._C._jit_resolve_packet(func._qualified_op_name, *args, **kwargs)  # noqa: SLF001
        func = getattr(func, overload or "default")
    # Called by its name it would leave all modes for as long as its kernel runs.
    with RingMode(scope, str(func)):
        return torch._C._dispatch_call_boxed(func._handle, *args, **kwargs)  # noqa: SLF001


# A call that a graph has left to eager code is to stay there: its origin is looked at each time.
skip_code(RingMode.__torch_function__.__code__)
_attend_eagerly = untraced(scaled_dot_product_attention)


def _is_function(x: Any) -> bool:
    """Return True for a function that an operator is to run, and that is not torch's own class."""
    is_of_torch = isinstance(x, type) and x.__module__.startswith("torch.")  # as of vmap
    return callable(x) and not isinstance(x, Tensor) and not is_of_torch


def _in_mode(scope: Scope, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs in the mode of a scope."""
    return functools.partial(_run_in_mode, scope, function)


def _run_in_mode(scope: Scope, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with RingMode(scope):
        return function(*args, **kwargs)


def _is_called_by_ring() -> bool:
    """Return True if Ring's own code calls the function, or a graph that was compiled before.

    Ring's is in models that use it by themselves; what a graph holds has been seen in its trace.
    """
    frame, is_graph = inspect.currentframe(), False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")  # the code of a graph has none
        is_graph |= not name
        if name.startswith(_COMPILED) or (is_graph and name.startswith("torch._dynamo.")):
            return True
        if name and name != __name__ and name.partition(".")[0] != "torch":
            return name.startswith("ring_torch.") and not name.startswith("ring_torch.replaced.")
        frame = frame.f_back
    return False


def current_mode() -> RingMode | None:
    """Return the innermost mode of ours in this thread."""
    # Other libraries' modes may lie between: ours is the last that was entered.
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, RingMode) and not mode.operator:
            return mode
    return None


def refuse_hidden(function: str) -> Never:
    """Raise an UnsupportedError that names a function that attends."""
    raise UnsupportedError(
        f"replace_sdpa: {function} attends inside torch, to this rank's keys alone. "
        f"Call scaled_dot_product_attention or a torch.nn.MultiheadAttention; if these tokens are "
        f"meant to attend within the rank, name the module in local="
    )


def _check_causal_mask(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    **_: Any,
) -> None:
    """Refuse both ``attn_mask`` and ``is_causal``, as torch does."""
    del query, key, value, dropout_p
    if is_causal and attn_mask is not None:
        raise ValueError(
            "replace_sdpa: give attn_mask or is_causal=True, as torch takes one of them"
        )
