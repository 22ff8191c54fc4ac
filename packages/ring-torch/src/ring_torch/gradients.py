"""Sums of a model's gradients over ranks, and hooks that let no gradient be counted twice.

A summed gradient must be neither added to nor summed again: its old content would count once for
each rank. Two hooks on each parameter detect additions. The first runs before a gradient is
accumulated, when a sum can still be told from zeros. The second runs after, and only if a gradient
was really accumulated, which ``torch.autograd.grad`` does not do. The hooks stay on the parameter,
and hold no tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import TensorWeakRef

from ring_core import UnsupportedError
from ring_torch.capture import is_capturing, on_device
from ring_torch.comm.groups import check_device, default_device
from ring_torch.comm.handshake import GuardedPass, agree
from ring_torch.comm.ranks import Ranks, peer_errors
from ring_torch.comm.store import CallSignature

# Most bytes of gradients in a message: few messages are sent, and little is copied at a time.
_BUCKET = 1 << 26
_FIELDS = 8  # fields of the header in which ranks compare the descriptions of their parameters


class ReductionChoice(ABC):
    """Owner of a model's forward hook that knows how the model's gradients are to be reduced."""

    @abstractmethod
    def check_reduction(self, model: nn.Module) -> None:
        """Raise a ``ValueError`` unless :func:`reduce_gradients` is to sum its gradients."""


def hooks_in(model: nn.Module) -> Iterator[object]:
    """Yield the owners of methods that are forward pre-hooks of the model or of its modules."""
    for module in model.modules():
        for function in module._forward_pre_hooks.values():  # noqa: SLF001 - torch has no other list
            if (owner := getattr(function, "__self__", None)) is not None:
                yield owner


def reduce_gradients(ranks: Ranks, model: nn.Module) -> None:
    """Sum a model's gradients in place; see :meth:`ContextParallel.reduce_gradients`."""
    number = ranks.next_call()
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for owner in hooks_in(model):
        if isinstance(owner, ReductionChoice):
            owner.check_reduction(model)
    # In the order of the model, which all ranks have: buckets then hold the same parameters
    # everywhere.
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    _check_model(ranks, model, weights)
    if ranks.size == 1:
        return
    for name, weight in weights.items():
        guard = _guard_of(weight, ranks)
        if guard is not None and guard.holds(weight.grad):
            raise ValueError(
                f"reduce_gradients: the gradient of {name} is summed over the {ranks.size} ranks of "
                f"the group already, and a second time would count it {ranks.size} times. Call "
                f"reduce_gradients once a step, after the last backward; then step, then zero_grad()"
            )
    device = next((weight.device for weight in weights.values()), default_device(ranks))
    check_device(ranks, device)
    signature = CallSignature.of(_parameter_fields(weights), "reduce_gradients")
    # All ranks compare their parameters before they send gradients.
    with on_device(device), GuardedPass(ranks, number, signature), torch.no_grad():
        agree(ranks, number, 0, signature, device)
        gradients = _used_gradients(ranks, list(weights.values()), device)
        # One all-reduce for each bucket: join its gradients in float32 or wider, sum them over the
        # ranks, and copy the sums back.
        for bucket in _each_bucket([local_shard(gradient) for gradient in gradients.values()]):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            # Summed in 16 bits it would lose digits with each rank.
            flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
            with peer_errors(ranks.peers):
                dist.all_reduce(flat, group=ranks.group)
            sizes = [gradient.numel() for gradient in bucket]
            for gradient, total in zip(bucket, flat.split(sizes), strict=True):
                # In place: an optimizer, or a bucket of DDP, may hold this very tensor.
                gradient.copy_(total.view_as(gradient))
    names = {weight: name for name, weight in weights.items()}
    # Remember the summed gradients, to refuse backwards that add to them.
    sums = _Sums(gradients.values())
    for weight, gradient in gradients.items():
        guard = _guard_of(weight, ranks) or _Guard(weight, names[weight], ranks)
        guard.watch(sums, gradient)


def _used_gradients(
    ranks: Ranks, weights: list[nn.Parameter], device: torch.device
) -> dict[nn.Parameter, Tensor]:
    """Return the gradients that any rank has, all of them writable.

    Where this rank has none, it is made as zeros.
    """
    if not weights:
        return {}
    # A rank without a gradient would otherwise send fewer numbers than its peers.
    used = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.int32)
    used = used.to(device)
    # A parameter is used if any rank has a gradient for it.
    with peer_errors(ranks.peers):
        dist.all_reduce(used, dist.ReduceOp.MAX, group=ranks.group)
    gradients = {}
    for weight, is_used in zip(weights, used.tolist(), strict=True):
        if is_used:
            gradient = weight.grad
            weight.grad = torch.zeros_like(weight) if gradient is None else _as_writable(gradient)
            gradients[weight] = weight.grad
    return gradients


def _as_writable(gradient: Tensor) -> Tensor:
    """Return a gradient as it is, or a copy if sums cannot be written into it.

    Backwards make no such gradients, but a program may set one: an inference tensor, or a view in
    which several elements share memory, as of ``expand`` and ``unfold``.
    """
    shard, end = local_shard(gradient), 0
    has_overlap = False
    # By ascending strides, each dimension has to step over all that those before it reach.
    for stride, size in sorted(zip(shard.stride(), shard.shape, strict=True)):
        has_overlap |= size > 1 and stride <= end
        end += stride * (size - 1)
    if not has_overlap and not shard.is_inference():
        return gradient
    return gradient.clone(memory_format=torch.contiguous_format)


def _check_model(ranks: Ranks, model: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
    """Refuse gradients without numbers, sparse ones, and those that FSDP reduces over this group.

    A ``DTensor`` is allowed if its mesh has no other rank of this group, as with tensor parallelism
    beside context parallelism: its gradients are summed shard by shard.

    Raises:
        UnsupportedError: The model has such a gradient.
    """
    for name, weight in weights.items():
        gradient = local_shard(weight if weight.grad is None else weight.grad)
        if gradient.is_sparse:
            raise UnsupportedError(
                f"reduce_gradients sums dense gradients, and that of {name} {tuple(weight.shape)} is "
                f"sparse: make the layer with sparse=False"
            )
        if isinstance(gradient, FakeTensor):
            raise UnsupportedError(
                f"reduce_gradients sums numbers, and {name} {tuple(weight.shape)} or its gradient is a "
                f"FakeTensor, which has none: leave the call out where models are run with fake tensors"
            )
    if ranks.group is None:
        return
    group_ranks = {*dist.get_process_group_ranks(ranks.group)}
    sharded = {
        f"the module {name or type(module).__name__}": dist.get_process_group_ranks(module.process_group)
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    } | {
        f"{name} {tuple(weight.shape)}, a DTensor,": weight.device_mesh.mesh.flatten().tolist()
        for name, weight in weights.items()
        if isinstance(weight, DTensor)
    }  # fmt: skip
    for description, holders in sharded.items():
        if ranks.size > 1 and len(group_ranks & {*holders}) > 1:
            raise UnsupportedError(
                f"reduce_gradients sums gradients of parameters that each of the {ranks.size} ranks "
                f"of the group holds, and {description} is sharded over ranks of the group. FSDP reduces "
                f"such gradients itself, as a mean: leave reduce_gradients out and multiply the loss "
                f"by the number of ranks of FSDP's mesh; with hf.parallelize give reduction='mean'"
            )


def _parameter_fields(weights: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return descriptions of all parameters in a few fields of a header, for ranks to compare."""
    lines = [
        f"{name} {list(local_shard(tensor).shape)} {str(tensor.dtype).removeprefix('torch.')}"
        + (f" {weight.placements} {weight.device_mesh.get_coordinate()}" if isinstance(weight, DTensor) else "")
        for name, weight in weights.items()
        for tensor in (weight if weight.grad is None else weight.grad,)
    ]  # fmt: skip
    size = max(1, -(-len(lines) // _FIELDS))
    return {"parameters": len(lines)} | {
        f"parameters {n} to {min(n + size, len(lines)) - 1}": "; ".join(lines[n : n + size])
        for n in range(0, len(lines), size)
    }


def local_shard(x: Tensor) -> Tensor:
    """Return this rank's shard of a ``DTensor``; any other tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def _each_bucket(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of successive gradients of one dtype and device, of at most ``_BUCKET`` bytes.

    A gradient of more is a list by itself.
    """
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        # A sum over ranks needs one dtype and device; the size bounds the copy.
        if bucket and (
            (bucket[0].dtype, bucket[0].device) != (gradient.dtype, gradient.device)
            or size + gradient.nbytes > _BUCKET
        ):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket


_unserializable: Callable[[Any], Any] = unserializable_hook  # torch gives it no types


class _Sums:
    """Gradients that hold sums over ranks since one call of ``reduce_gradients``.

    Args:
        gradients: The gradients, of which weak references are kept.
    """

    def __init__(self, gradients: Iterable[Tensor]) -> None:
        self._refs = {id(gradient): TensorWeakRef(gradient) for gradient in gradients}

    def holds(self, key: int) -> bool:
        """Return True if the gradient with this ``id`` still holds its sum, not zeros."""
        if key in self._refs:
            self._forget_zeros()
        return key in self._refs

    def _forget_zeros(self) -> None:
        """Forget gradients that were freed or zeroed.

        The first query checks all gradients at once, so the host waits for the GPU only once. It
        does not wait at all if ``zero_grad`` has set gradients to ``None``.
        """
        # Freed gradients are gone with their sums: the next backward makes new ones.
        alive = [(key, x) for key, ref in self._refs.items() if (x := ref()) is not None]
        alive.sort(key=lambda item: str(item[1].device))
        refs_of_sums: dict[int, TensorWeakRef] = {}
        with torch.no_grad():
            for _, items in groupby(alive, key=lambda item: item[1].device):
                on_device = list(items)
                flags = torch.stack([local_shard(x).any() for _, x in on_device]).tolist()
                sums = (key for (key, _), is_sum in zip(on_device, flags, strict=True) if is_sum)
                refs_of_sums |= {key: self._refs[key] for key in sums}
        self._refs = refs_of_sums


class _Guard:
    """Hooks of one parameter that refuse additions to its summed gradient, for one group.

    Args:
        weight: The parameter.
        name: Its name, for the error message.
        ranks: Ranks over which gradients are summed.
    """

    def __init__(self, weight: nn.Parameter, name: str, ranks: Ranks) -> None:
        self.name, self.ranks = name, ranks
        self._sums = _Sums(())
        self._gradient: TensorWeakRef | None = None
        self._key = 0
        self._held = False  # the gradient was a sum before the accumulation under way
        weight.register_hook(self.before)
        weight.register_post_accumulate_grad_hook(self.after)

    def watch(self, sums: _Sums, gradient: Tensor) -> None:
        """Remember a gradient that was summed, and the sums of its call."""
        self._sums, self._gradient, self._key = sums, TensorWeakRef(gradient), id(gradient)

    @property
    def summed(self) -> Tensor | None:
        """Gradient that was summed, or ``None`` once nothing else holds it."""
        return None if self._gradient is None else self._gradient()

    def holds(self, gradient: Tensor | None) -> bool:
        """Return True if this is the gradient that was summed, and it was not zeroed since."""
        return gradient is not None and self.summed is gradient and self._sums.holds(self._key)

    @_unserializable
    def before(self, _: Tensor) -> None:
        """Note, before a gradient is accumulated, if the parameter's gradient is a sum."""
        # Asking means waiting for the GPU, which a graph that is being captured cannot.
        self._held = not is_capturing() and self.holds(self.summed)

    @_unserializable
    def after(self, weight: Tensor) -> None:
        """Refuse a gradient that was added to a sum.

        Under ``create_graph`` the total is a new tensor, which requires a gradient.
        """
        held, self._held = self._held, False
        gradient = weight.grad
        if held and gradient is not None and (gradient is self.summed or gradient.requires_grad):
            raise ValueError(
                f"this backward adds to the gradient of {self.name}, which reduce_gradients has "
                f"summed over the {self.ranks.size} ranks of the group: the next reduction would count "
                f"that sum {self.ranks.size} times. Call reduce_gradients once a step, after the last "
                f"backward; then step, then zero_grad(). The gradient is spoiled now: zero_grad()"
            )


def _guard_of(weight: Tensor, ranks: Ranks) -> _Guard | None:
    """Return the hooks that a parameter has for a group, or ``None``."""
    hooks = (weight._backward_hooks or {}).values()  # noqa: SLF001 - torch has no other list
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return next((x for x in owners if isinstance(x, _Guard) and x.ranks == ranks), None)
