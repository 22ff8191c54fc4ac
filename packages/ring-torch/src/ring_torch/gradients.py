"""Gradients of parameters that every rank holds, from each rank's part of the loss."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ring_core import UnsupportedError
from ring_torch.comm.ranks import Ranks, collective

_BUCKET = 1 << 26  # bytes of a message, so that few are sent and little is copied at a time


def reduce_gradients(ring: Ranks, model: nn.Module) -> None:
    """:meth:`ContextParallel.reduce_gradients`."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in weights:
        if isinstance(weight, DTensor) or (weight.grad is not None and weight.grad.is_sparse):
            kind = "a DTensor" if isinstance(weight, DTensor) else "sparse in its gradient"
            raise UnsupportedError(
                f"reduce_gradients sums dense gradients of parameters that every rank holds whole, "
                f"and one of shape {tuple(weight.shape)} is {kind}; FSDP and DDP reduce gradients "
                f"themselves, as a mean: multiply the loss by their number of ranks"
            )
    if ring.size == 1 or not weights:
        return
    used = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.int32)
    used = used.to(weights[0].device)
    with collective(ring, "reduce_gradients"):
        dist.all_reduce(used, dist.ReduceOp.MAX, group=ring.group)
    gradients = []
    for weight, is_used in zip(weights, used.tolist(), strict=True):
        if is_used:  # on some rank; this one's part may be nothing
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            gradients.append(weight.grad)
    for bucket in _each_bucket(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        if flat.dtype in {torch.bfloat16, torch.float16}:
            flat = flat.float()
        with collective(ring, "reduce_gradients"):
            dist.all_reduce(flat, group=ring.group)
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _each_bucket(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype and device, up to a size."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        fits = not bucket or (
            (bucket[0].dtype, bucket[0].device) == (gradient.dtype, gradient.device)
            and size + gradient.nbytes <= _BUCKET
        )
        if not fits:
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
