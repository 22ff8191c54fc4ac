"""Traces of a model's forward: what every module is given and returns, as a few numbers a token.

A token's features are replaced by a random projection of them, so that traces of a large model stay
small. The norm of a difference is about that of its projection.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ring_torch.capture import untraced
from ring_torch.gradients.guards import local_shard

#: Relative differences that rounding alone makes in a few operations, by dtype.
_FLOORS = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
#: That of other dtypes. Models of transformers compute some parts in float32 whatever their dtype
#: is, so it is that of float32.
LEAST_FLOOR = 2.0**-18

_WIDTH = 8  # numbers kept of the features of a token

#: Integer arguments that are compared. Others, such as indices of experts, may differ where two
#: scores are equal.
_INTEGERS = frozenset({
    "input", "input_ids", "position_ids", "token_type_ids", "decoder_input_ids",
    "decoder_position_ids",
})  # fmt: skip


@dataclass(frozen=True)
class Tokens:
    """Sequence of a batch, and the part of it that this rank holds.

    Attributes:
        length: ``T``.
        local_length: ``T_local``, with the padding that the layout needs.
        positions: int64 ``[n]``, indices of this rank's tokens in the whole sequence.
        local_positions: int64 ``[n]``, indices of the same tokens in this rank's part.
        real: bool ``[B, T]``, True for tokens that are no padding.
    """

    length: int
    local_length: int
    positions: Tensor
    local_positions: Tensor
    real: Tensor

    def held_whole(self) -> Tokens:
        """Return the sequence as one that this rank holds whole."""
        indices = torch.arange(self.length, device=self.positions.device)
        return replace(self, local_length=self.length, positions=indices, local_positions=indices)


class Record(NamedTuple):
    """Tensor that a module was given or returned.

    Attributes:
        module: Name of the module whose code, or hooks, made it.
        shape: Its shape.
        floor: Relative difference that rounding makes in its dtype.
        values: Its numbers, with features projected: ``[*shape[:-1], k]``, or ``[*shape, 1]`` if
            its last dimension may be a sequence.
    """

    module: str
    shape: tuple[int, ...]
    floor: float
    values: Tensor


#: A module's name, the number of its call, ``given`` or ``returned``, and a tensor's path, as
#: :func:`tensors_in` writes it, in the arguments or in the output.
Key = tuple[str, int, str, str]


@dataclass
class Trace:
    """Records of one forward, and the number of calls of each module, in the order of both."""

    records: dict[Key, Record] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def floor(self) -> float:
        """Largest floor of a record: the rounding of the coarsest dtype in it."""
        return max((x.floor for x in self.records.values()), default=LEAST_FLOOR)


class Recorder:
    """Forward hooks that record a trace of a model.

    An argument of a module was made by the module that calls it, unless the module's own hooks have
    replaced it. An output was made by the module itself.

    Args:
        model: The model that is called.
        sequences: Sequences of its batch.
    """

    def __init__(self, model: nn.Module, sequences: list[Tokens]) -> None:
        self.model = model
        self._lengths = {n for x in sequences for n in (x.length, x.local_length)}
        self._matrices: dict[tuple[int, torch.device], Tensor] = {}
        self._trace, self._perturbs = Trace(), False
        #: Modules under way, the innermost last: name, number of the call, arguments from outside.
        self._open: list[tuple[str, int, dict[str, Tensor]]] = []
        self._started: Counter[str] = Counter()

    @contextmanager
    def recording(self, *, perturbs: bool = False) -> Iterator[Trace]:
        """Record the forward that runs within the block, but no recomputation in a backward.

        With ``perturbs`` each output of an innermost module that is one tensor is changed by a unit
        in the last place, at random, as if it had been rounded in another way.
        """
        trace = self._trace = Trace()
        self._open, self._started, self._perturbs = [], Counter(), perturbs
        hooks = []
        for name, module in self.model.named_modules():
            before, after = module.register_forward_pre_hook, module.register_forward_hook
            hooks += [
                before(partial(self._enter, name), prepend=True, with_kwargs=True),
                before(partial(self._take, name), with_kwargs=True),
                after(partial(self._leave, name)),
            ]
        try:
            yield trace
        finally:
            for hook in hooks:
                hook.remove()

    @untraced
    def _enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Keep a module's arguments as its caller gave them, before every other hook of it."""
        arguments = dict(tensors_in(_arguments_by_name(module, args, kwargs)))
        self._open.append((name, self._started[name], arguments))
        self._started[name] += 1

    @untraced
    def _take(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record a module's arguments after its other pre-hooks, which may have replaced some."""
        from_caller = self._open[-1][2]
        caller = self._open[-2][0] if len(self._open) > 1 else name
        for path, x in tensors_in(_arguments_by_name(module, args, kwargs)):
            self._add("given", caller if from_caller.get(path) is x else name, path, x)
        from_caller.clear()  # they would stay in memory until the module returns

    @untraced
    def _leave(self, name: str, module: nn.Module, _args: object, output: Any) -> Any:
        """Record a module's output after every other hook, and return it, perturbed if asked to."""
        if self._perturbs and isinstance(output, Tensor) and not [*module.children()]:
            output = _perturbed(output)
        for path, x in tensors_in(output):
            self._add("returned", name, path, x)
        self._trace.calls[name] += 1
        self._open.pop()
        return output

    @torch.no_grad()
    def _add(self, kind: str, module: str, path: str, x: Tensor) -> None:
        """Record a tensor of the module under way, which ``module`` made."""
        is_compared = x.is_floating_point() or x.is_complex() or path in _INTEGERS
        # Scalars are sums over tokens, which each rank has of its own tokens.
        if not x.ndim or not x.numel() or not is_compared:
            return
        x = local_shard(x)  # of torch's tensor parallelism, which splits all runs alike
        shape, floor = tuple(x.shape), _FLOORS.get(x.dtype, LEAST_FLOOR)
        x = torch.view_as_real(x).flatten(-2) if x.is_complex() else x
        is_sequence = x.ndim == 1 or shape[-1] in self._lengths
        values = x.double().unsqueeze(-1) if is_sequence else self._projected(x)
        name, number, _ = self._open[-1]
        self._trace.records[name, number, kind, path] = Record(module, shape, floor, values)

    def _projected(self, x: Tensor) -> Tensor:
        """Project ``[..., features]`` to ``[..., k]``, in float64; few features stay as they are.

        The projection is the same on all ranks and in all runs.
        """
        width = x.shape[-1]
        if width <= _WIDTH:
            return x.double().clone()
        if (width, x.device) not in self._matrices:
            # Seeded by the width, on the CPU: ranks and runs project alike, and send no matrix.
            seeded = torch.Generator().manual_seed(width)
            shape = width, _WIDTH
            matrix = torch.randn(shape, generator=seeded, dtype=torch.float64, device="cpu")
            self._matrices[width, x.device] = (matrix / width**0.5).to(x.device)
        with torch.autocast(x.device.type, enabled=False):
            return x.double() @ self._matrices[width, x.device]


def _arguments_by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a forward by name, or by index where they have no name."""
    names = [*inspect.signature(type(module).forward).parameters][1:]
    names += [str(n) for n in range(len(names), len(args))]
    return dict(zip(names, args, strict=False)) | kwargs


def tensors_in(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a nested value, each with its path as ``0.hidden_states``."""
    if isinstance(value, Tensor):
        yield path, value
        return
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    for name, inner in items:
        yield from tensors_in(inner, f"{path}.{name}" if path else str(name))


def _perturbed(x: Tensor) -> Tensor:
    """Return a tensor with a quarter of its entries moved by a unit in the last place.

    The unit is one of float32 where the dtype is finer. Integers are returned as they are.
    """
    if not x.is_floating_point():
        return x
    unit = max(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps)
    draws = torch.rand_like(x)
    # The integer 0 keeps the dtype of x, which the product must have.
    steps = (draws - 1 / 8).sign().where(draws < 1 / 4, 0)
    # A sum saves nothing for the backward: a checkpoint, which computes without it, saves as much.
    return x + x.detach() * (unit * steps)
