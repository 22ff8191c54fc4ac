"""Checks of arguments, and sums over ranks, that losses and log-probabilities have in common."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack  # torch has no public name for it
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from ring_core import UnsupportedError, checks
from ring_core.base.arguments import is_integer
from ring_torch.capture import is_traced
from ring_torch.compiled.static import size_of
from ring_torch.compiled.unshard import unshard_in_graph
from ring_torch.sharding import Sharding, UnshardGrad, length_of
from ring_torch.tensor_specs import check_local
from ring_torch.training.part import as_in_autocast


def refuse_transforms(what: str, instead: str) -> None:
    """Refuse a call inside a transform of ``torch.func``, or where gradients are forward-mode.

    Raises:
        UnsupportedError: One is under way.
    """
    if torch.compiler.is_compiling():
        return
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:  # noqa: SLF001 - no public way
        raise UnsupportedError(
            f"{what} inside vmap, grad and the other transforms of torch.func, or a dual_level of "
            f"forward_ad. Instead: {instead}; or use torch.autograd (backward())"
        )


def without_padding(
    sharding: Sharding, name: str, x: Tensor, fill: int, seq_len: int | None
) -> Tensor:
    """Return numbers of this rank's tokens ``[..., T_local]``, those of padding replaced.

    Integers become int64, as another dtype may not hold ``fill``: in uint8 -100 is class 156. Real
    numbers become float32 or wider.
    """
    length = length_of(x, -1, seq_len, size_of(sharding.group))
    x = x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x.long()
    if length is None:
        return x
    layout = checks.padded_layout(length, x.shape[-1], sharding.layout, sharding.ranks.size, name)
    # Padding lies behind a rank's tokens: everything from there on is replaced.
    tokens = sum(
        max(0, min(-((run.global_start - length) // run.stride), run.length))
        for run in layout.runs(sharding.ranks.rank)
    )
    return x.masked_fill(torch.arange(x.shape[-1], device=x.device) >= tokens, fill)


class Head(NamedTuple):
    """Arguments of a loss without logits, checked: what the head is applied to, and the head.

    Attributes:
        hidden: ``[N, dim]``, in the dtype in which autocast would apply the head.
        weight: ``[V, dim]``.
        bias: ``[V]``.
        labels: int64 ``[N]``.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor


def head_of(
    name: str, sharding: Sharding, hidden: Tensor, head_weight: Tensor, bias: Tensor | None,
    labels: Tensor, ignore_index: int, seq_len: int | None,
) -> Head:  # fmt: skip
    """Check the arguments of a function that applies a head to a few tokens at a time.

    Args:
        name: The function's name.
        sharding: The ranks that share the sequence, and its layout.
        hidden: ``[..., T_local, dim]``.
        head_weight: ``[V, dim]``.
        bias: ``[V]``.
        labels: Integers ``[..., T_local]``; those of padding are ignored.
        ignore_index: Label of tokens that do not count.
        seq_len: Length of the whole sequence, if there is padding behind it.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: One is a ``DTensor``, labels are probabilities, or a transform of
            ``torch.func`` is under way.
    """
    refuse_transforms(f"{name} cannot run", "compute the logits, and cross_entropy with count=")
    check_rows("hidden", hidden, labels)
    check_head(hidden, head_weight, bias)
    check_ignored(ignore_index)
    labels = without_padding(sharding, "labels", labels, ignore_index, seq_len)
    # The operation that applies the head is one kernel to autocast, so it would not cast inside.
    cast = as_in_autocast
    return Head(
        cast(hidden).flatten(0, -2), cast(head_weight), None if bias is None else cast(bias),
        labels.flatten(),
    )  # fmt: skip


def check_ignored(ignore_index: object) -> None:
    """Check ``ignore_index``: a ValueError if it is no integer."""
    if not is_integer(ignore_index):
        raise ValueError(f"ignore_index must be an integer, got {ignore_index!r}")


def _checked_tensor(name: str, x: object) -> Tensor:
    """Return an argument that is a dense tensor of this rank's own, and refuse any other."""
    if isinstance(x, DTensor):
        raise UnsupportedError(
            f"{name} is a DTensor, whose parts other ranks hold. Of FSDP: call this inside the "
            f"forward of the module that has the weight, where FSDP has joined it. Of tensor "
            f"parallelism: pass {name}.full_tensor(), or use loss_parallel() of torch"
        )
    return check_local(name, x, has_numbers=True)


def check_rows(name: str, rows: object, row_labels: object) -> int:
    """Check rows and their labels; return the size of a row."""
    x, labels = _checked_tensor(name, rows), _checked_tensor("labels", row_labels)
    if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
        raise ValueError(f"{name} must be real, of 16 bits or more, got {x.dtype}")
    if labels.dtype.is_floating_point:
        raise UnsupportedError(
            "labels must be integers, the class of each token; probabilities of classes are not "
            "supported: compute that loss from the logits, and divide its sum by the number of "
            "tokens of all ranks"
        )
    if labels.dtype == torch.bool or labels.dtype.is_complex:
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    if x.ndim < 2 or x.shape[:-1] != labels.shape:
        raise ValueError(
            f"{name} must be [..., T_local, n] and labels [..., T_local], got {tuple(x.shape)} and "
            f"labels {tuple(labels.shape)}: a label for each row"
        )
    if x.device != labels.device:
        raise ValueError(f"{name} is on {x.device} and labels on {labels.device}: move one")
    return x.shape[-1]


def check_head(hidden: Tensor, weight: object, bias: object) -> int:
    """Check the weights of a head; return its number of classes."""
    head_weight = _checked_tensor("head_weight", weight)
    if head_weight.ndim != 2 or head_weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"head_weight must be [V, dim], as of torch.nn.Linear, with dim={hidden.shape[-1]} of "
            f"hidden, got {tuple(head_weight.shape)}"
        )
    classes = head_weight.shape[0]
    if bias is not None:
        check_classes("bias", bias, classes)
    autocast = torch.is_autocast_enabled(hidden.device.type)
    for name, x in (("head_weight", head_weight), ("bias", bias)):
        if isinstance(x, Tensor) and not (
            x.device == hidden.device and (autocast or x.dtype == hidden.dtype)
        ):
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, and hidden {hidden.dtype} on {hidden.device}: "
                f"they must be alike"
            )
    return classes


def check_classes(name: str, numbers: object, classes: int) -> None:
    """Check a tensor with a real number for each class."""
    x = _checked_tensor(name, numbers)
    if not x.dtype.is_floating_point or x.shape != (classes,):
        raise ValueError(
            f"{name} must be real, [{classes}]: a number for each class, got {x.dtype} "
            f"{tuple(x.shape)}"
        )


def sum_of_ranks(sharding: Sharding, row: Tensor, grad: UnshardGrad | None) -> Tensor:
    """Return the sum of the ranks' rows of numbers, ``[n]``, with the gradient of ``unshard``.

    Every rank gathers all rows and adds them up in the same order: all get the same numbers.
    """
    return of_ranks(sharding, row[None], grad).sum(0)


def of_ranks(sharding: Sharding, x: Tensor, grad: UnshardGrad | None) -> Tensor:
    """Return the ranks' tensors of one shape, behind each other in the order of ranks."""
    sharding.check_group()
    if is_traced(x):
        return unshard_in_graph(sharding.group, "contiguous", x, 0, grad, None)
    return Sharding(sharding.group, "contiguous").unshard(x, dim=0, grad=grad)
