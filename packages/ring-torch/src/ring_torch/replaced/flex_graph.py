"""Calls of ``flex_attention`` in graphs of ``torch.compile`` that may not break.

The functions that it is given are looked at when a call runs, not when it is traced: their tensors,
such as documents, are others in each batch. So a graph holds an operation whose inputs are the
tensors in their closures, and which puts functions of the same code together again.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import (  # torch has no public name for them
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ForceDispatchKeyGuard,
)
from torch._dynamo.symbolic_convert import InstructionTranslator

from ring_core import UnsupportedError
from ring_torch.capture import constant_in_graphs
from ring_torch.replaced.mods import identity_of


@dataclass(frozen=True, eq=False)
class Blocks:
    """Parts of a block mask that calls look at."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    BLOCK_SIZE: tuple[int, int]
    seq_lengths: tuple[int, int]
    mask_mod: Any

    def as_tuple(self) -> tuple[Any, ...]:
        """Return the lists of blocks."""
        return (
            self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices,
        )  # fmt: skip


class Template(NamedTuple):
    """A call as it was traced, without tensors.

    Attributes:
        attend: Answers it in eager code: ``(query, key, value, score_mod, blocks)`` to ``out``,
            ``lse`` and the largest scores.
        mods: Its ``score_mod`` and ``mask_mod``, or ``None``.
        lists: Number of tensors that list the blocks of a block mask; 0 for none.
        has_most: True if the largest scores are asked for.
    """

    attend: Callable[..., tuple[Tensor, Tensor, Tensor | None]]
    mods: tuple[Any, Any]
    lists: int
    has_most: bool


class _Run(NamedTuple):
    """A forward whose backward may follow: its inputs and results, with autograd's graph."""

    inputs: list[Tensor]
    results: tuple[Tensor, Tensor]


_templates: dict[str, Template] = {}
_runs: dict[int, _Run] = {}
_numbers = itertools.count()
#: The last block masks, with what they are made of: layers share one.
_recent: list[tuple[Any, Blocks]] = []
_MOST_RECENT = 8
#: What torch dispatches to outside of operations.
_PLAIN = _dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set()


@constant_in_graphs
def is_full_graph() -> bool:
    """Return True while a graph is traced that may not break."""
    tx: Any = InstructionTranslator.current_tx()
    return bool(tx.one_graph or getattr(tx, "error_on_graph_break", False))


def collect(
    x: Any, tensors: list[Any], numbers: list[int], constants: list[Any], unknown: list[str]
) -> None:
    """Collect what a function holds in its closure; being traced it makes a graph for these."""
    if isinstance(x, Tensor):
        tensors.append(x)
    elif isinstance(x, tuple | list):
        for inner in x:
            collect(inner, tensors, numbers, constants, unknown)
    elif isinstance(x, FunctionType):
        for cell in x.__closure__ or ():
            collect(cell.cell_contents, tensors, numbers, constants, unknown)
        for default in x.__defaults__ or ():
            collect(default, tensors, numbers, constants, unknown)
    elif isinstance(x, int) and not isinstance(x, bool):
        numbers.append(x)
    elif x is None or isinstance(x, bool | float | str):
        constants.append(x)
    else:
        unknown.append(type(x).__name__)


def check_mods(mods: Sequence[Any], unknown: Sequence[str]) -> None:
    """Refuse functions whose tensors the compiler does not see.

    Raises:
        UnsupportedError: They hold other things than tensors, numbers and functions.
    """
    held = {*unknown}
    for mod in mods:
        for x in _read_of_modules(mod, set()):
            held |= {type(x).__name__} if isinstance(x, nn.Module) else set()
            held |= {"trained tensor"} if isinstance(x, Tensor) and x.requires_grad else set()
        held |= {"keyword" for _ in getattr(mod, "__kwdefaults__", None) or ()}
    if held:
        raise UnsupportedError(
            f"replace_sdpa: a function that flex_attention is given reads a {min(held)}, which a graph does not see: "
            f"make it outside of the graph, in a function whose variables it reads: tensors, numbers or such "
            f"functions; or compile without fullgraph=True"
        )


def _read_of_modules(x: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the global variables that a function reads, itself and in functions that it calls."""
    if isinstance(x, tuple | list):
        for inner in x:
            yield from _read_of_modules(inner, seen)
    if not isinstance(x, FunctionType) or id(x) in seen:
        return
    seen.add(id(x))
    codes, names = [x.__code__], set[str]()
    for code in codes:
        names.update(code.co_names)
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    held = [cell.cell_contents for cell in x.__closure__ or ()]
    variables = [x.__globals__[name] for name in names if name in x.__globals__]
    read = [y for z in variables for y in _within(z, names)]
    yield from read
    called = [y for y in read if not str(getattr(y, "__module__", "")).startswith("torch")]
    yield from _read_of_modules([*held, *(x.__defaults__ or ()), *called], seen)


def _within(x: Any, names: set[str]) -> Iterator[Any]:
    """Yield a variable, and what a function with these names may read of it."""
    yield x
    if isinstance(x, dict):
        yield from x.values()
    elif not isinstance(x, Tensor | nn.Module | FunctionType | type) and hasattr(x, "__dict__"):
        yield from (vars(x)[name] for name in names if name in vars(x))


def remember(template: Template) -> str:
    """Keep a call that is traced, and return the name by which the graph knows it."""
    name = str(next(_numbers))
    _templates[name] = template
    return name


def attend_in_graph(
    name: str, tensors: list[Tensor], numbers: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``out``, ``lse`` and the largest scores, or an empty tensor in their place.

    Args:
        name: Name of the call.
        tensors: ``query``, ``key`` and ``value``, lists of the block mask, then what the functions
            hold.
        numbers: ``BLOCK_SIZE`` and ``seq_lengths`` of the block mask, then those that they hold.
    """
    has_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    out, lse, most, _ = flex_attention(tensors, numbers, name, has_grad)
    return out, lse, most


@torch.library.custom_op("ring_torch::flex_attention", mutates_args=())
def flex_attention(
    tensors: Sequence[Tensor], numbers: Sequence[int], name: str, has_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Answer a call that was traced, and return a number by which its backward finds it."""
    template = _templates[name]
    inputs = [x.detach().requires_grad_(has_grad and x.is_floating_point()) for x in tensors]
    with _recording(has_grad):
        q, k, v = inputs[:3]
        held, held_numbers = iter(range(3 + template.lists, len(tensors))), iter(numbers[4:])
        score_mod = _rebuilt(template.mods[0], inputs, held, held_numbers)
        blocks = None
        if template.lists:
            sizes = tuple(numbers[:2]), tuple(numbers[2:4])
            blocks = _blocks_of(template, tensors, [*held], sizes, [*held_numbers])
        out, lse, most = template.attend(q, k, v, score_mod, blocks)
    number = next(_numbers)
    token = torch.tensor(number, device="cpu")
    if has_grad:
        _runs[number] = _Run(inputs, (out, lse))
        weakref.finalize(token, _runs.pop, number, None)
    most = q.new_empty(0) if most is None else most
    own = (x.detach().clone(memory_format=torch.contiguous_format) for x in (out, lse, most))
    return (*own, token)  # type: ignore[return-value]  # three of them


@flex_attention.register_fake
def _(tensors: Any, numbers: Any, name: str, has_grad: bool) -> Any:
    del numbers, has_grad
    q, _, v, *_ = tensors
    lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    most = torch.empty_like(lse) if _templates[name].has_most else q.new_empty(0)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, lse, most, torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("ring_torch::flex_attention_backward", mutates_args=())
def _backward(token: Tensor, tensors: Sequence[Tensor], dout: Tensor, dlse: Tensor) -> list[Tensor]:
    """Return gradients of the tensors; of integers nothing."""
    run = _runs[int(token)]
    needed = [x for x in run.inputs if x.requires_grad]
    with _recording(has_grad=True):
        grads = iter(
            torch.autograd.grad(
                run.results, needed, (dout, dlse), retain_graph=True, allow_unused=True
            )
        )
    of_inputs = [next(grads) if x.requires_grad else None for x in run.inputs]
    return [
        x.new_zeros(x.shape if x.is_floating_point() else 0)
        if grad is None
        else grad.clone(memory_format=torch.contiguous_format)
        for x, grad in zip(tensors, of_inputs, strict=True)
    ]


@_backward.register_fake
def _(token: Any, tensors: Any, dout: Any, dlse: Any) -> Any:
    del token, dout, dlse
    return [x.new_empty(x.shape if x.is_floating_point() else 0) for x in tensors]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[-1], *inputs[0])
    ctx.shapes = [(x.shape, x.dtype, x.device) for x in output[:2]]


def _differentiate(ctx: Any, *grads: Any) -> Any:
    token, *tensors = ctx.saved_tensors
    dout, dlse = (
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(grads[:2], ctx.shapes, strict=True)
    )
    found = _backward(token, tensors, dout, dlse)
    pairs = zip(found, tensors, strict=True)
    return [x if tensor.is_floating_point() else None for x, tensor in pairs], None, None, None


flex_attention.register_autograd(_differentiate, setup_context=_save)


@contextmanager
def _recording(has_grad: bool) -> Iterator[None]:
    """Let autograd and transforms work within an operation, for which torch switches them off."""
    with _ForceDispatchKeyGuard(*_PLAIN), torch.set_grad_enabled(has_grad):
        yield


def _rebuilt(x: Any, tensors: Sequence[Tensor], held: Iterator[int], numbers: Iterator[int]) -> Any:
    """Return a function of the same code that holds other tensors and numbers.

    ``held`` are indices of the tensors, in the order of ``collect``, as are the numbers.
    """
    if isinstance(x, Tensor):
        return tensors[next(held)]
    if isinstance(x, int) and not isinstance(x, bool):
        return next(numbers)
    if isinstance(x, tuple | list):
        return tuple(_rebuilt(inner, tensors, held, numbers) for inner in x)
    if not isinstance(x, FunctionType) or not (x.__closure__ or x.__defaults__):
        return x
    cells = [
        CellType(_rebuilt(cell.cell_contents, tensors, held, numbers))
        for cell in x.__closure__ or ()
    ]
    defaults = tuple(_rebuilt(default, tensors, held, numbers) for default in x.__defaults__ or ())
    return FunctionType(x.__code__, x.__globals__, x.__name__, defaults, tuple(cells))


def _made_of(x: Any) -> Iterator[Any]:
    """Yield what a function is made of, but tensors and numbers."""
    if isinstance(x, FunctionType):
        yield x.__code__
        cells = [cell.cell_contents for cell in x.__closure__ or ()]
        for inner in (*cells, *(x.__defaults__ or ())):
            yield from _made_of(inner)
    elif isinstance(x, tuple | list):
        for inner in x:
            yield from _made_of(inner)
    elif isinstance(x, bool) or not isinstance(x, Tensor | int):
        yield x


def _blocks_of(
    template: Template, tensors: Sequence[Tensor], held: list[int], sizes: Any, numbers: list[int]
) -> Blocks:
    """Return a block mask, the same one for the same tensors, numbers and function."""
    lists, mask_mod = [*tensors[3 : 3 + template.lists]], template.mods[1]
    used = identity_of([*lists, *(tensors[n] for n in held)])
    key = (*_made_of(mask_mod), sizes, *numbers, used)
    for known, blocks in _recent:
        if known == key:
            return blocks
    full = lists[2:] or (None, None)
    mask_mod = _rebuilt(mask_mod, tensors, iter(held), iter(numbers))
    made = Blocks(lists[0], lists[1], full[0], full[1], sizes[0], sizes[1], mask_mod)
    _recent.append((key, made))
    del _recent[:-_MOST_RECENT]
    return made
