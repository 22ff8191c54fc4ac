"""Traces of a model's forward: inputs and outputs of every module, kept as a few numbers a token.

The traces of a split run and of a whole run are compared token by token. A token's features are
replaced by a random projection of them, so that traces of a large model stay small. The norm of a
difference is about that of its projection.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ring_torch.capture import untraced

#: Relative differences that rounding alone makes in a few operations, by dtype.
_FLOORS = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
#: Relative difference of other dtypes. Models of transformers compute some parts in float32
#: whatever their dtype is, so it is that of float32.
LEAST_FLOOR = 2.0**-18

#: Largest error of a split run, in multiples of the noise, that counts as rounding.
NOISE_FACTOR = 4.0

#: Numbers kept of each token: the width of the random projection.
_WIDTH = 8

#: Integer arguments that are compared. Others, such as indices of experts, may differ where two
#: scores are equal.
_INTEGERS = frozenset({
    "input", "input_ids", "position_ids", "token_type_ids", "decoder_input_ids",
    "decoder_position_ids",
})  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """Difference between a split run and a whole one, relative to the whole one's size.

    Attributes:
        error: Relative difference of the split run from the whole one.
        noise: Relative difference of a second whole run, whose attention is computed in another
            way; with modules' outputs changed by a unit in the last place.
        limit: Largest error that counts as rounding.
    """

    error: float
    noise: float
    limit: float

    @classmethod
    def of(cls, error: float, noise: float, floor: float) -> Difference:
        """Return a difference whose limit is ``NOISE_FACTOR`` times the noise plus a floor."""
        return cls(error, noise, NOISE_FACTOR * noise + floor)

    @property
    def numbers(self) -> tuple[float, float, float]:
        """Error, noise and limit, in this order."""
        return self.error, self.noise, self.limit

    @property
    def is_within(self) -> bool:
        """True if the error is small enough to be rounding."""
        return self.error <= self.limit

    def __str__(self) -> str:
        return f"{self.error:.1e} (noise {self.noise:.1e}, limit {self.limit:.1e})"


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


@dataclass(frozen=True)
class Record:
    """Tensor that a module was given or returned, as random projections of its tokens.

    Attributes:
        module: Name of the module whose code, or hooks, made it.
        shape: Shape of the tensor.
        floor: Relative difference that rounding makes in its dtype.
        projections: For each dimension that may be the sequence, the projections ``[B, n, k]`` of
            its ``n`` tokens: ``T`` of a whole sequence, ``T_local`` of this rank's part. Under
            ``None`` those of the rows of the first dimension, ``[1, n, k]``.
    """

    module: str
    shape: tuple[int, ...]
    floor: float
    projections: Mapping[int | None, Tensor]


#: A module's name, the number of its call, ``given`` or ``returned``, and a tensor's path, as
#: :func:`tensors_in` writes it, in the arguments or in the output.
Key = tuple[str, int, str, str]


@dataclass
class Trace:
    """Records of one forward, in the order in which they were made.

    Attributes:
        records: The records.
        calls: Number of calls of each module, in the order of their first returns.
    """

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
        rows: ``B`` of the batch.
    """

    def __init__(self, model: nn.Module, sequences: list[Tokens], rows: int) -> None:
        self.model, self.sequences, self.rows = model, sequences, rows
        self._matrices: dict[tuple[int, torch.device], Tensor] = {}
        self._trace = Trace()
        self._open: list[tuple[str, int, dict[str, Tensor]]] = []
        self._started: Counter[str] = Counter()
        self._perturbs = False

    @contextmanager
    def recording(self, *, perturbs: bool = False) -> Iterator[Trace]:
        """Record the forward that runs within the block, but no recomputation in a backward.

        Args:
            perturbs: Change the output of each innermost module by a unit in the last place, at
                random, as if it had been rounded in another way. Outputs that are not a single
                tensor stay as they are.
        """
        trace = self._trace = Trace()
        self._open, self._started, self._perturbs = [], Counter(), perturbs
        hooks = [
            hook for name, module in self.model.named_modules() for hook in self._hook(name, module)
        ]
        try:
            yield trace
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str, module: nn.Module) -> Iterator[Any]:
        """Register the three hooks of a module, and yield their handles."""
        yield module.register_forward_pre_hook(
            partial(self._enter, name), prepend=True, with_kwargs=True
        )
        yield module.register_forward_pre_hook(partial(self._take, name), with_kwargs=True)
        yield module.register_forward_hook(partial(self._leave, name))

    @untraced
    def _enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Keep a module's arguments as its caller gave them, before every other hook of it."""
        caller_arguments = dict(tensors_in(_arguments_by_name(module, args, kwargs)))
        # Modules call each other: the innermost one under way is the last.
        self._open.append((name, self._started[name], caller_arguments))
        self._started[name] += 1

    @untraced
    def _take(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record a module's arguments after its other pre-hooks, which may have replaced some."""
        caller_arguments = self._open[-1][2]
        arguments = dict(tensors_in(_arguments_by_name(module, args, kwargs)))
        # What hooks have replaced is their doing; all else was made by the module outside of this
        # one.
        caller = self._open[-2][0] if len(self._open) > 1 else name
        kept = {path: x for path, x in arguments.items() if caller_arguments.get(path) is x}
        self._add("given", name, {path: x for path, x in arguments.items() if path not in kept})
        self._add("given", caller, kept)
        # Kept arguments would stay in memory until the module returns.
        caller_arguments.clear()

    @untraced
    def _leave(self, name: str, module: nn.Module, _args: object, output: Any) -> Any:
        """Record a module's output after every other hook, and return it, perturbed if asked to."""
        if self._perturbs and isinstance(output, Tensor) and not [*module.children()]:
            output = _perturbed(output)
        self._add("returned", name, dict(tensors_in(output)))
        self._trace.calls[name] += 1
        self._open.pop()
        return output

    def _add(self, kind: str, module: str, tensors: Mapping[str, Tensor]) -> None:
        """Record tensors of the module under way; ``module`` made them."""
        name, number, _ = self._open[-1]
        for path, x in tensors.items():
            is_compared = x.is_floating_point() or x.is_complex() or path in _INTEGERS
            # Scalars are sums over tokens, which each rank has of its own tokens.
            if x.ndim and x.numel() and is_compared:
                self._trace.records[name, number, kind, path] = Record(
                    module, tuple(x.shape), _FLOORS.get(x.dtype, LEAST_FLOOR), self._projections(x)
                )

    @torch.no_grad()
    def _projections(self, x: Tensor) -> dict[int | None, Tensor]:
        """Return projections of a tensor's tokens for each dimension that may be the sequence."""
        x = torch.view_as_real(x) if x.is_complex() else x
        shape = x.shape
        projections: dict[int | None, Tensor] = {None: self._projected(x.reshape(1, shape[0], -1))}
        # Any dimension of these sizes may be the sequence. Which one it is shows when shapes of two
        # runs are compared.
        lengths = {
            n for sequence in self.sequences for n in (sequence.length, sequence.local_length)
        }
        for dim, size in enumerate(shape):
            if dim and size in lengths:
                rows = shape[0] if shape[0] in (1, self.rows) else 1
                by_token = x.movedim(dim, 1) if rows == shape[0] else x.movedim(dim, 0)
                projections[dim] = self._projected(by_token.reshape(rows, size, -1))
            elif not dim and size % self.rows == 0 and size // self.rows in lengths:
                projections[dim] = self._projected(x.reshape(self.rows, size // self.rows, -1))
            elif not dim and size in lengths:
                projections[dim] = self._projected(x.reshape(1, size, -1))
        return projections

    def _projected(self, x: Tensor) -> Tensor:
        """Project ``[B, n, features]`` to ``[B, n, k]``, in float64.

        The projection is the same on all ranks and in all runs. Few features are kept as they are.
        """
        width = x.shape[-1]
        if width <= _WIDTH:
            return x.double().clone()
        if (width, x.device) not in self._matrices:
            # Seeded by the width, on the CPU: ranks and runs project alike without sending a
            # matrix.
            generator = torch.Generator().manual_seed(width)
            matrix = torch.randn(
                width, _WIDTH, generator=generator, dtype=torch.float64, device="cpu"
            )
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
