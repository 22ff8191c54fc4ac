"""Refusals of derivatives that ring attention does not have, raised when a backward begins."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import (  # torch has no public name for these
    is_batchedtensor,
    is_legacy_batchedtensor,
)

from ring_core import UnsupportedError

#: Error text when compiled autograd meets a backward that cannot be traced.
NEEDS_COMPILED_FORWARD = (
    "compiled autograd traces messages between ranks only as operations of a compiled forward. With "
    "fullgraph=True compile what calls attention, unshard, a movement or a recurrent layer, too; or "
    "leave out fullgraph=True"
)

_LIBRARY = torch.library.Library("ring_torch", "FRAGMENT")


def check_backward(*grads: Tensor | None) -> None:
    """Refuse a backward under ``create_graph=True``, or one whose gradients are a batch under vmap.

    Autograd runs a backward with gradients enabled only under ``create_graph=True``. A backward
    inside another, as reentrant checkpointing starts, has a setting of its own.

    Args:
        *grads: The incoming gradients.

    Raises:
        UnsupportedError: The backward is one of these; nothing was sent.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "ring attention has no second derivative, and this backward runs under "
            "create_graph=True (as in gradient penalties, hvp and hessian of torch.autograd.functional). Instead: "
            "pass create_graph=False, or use torch's own attention for what is differentiated twice"
        )
    check_no_batch(*grads)


def check_no_batch(*grads: Tensor | None) -> None:
    """Refuse a backward whose gradients are a batch under vmap.

    Raises:
        UnsupportedError: They are one; nothing was sent.
    """
    if torch.compiler.is_compiling():  # compiled autograd, which cannot trace the questions below
        return
    for grad in grads:
        if grad is not None and (is_legacy_batchedtensor(grad) or is_batchedtensor(grad)):
            refuse_batch()


def refuse_batch(*_: Any) -> NoReturn:
    """Refuse vmap over a backward. It is also the vmap rule of operations: :func:`refuse_batches`.

    Raises:
        UnsupportedError: Always; nothing was sent.
    """
    raise UnsupportedError(
        "the backward of ring attention, of unshard and of movements has no rule for vmap, which is_grads_batched=True "
        "and jacobian(vectorize=True) use. Instead: call torch.autograd.grad once for each gradient, with "
        "retain_graph=True"
    )


def refuse_batches(name: str, operation: Any) -> None:
    """Refuse batches of gradients in an operation of ours, under both of torch's vmaps.

    ``is_grads_batched=True`` uses the older one, whose dispatch key is "Batched". ``name`` is that
    of the ``operation`` in the library ``ring_torch``.
    """
    operation.register_vmap(refuse_batch)
    _LIBRARY.impl(name, refuse_batch, "Batched")
