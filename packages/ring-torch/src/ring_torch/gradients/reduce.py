"""Sums of all gradients of a model over ranks, after the last backward of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ring_core import UnsupportedError
from ring_core.base.arguments import not_none
from ring_torch.capture import as_stored
from ring_torch.comm.groups import check_device, default_device
from ring_torch.comm.handshake import GuardedPass, agree
from ring_torch.comm.ranks import Ranks, run_collective
from ring_torch.comm.store import CallSignature
from ring_torch.gradients.guards import (
    hook_owners,
    is_marked,
    local_shard,
    members_of,
    note_sums,
    sums_of,
)

# Most bytes of gradients in a message: few messages are sent, and little is copied at a time.
_BUCKET = 1 << 26
_FIELDS = 8  # fields of the header in which ranks compare the descriptions of their parameters


class ReducesEach:
    """Owner of hooks that sum each gradient over ranks as soon as it is made."""


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
    weights = weights_to_reduce(ranks, model, "reduce_gradients")
    if ranks.size == 1:
        return
    names, members = {weight: name for name, weight in weights.items()}, {*members_of(ranks)}
    earlier = sums_of(names)
    # A new tensor in the place of a sum may be made of it, or by the program itself: then the ranks
    # have unlike numbers, which they compare below.
    doubtful = []
    for weight, sums in earlier.items():
        times = max(len(members.intersection(summed)) for summed in sums)
        if times > 1 and is_marked(weight):
            raise ValueError(_summed_before(names[weight], times, ranks.size))
        if times > 1:
            doubtful.append(weight)
    device = next((weight.device for weight in weights.values()), default_device(ranks))
    for sent in {device, *(x.grad.device for x in names if x.grad is not None)}:
        check_device(ranks, sent)
    signature = CallSignature.of(parameter_fields(weights), "reduce_gradients")
    # All ranks compare their parameters before they send gradients.
    with GuardedPass(ranks, number, signature, device), torch.no_grad():
        agree(ranks, number, 0, signature, device)
        holders, alike = _holders(ranks, weights.values(), {*doubtful}, device)
        refusal = _refusal(weights, holders)
        if refusal is None and alike:
            refusal = ValueError(_summed_before([*weights][alike[0]], ranks.size, ranks.size))
        if refusal is None:
            _sum_all(ranks, _writable_gradients(weights.values(), holders))
    if refusal is not None:  # on all ranks alike; nothing but the kinds of gradients was sent
        raise refusal
    summed = [weight for weight, n in zip(weights.values(), holders, strict=True) if n == _GRAD]
    # Remember the summed gradients, to refuse backwards that add to them.
    kept = {weight: sums for weight, sums in earlier.items() if weight not in {*doubtful}}
    note_sums(ranks, {weight: names[weight] for weight in summed}, kept)


def _summed_before(name: str, times: int, size: int) -> str:
    """Return the error message of a gradient that would be counted several times."""
    return (
        f"reduce_gradients: the gradient of {name} is summed over {'' if times == size else f'{times} of '}"
        f"the {size} ranks of the group already, and a second time would count it {times} times. "
        f"Call reduce_gradients once a step, after the last backward; then step, then zero_grad()"
    )


#: Where ranks have a parameter's gradient: nowhere, in ``.grad``, or only in ``main_grad``.
_NOWHERE, _GRAD, _MAIN_GRAD = range(3)


def _holders(
    ranks: Ranks,
    weights: Collection[nn.Parameter],
    doubtful: Collection[nn.Parameter],
    device: torch.device,
) -> tuple[list[int], list[int]]:
    """Return where ranks have gradients, and which doubtful ones have equal numbers on all ranks.

    Returns:
        For each parameter the largest number of any rank's; and indices of parameters.
    """
    if not weights:
        return [], []
    # A rank without a gradient would otherwise send fewer numbers than its peers.
    digests = [_digest(weight) if weight in doubtful else 0 for weight in weights]
    rows = [[_holder(weight) for weight in weights], digests, [-digest for digest in digests]]
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    run_collective(
        ranks, lambda: dist.all_reduce(table, dist.ReduceOp.MAX, ranks.group, async_op=True)
    )
    holders, most, least = table.tolist()
    # The largest digest of any rank, and the smallest, if all have one.
    return holders, [n for n, (a, b) in enumerate(zip(most, least, strict=True)) if a == -b > 0]


def _digest(weight: nn.Parameter) -> int:
    """Return a number above 0 that is the same for equal gradients that are not zeros.

    It is 0 for those that are not finite, which may be equal by chance, as all NaN.
    """
    total = local_shard(not_none(weight.grad)).abs().sum(dtype=torch.float64)
    return int(total.nan_to_num(0.0, 0.0).view(torch.int64))


def _holder(weight: nn.Parameter) -> int:
    """Return where this rank has a parameter's gradient; a ``main_grad`` of zeros is none."""
    if weight.grad is not None:
        return _GRAD
    main_grad = getattr(weight, "main_grad", None)
    return _MAIN_GRAD if isinstance(main_grad, Tensor) and bool(main_grad.any()) else _NOWHERE


def _refusal(weights: Mapping[str, nn.Parameter], holders: Sequence[int]) -> ValueError | None:
    """Return the error of gradients that are not where they can be summed, or ``None``."""
    if _MAIN_GRAD in holders:
        name = [*weights][holders.index(_MAIN_GRAD)]
        return UnsupportedError(
            f"reduce_gradients sums the gradients in .grad, and that of {name} is in main_grad, with "
            f"nothing in .grad. Instead: let what keeps main_grad reduce it over a group that has the "
            f"ranks of the ring, too, as a sum; or sum it yourself, after the last backward: "
            f"torch.distributed.all_reduce(weight.main_grad, group=cp.group) for each parameter"
        )
    if not weights or _GRAD in holders:
        return None
    if any(isinstance(x, ReducesEach) for weight in weights.values() for x in hook_owners(weight)):
        return ValueError(
            "reduce_gradients: no parameter has a gradient on any rank, as reduce_each_gradient has "
            "summed them in the backward, and the optimizer has used them there: leave reduce_gradients out"
        )
    return ValueError(
        "reduce_gradients: no parameter of the model has a gradient on any rank, so there is nothing to "
        "sum, and weights of the ranks would drift apart. Call it after the backward and before "
        "zero_grad(), with the model that was trained. If optimizers step inside the backward, in hooks "
        "of gradients, call cp.reduce_each_gradient(model) once instead, before the first backward"
    )


def _writable_gradients(
    weights: Iterable[nn.Parameter], holders: Sequence[int]
) -> Iterator[Tensor]:
    """Yield this rank's shards of gradients that any rank has: zeros, if this one has none."""
    for weight, holder in zip(weights, holders, strict=True):
        if holder == _GRAD:
            gradient = weight.grad
            weight.grad = torch.zeros_like(weight) if gradient is None else as_writable(gradient)
            yield local_shard(weight.grad)


def _sum_all(ranks: Ranks, gradients: Iterable[Tensor]) -> None:
    """Sum gradients over the ranks in place, many in one message."""
    # One all-reduce for each bucket: join its gradients, sum them over the ranks, and copy the sums
    # back.
    for bucket in _each_bucket(gradients):
        flat = sum_over(ranks, torch.cat([gradient.flatten() for gradient in bucket]))
        sizes = [gradient.numel() for gradient in bucket]
        for gradient, total in zip(bucket, flat.split(sizes), strict=True):
            # In place: an optimizer, or a bucket of DDP, may hold this very tensor.
            gradient.copy_(total.view_as(gradient))


def sum_over(ranks: Ranks, x: Tensor) -> Tensor:
    """Return the sum of the ranks' tensors, in float32 or wider; it may be written into ``x``."""
    # Summed in 16 bits it would lose digits with each rank. Backends know no lazy conjugates, and
    # gloo no gaps between rows.
    wide = as_stored(x).to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    run_collective(ranks, lambda: dist.all_reduce(wide, group=ranks.group, async_op=True))
    return wide


def as_writable(gradient: Tensor) -> Tensor:
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


def weights_to_reduce(ranks: Ranks, model: object, call: str) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients are to be summed, by name, in the model's order.

    All ranks have this order: buckets then hold the same parameters everywhere.

    Args:
        ranks: The ranks of the group.
        model: The model.
        call: Name of the call, for messages.

    Raises:
        ValueError: It is no module, or its gradients are to be reduced by their mean.
        UnsupportedError: Its gradients cannot be summed.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for owner in hooks_in(model):
        if isinstance(owner, ReductionChoice):
            owner.check_reduction(model)
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    _check_model(ranks, model, weights, call)
    return weights


def _check_model(
    ranks: Ranks, model: nn.Module, weights: Mapping[str, nn.Parameter], call: str
) -> None:
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
                f"{call} sums dense gradients, and that of {name} {tuple(weight.shape)} is "
                f"sparse: make the layer with sparse=False"
            )
        if isinstance(gradient, FakeTensor):
            raise UnsupportedError(
                f"{call} sums numbers, and {name} {tuple(weight.shape)} or its gradient is a "
                f"FakeTensor, which has none: leave the call out where models are run with fake tensors"
            )
    if ranks.group is None:
        return
    group_ranks = {*dist.get_process_group_ranks(ranks.group)}
    sharded = {
        f"the module {name or type(module).__name__}": dist.get_process_group_ranks(
            module.process_group
        )
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    } | {
        f"{name} {tuple(weight.shape)}, a DTensor,": weight.device_mesh.mesh.flatten().tolist()
        for name, weight in weights.items()
        if isinstance(weight, DTensor)
    }
    for description, holders in sharded.items():
        if ranks.size > 1 and len(group_ranks & {*holders}) > 1:
            raise UnsupportedError(
                f"{call} sums gradients of parameters that each of the {ranks.size} ranks "
                f"of the group holds, and {description} is sharded over ranks of the group. FSDP reduces "
                f"such gradients itself, as a mean: leave {call} out and multiply the loss "
                f"by the number of ranks of FSDP's mesh; with hf.parallelize give reduction='mean'"
            )


def parameter_fields(weights: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return descriptions of all parameters in a few fields of a header, for ranks to compare."""
    lines = [
        f"{name} {list(local_shard(tensor).shape)} {str(tensor.dtype).removeprefix('torch.')}"
        + (
            f" {weight.placements} {weight.device_mesh.get_coordinate()}"
            if isinstance(weight, DTensor)
            else ""
        )
        for name, weight in weights.items()
        for tensor in (weight if weight.grad is None else weight.grad,)
    ]
    size = max(1, -(-len(lines) // _FIELDS))
    return {"parameters": len(lines)} | {
        f"parameters {n} to {min(n + size, len(lines)) - 1}": "; ".join(lines[n : n + size])
        for n in range(0, len(lines), size)
    }


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
