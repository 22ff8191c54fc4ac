"""Calls of flash-attn-4 by its public functions, for versions whose private parts are not known.

Public functions return new tensors, and differentiate only their own forward, while the backward of
an item starts from the final ``out`` and ``lse``. So that backward runs the item's forward again.
The item's weight in the final result is ``exp(item_lse - lse)``, and the derivative of the weight
is passed on as a gradient of ``item_lse``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ring_torch.kernels.library import DOCUMENT_ARGUMENTS, LaunchOptions


def is_overwritten() -> bool:
    """Return True if flash-attn 2.8 has put its older ``flash_attn/cute`` over flash-attn-4's."""
    return "return_lse" not in signature(_module().flash_attn_func).parameters


def forward(q: Tensor, k: Tensor, v: Tensor, options: LaunchOptions) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` of an item, in new tensors."""
    sinks = None if options.mods is None else options.mods.sinks
    with torch.no_grad():
        out, lse = _function_of_launch(options)(q, k, v, learnable_sink=sinks)[:2]
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: LaunchOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return an item's ``(dq, dk, dv)`` from the final ``out`` and ``lse``, in new tensors."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    # Without sinks: they are in the final lse, so the item weighs less, as beside another item.
    with torch.enable_grad():
        item_out, item_lse = _function_of_launch(options)(*leaves)[:2]
    # The final out is the sum of weight * item_out over the items. A row that sees nothing, in this
    # item or at all, has weight 0.
    weight = (item_lse.detach() - lse).exp().masked_fill(lse == -torch.inf, 0.0)
    rows = weight.transpose(-1, -2).unsqueeze(-1)
    # More weight for this item is less for the others: d out / d item_lse = weight * difference.
    difference = torch.where(rows > 0, item_out.detach().float() - out, 0.0)
    dlse = weight * (dout * difference).sum(-1).transpose(-1, -2)
    dq, dk, dv = torch.autograd.grad(
        (item_out, item_lse), leaves, ((rows * dout).to(item_out.dtype), dlse.contiguous())
    )
    return dq, dk, dv


def _function_of_launch(options: LaunchOptions) -> Callable[..., Any]:
    """Return the library's function with the options of a launch."""
    module, documents = _module(), options.documents
    function = module.flash_attn_func if documents is None else module.flash_attn_varlen_func
    return partial(
        function, softmax_scale=options.scale, window_size=options.window,
        softcap=options.softcap or 0.0, deterministic=options.deterministic, return_lse=True,
        **dict(zip(DOCUMENT_ARGUMENTS, documents or (), strict=False)),
    )  # fmt: skip


@cache
def _module() -> Any:
    """Import the module that has flash-attn-4's public functions."""
    return import_module("flash_attn.cute")
