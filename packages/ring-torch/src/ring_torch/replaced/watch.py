"""Forwards under way: which of them called attention, and which wrote it out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import has_static_value

from ring_torch.capture import constant_in_graphs
from ring_torch.comm.ranks import Ranks

#: Steps of attention that is written out: the product of queries and keys, its softmax, and the
#: product with the values.
Step = Literal["scores", "softmax", "values"]
_STEPS = {"scores", "softmax", "values"}
#: Up to this size two axes are often equal by chance.
_SMALL = 4


@dataclass(eq=False)
class _Forward:
    """Record of one module's forward.

    Attributes:
        name: Name of the module.
        is_watched: True if its keys are split, so that a call has to attend over the ring.
        has_grad: True if gradients were enabled when it began.
        sent: Number of calls over the ring's group before it began.
        answered: Number of calls over it that answered SDPA, of modules inside included.
        has_called: True once it has called attention, of whatever scope.
        steps: For each size that two axes of a result had, the steps of written attention.
    """

    name: str
    is_watched: bool
    has_grad: bool
    sent: int
    answered: int = 0
    has_called: bool = False
    steps: dict[int, set[Step]] = field(default_factory=dict)


class _Thread(threading.local):
    """Record of one thread.

    Attributes:
        forwards: Forwards under way, the outermost first.
        written: Modules that wrote attention out in the outermost forward, with the sizes.
        inputs: Batch and length of the outermost forward's inputs.
        calls: Batch, length and module of calls over the ring.
    """

    def __init__(self) -> None:
        self.forwards: list[_Forward] = []
        self.written: list[tuple[str, dict[int, set[Step]]]] = []
        self.inputs: tuple[tuple[int, int, bool], ...] = ()
        self.calls: list[tuple[int, int, str]] = []


class Watch:
    """Finds modules that attend to a rank's keys alone, by what their forwards do.

    The number of tokens that a rank holds is that of the calls over the ring in the same outermost
    forward, or where there is none, the second dimension of its inputs. Methods run while
    ``torch.compile`` traces, and not in graphs; sizes that a graph leaves open are not looked at.

    Args:
        ranks: Returns the ranks of the ring.
        widths: Sizes of the model's parameters. Where a rank holds as many tokens, or very few, a
            softmax may be that of a router, so all three steps of attention must have been seen.
    """

    def __init__(self, ranks: Callable[[], Ranks], widths: frozenset[int]) -> None:
        self._ranks, self._widths, self._thread = ranks, widths, _Thread()

    @constant_in_graphs
    def enter(
        self, name: str, is_watched: bool, inputs: tuple[tuple[int, int, bool], ...] | None
    ) -> int:
        """Note that a module's forward begins.

        Args:
            name: Name of the module.
            is_watched: True if its keys are split.
            inputs: Of the outermost forward, what :func:`sizes_of` returns; of others ``None``.

        Returns:
            How many forwards are around it.
        """
        thread = self._thread
        if inputs is not None:  # what an error in an earlier forward left behind
            thread.forwards.clear()
        if not thread.forwards:
            thread.inputs = inputs or ()
            thread.written, thread.calls = [], []
        forward = _Forward(name, is_watched, torch.is_grad_enabled(), self.sent())
        thread.forwards.append(forward)
        return len(thread.forwards) - 1

    @constant_in_graphs
    def leave(self, depth: int) -> str | None:
        """Note that the forward ends that ``enter`` returned ``depth`` for.

        Returns:
            Why the result of the outermost forward is wrong, if it is.
        """
        thread = self._thread
        if len(thread.forwards) <= depth:  # a graph that was traced in parts
            return None
        forward = thread.forwards[depth]
        del thread.forwards[depth:]
        is_written = forward.is_watched and forward.steps and not forward.has_called
        # Modules that send keys by themselves may compute with them what they like.
        if is_written and self.sent() - forward.sent == forward.answered:
            thread.written.append((forward.name, forward.steps))
        return self._verdict() if not depth and self._ranks().size > 1 else None

    def _verdict(self) -> str | None:
        """Return what is wrong with the outermost forward, which has ended."""
        thread = self._thread
        lengths = {length for _, length, _ in thread.calls or thread.inputs}
        for name, steps in thread.written:
            for size in lengths & steps.keys():
                is_plain = size > _SMALL and size not in self._widths
                if is_plain or steps[size] == _STEPS:
                    return (
                        f"{name}: it writes attention out ({', '.join(sorted(steps[size]))} over two axes of the "
                        f"{size} tokens of this rank) and calls no scaled_dot_product_attention, so it attends "
                        f"to this rank's keys alone. Let it call scaled_dot_product_attention; if it is meant "
                        f"to attend within the rank, name the module in local="
                    )
        return None

    @constant_in_graphs
    def call(self, batch: int, length: int, *, on_ring: bool) -> str | None:
        """Note a call of SDPA by the innermost forward; a length of 0 is not known.

        Returns:
            Why the call cannot be meant to attend over the ring, if it cannot.
        """
        thread = self._thread
        if thread.forwards:
            thread.forwards[-1].has_called = True
        if not on_ring or not length or self._ranks().size == 1:
            return None
        name = thread.forwards[-1].name if thread.forwards else ""
        inputs = [
            (b, t, "the inputs")
            for b, t, is_sequence in thread.inputs
            if is_sequence and t > length and (b, t) != (length, batch)
        ]
        for other_batch, other, source in (*thread.calls, *inputs):
            if other != length and other_batch * other == batch * length:
                return (
                    f"it attends to {length} tokens in a batch of {batch}, and {source} had {other} in a batch of "
                    f"{other_batch}: windows or frames, folded into the batch. Name the module of those in "
                    f"local= if they attend within themselves (with layout='contiguous', so that a rank holds "
                    f"whole ones), or in sharded_keys= if each is a sequence whose tokens are split"
                )
        thread.calls.append((batch, length, name))
        return None

    @constant_in_graphs
    def answered(self, before: int) -> None:
        """Note that SDPA was answered over the ring; ``before`` is what :meth:`sent` returned."""
        calls = self.sent() - before
        for forward in self._thread.forwards:
            forward.answered += calls

    @constant_in_graphs
    def sent(self) -> int:
        """Return the number of calls over the ring's group so far."""
        return self._ranks().state.calls

    @constant_in_graphs
    def step(self, step: Step, size: int) -> None:
        """Note a step of attention that is written out, over two axes of a size."""
        if self._thread.forwards:
            self._thread.forwards[-1].steps.setdefault(size, set()).add(step)

    def has_grad(self) -> bool:
        """Return True if gradients were enabled when the innermost forward began."""
        forwards = self._thread.forwards
        return not forwards or forwards[-1].has_grad


def sizes_of(arguments: Iterable[Any]) -> tuple[tuple[int, int, bool], ...]:
    """Return batch and length of each tensor, and True for tokens or their features."""
    return tuple(
        (x.shape[0], x.shape[1], x.ndim > 2 or not (x.is_floating_point() or x.dtype == torch.bool))
        for x in arguments
        if isinstance(x, Tensor) and x.ndim > 1 and sizes_are_known(x.shape[0], x.shape[1])
    )


def steps_of(
    func_is_product: bool, args: tuple[Any, ...], kwargs: Any, out: Any
) -> Iterator[tuple[Step, int]]:
    """Yield the steps of written attention that a product or a softmax may be, with their sizes."""
    values = [*_flat(args), *_flat(kwargs.values())]
    if not isinstance(out, Tensor) or not out.ndim or not sizes_are_known(*out.shape):
        return
    if not func_is_product:
        dim = next((x for x in values if isinstance(x, int)), -1)
        yield from _equal("softmax", out.shape, out.shape[dim])
        return
    operands = [x for x in values if isinstance(x, Tensor)][-2:]
    if len(operands) < 2 or any(x.ndim < 2 or _is_weight(x) for x in operands):
        return
    a, b = operands
    if isinstance(values[0], str):
        left, _, result = values[0].replace(" ", "").partition("->")
        x, _, y = left.partition(",")
        if not {*left} - {*result, ",", "."}:  # nothing is summed, as of angles by positions
            return
        first = int(x[:1] == y[:1] == result[:1])  # of a batch
    elif a.ndim == b.ndim and a.shape[-1] > 1:
        first = a.ndim - 2
    else:
        return
    yield from _equal("scores", out.shape[first:])
    yield from _equal("values", a.shape[first:])
    yield from _equal("values", b.shape[first:])


def _equal(step: Step, shape: Any, of: int | None = None) -> Iterator[tuple[Step, int]]:
    """Yield a step with each size that two axes of a shape have, or with a given one if they do."""
    for n, size in enumerate(shape):
        if size > 1 and size in shape[n + 1 :] and of in (None, size):
            yield step, size


def _flat(args: Iterable[Any]) -> Iterator[Any]:
    """Yield arguments, and those in lists among them."""
    for x in args:
        if isinstance(x, list | tuple):
            yield from x
        else:
            yield x


def _is_weight(x: Tensor) -> bool:
    """Return True for a parameter, or a view of one."""
    if isinstance(x, nn.Parameter):
        return True
    return not torch.compiler.is_compiling() and isinstance(x._base, nn.Parameter)  # noqa: SLF001


def sizes_are_known(*sizes: int) -> bool:
    """Return True unless a graph that is being traced leaves a size open."""
    return not torch.compiler.is_compiling() or all(has_static_value(x) for x in sizes)
