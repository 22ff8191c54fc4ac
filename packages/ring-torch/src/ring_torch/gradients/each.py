"""Sums of gradients over ranks inside of the backward, each as soon as it is made.

For optimizers that step in the backward: a hook on each parameter, before the optimizer's, sums its
gradient. Ranks need not come to the same parameters, as of experts that none of their tokens
takes. A rank that waited for others at such a parameter would keep them waiting in the backward of
attention, which all ranks compute together. So::

    before the first message or sum of a backward    ranks tell each other which parameters their
                                                     backwards come to
    hook of a parameter that all of them come to     header, all-reduce
    hook of another one                              the ranks that come to it exchange gradients,
                                                     the others go on
    end of the backward                              the others get these sums, and run the
                                                     parameter's other hooks

What ranks cannot know before, as another order of parameters, is compared by the headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakMethod, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import _get_grad_fn_or_grad_acc
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import TensorWeakRef

from ring_core import UnsupportedError
from ring_core.base.arguments import not_none
from ring_torch.capture import as_stored, is_capturing
from ring_torch.comm.exchange import exchange
from ring_torch.comm.groups import check_device, default_device
from ring_torch.comm.handshake import GuardedPass, agree, agree_in_part
from ring_torch.comm.ranks import Ranks, run_collective
from ring_torch.comm.store import CallSignature
from ring_torch.comm.whole import acts_alone
from ring_torch.gradients.guards import (
    Guard,
    hook_owners,
    local_shard,
    members_of,
    note_sums,
    unserializable,
    without_zeros,
)
from ring_torch.gradients.reduce import (
    ReducesEach,
    as_writable,
    parameter_fields,
    sum_over,
    weights_to_reduce,
)

_CALL = "reduce_each_gradient"
_COMES, _HOLDS = 1, 2  # a rank's backward comes to a parameter; its gradient is there already


class ReductionHandle:
    """Hooks that sum each gradient of a model over ranks as soon as a backward has made it.

    :meth:`ContextParallel.reduce_each_gradient` returns it.
    """

    def __init__(self, hooks: _Hooks | None) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        """Take the hooks off; all ranks do so at the same time, outside of a backward."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None


def reduce_each_gradient(ranks: Ranks, model: nn.Module) -> ReductionHandle:
    """Put the hooks on a model; see :meth:`ContextParallel.reduce_each_gradient`."""
    number = ranks.next_call()
    weights = weights_to_reduce(ranks, model, _CALL)
    _check_hooks(model, weights)
    if ranks.size == 1:
        return ReductionHandle(None)
    device = next((weight.device for weight in weights.values()), default_device(ranks))
    for sent in {device, *(weight.device for weight in weights.values())}:
        check_device(ranks, sent)
    signature = CallSignature.of(parameter_fields(weights), _CALL)
    with GuardedPass(ranks, number, signature, device):
        agree(ranks, number, 0, signature, device)
    return ReductionHandle(_Hooks(ranks, number, model, weights, device))


def _check_hooks(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
    """Refuse models whose gradients no hook sees whole, or that are summed by hooks already.

    Raises:
        UnsupportedError: It is such a model.
    """
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule | FullyShardedDataParallel | DistributedDataParallel):
            raise UnsupportedError(
                f"{_CALL}: {name or 'the model'} is wrapped by {type(module).__name__}, which reduces "
                f"gradients behind the hooks of parameters, where optimizers that step in the backward "
                f"have stepped. Instead: step after the backward (with DDP and FSDP see the page 'Losses "
                f"and gradients'); or leave the wrapper out, and sum over a group of all its ranks"
            )
    for name, weight in weights.items():
        if any(isinstance(owner, ReducesEach) for owner in hook_owners(weight)):
            raise UnsupportedError(
                f"{_CALL}: the gradient of {name} is summed by such hooks already. Instead: keep one "
                f"handle a model, or remove() the first; for sums over several axes of a mesh use one "
                f"group of all their ranks, as mesh['dp', 'cp']._flatten()"
            )
        if isinstance(getattr(weight, "main_grad", None), Tensor):
            raise UnsupportedError(
                f"{_CALL}: the gradient of {name} goes to its main_grad, which hooks of parameters may "
                f"see before it is whole. Instead: let what keeps main_grad reduce it, over a group that "
                f"has the ranks of the ring, too"
            )


@dataclass
class _Backward:
    """Run of autograd's engine, as all ranks know it.

    Attributes:
        number: Its number, counted alike on all ranks.
        comers: Ranks that come to each parameter, ascending.
        sums: Gradients of parameters that some ranks come to, summed, until the end.
    """

    number: int
    comers: list[tuple[int, ...]] = field(default_factory=list)
    sums: dict[int, Tensor] = field(default_factory=dict)


class _Hooks(ReducesEach):
    """The hooks of a model's parameters, and the backwards under way.

    Args:
        ranks: Ranks of the group.
        number: Number of the call, which is in the names of its passes: numbers of these count
            backwards, as ranks make other calls in unlike places of a backward.
        model: The model.
        weights: Its parameters that have gradients, by name.
        device: Device of the numbers that ranks tell each other.
    """

    def __init__(
        self,
        ranks: Ranks,
        number: int,
        model: nn.Module,
        weights: Mapping[str, nn.Parameter],
        device: torch.device,
    ) -> None:
        self._pass = f"{_CALL}[{number}]"
        self._ranks, self._device = ranks, device
        # Weakly, as its parameters hold these hooks.
        self._model = ref(model)
        self._names = [*weights]
        self._weights = [TensorWeakRef(weight) for weight in weights.values()]
        self._index = {id(weight): n for n, weight in enumerate(weights.values())}
        self._count = 0
        self._backwards: dict[int, _Backward] = {}  # by the engine's number of its run
        self._handles = [
            handle
            for weight in weights.values()
            for handle in (weight.register_hook(self._before), _put_first(weight, self._sum))
        ]
        ranks.state.before_passes[id(self)] = WeakMethod(self._begin)

    def remove(self) -> None:
        """Take the hooks off."""
        self._ranks.state.before_passes.pop(id(self), None)
        for handle in self._handles:
            handle.remove()

    def _begin(self) -> None:
        """Let ranks tell each other, once in a backward, which parameters they come to."""
        run = torch._C._current_graph_task_id()  # noqa: SLF001 - torch has no public name
        if run < 0 or run in self._backwards or acts_alone(members_of(self._ranks)):
            return
        self._count += 1
        backward = self._backwards[run] = _Backward(self._count)  # not again, by the messages below
        queue: Any = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001 - as torch's DDP
        queue(partial(self._end, run))
        self._check(not_none(self._model()))
        with torch.no_grad():
            backward.comers = self._comers(backward.number)

    def _check(self, model: nn.Module) -> None:
        """Refuse a backward whose gradients the hooks would miss, or that a graph captures."""
        if is_capturing():
            raise UnsupportedError(
                f"a backward with {_CALL} cannot be captured into a CUDA graph, as the host reads which "
                f"parameters each rank comes to. Instead: capture with cp.reduce_gradients and the "
                f"optimizer after it"
            )
        hooked = {id(weight) for x in self._weights if (weight := x()) is not None}
        for name, weight in model.named_parameters():
            if weight.requires_grad and id(weight) not in hooked:
                raise ValueError(
                    f"{_CALL}: {name} requires a gradient and has no hook, as it was frozen, or not "
                    f"there, when the hooks were put on the model: remove() the handle, and call "
                    f"{_CALL} again"
                )

    def _comers(self, number: int) -> list[tuple[int, ...]]:
        """Return which ranks come to each parameter in this backward."""
        ranks = self._ranks
        signature = CallSignature.of({"parameters": len(self._weights)}, f"{self._pass} begin")
        weights = [reference() for reference in self._weights]
        held = {*without_zeros(x for x in weights if x is not None)}
        facts = torch.zeros(
            ranks.size, len(self._weights), dtype=torch.int32, device=torch.device("cpu")
        )
        facts[ranks.rank] = torch.tensor(
            [0 if x is None else _COMES * _is_reached(x) + _HOLDS * (x in held) for x in weights],
            dtype=torch.int32,
            device=facts.device,
        )
        with GuardedPass(ranks, number, signature, self._device):
            agree(ranks, number, 0, signature, self._device)
            total = facts.to(self._device)
            run_collective(ranks, lambda: dist.all_reduce(total, group=ranks.group, async_op=True))
            table: list[list[int]] = total.T.tolist()
        for name, of_ranks in zip(self._names, table, strict=True):
            if any(x & _COMES for x in of_ranks) and any(x & _HOLDS for x in of_ranks):
                raise ValueError(
                    f"this backward would add to the gradient of {name}, which is there already: "
                    f"{_CALL} sums each gradient over the ranks as it is made, and later that sum would "
                    f"count {ranks.size} times. Let the optimizer step in the backward and zero the "
                    f"gradient there, or zero_grad() before the next backward. For several micro-batches "
                    f"a step use cp.reduce_gradients after the last one"
                )
        return [tuple(rank for rank, x in enumerate(of_ranks) if x & _COMES) for of_ranks in table]

    @unserializable
    def _before(self, _: Tensor) -> None:
        """Begin a backward before its first gradient is accumulated, with other models' hooks."""
        self._ranks.begin_pass()

    @unserializable
    def _sum(self, weight: nn.Parameter) -> None:
        """Sum the gradient that was just made over the ranks, in place."""
        ranks, n = self._ranks, self._index[id(weight)]
        backward = self._backwards.get(torch._C._current_graph_task_id())  # noqa: SLF001 - torch has no public name
        if backward is None:  # inside of cp.whole(): the gradient is whole
            return
        if not_none(weight.grad).is_sparse:
            raise UnsupportedError(
                f"{_CALL} sums dense gradients, and that of {self._names[n]} {tuple(weight.shape)} is "
                f"sparse: make the layer with sparse=False"
            )
        gradient = weight.grad = as_writable(not_none(weight.grad))
        shard, comers = local_shard(gradient), backward.comers[n]
        signature = CallSignature.of(
            {"shape": list(shard.shape), "dtype": str(shard.dtype).removeprefix("torch.")},
            f"{self._pass} {self._names[n]}",
        )
        with GuardedPass(ranks, backward.number, signature, shard.device), torch.no_grad():
            if len(comers) == ranks.size:
                agree(ranks, backward.number, 0, signature, shard.device)
                shard.copy_(sum_over(ranks, shard.flatten()).view_as(shard))
            else:
                _sum_over_part(ranks.part(comers), backward.number, signature, shard)
                # The optimizer may use up the gradient, and the other ranks need it at the end.
                backward.sums[n] = as_stored(shard).clone(memory_format=torch.contiguous_format)
        note_sums(ranks, {weight: self._names[n]}, {})

    def _end(self, run: int) -> None:
        """Give the sums of a backward to ranks that did not come to their parameters."""
        try:
            self._send_sums(self._backwards[run])
        finally:
            del self._backwards[run]  # now, as what is sent here is still inside of the backward

    def _send_sums(self, backward: _Backward) -> None:
        """Send sums of parameters that some ranks came to, to the others, which use them."""
        ranks = self._ranks
        partly = [n for n, comers in enumerate(backward.comers) if 0 < len(comers) < ranks.size]
        if not partly:
            return
        signature = CallSignature.of({"parameters": partly}, f"{self._pass} end")
        received: dict[int, nn.Parameter] = {}
        with GuardedPass(ranks, backward.number, signature, self._device), torch.no_grad():
            agree(ranks, backward.number, 0, signature, self._device)
            # A function may have no gradient for a parameter that the backward came to.
            made = torch.tensor(
                [n in backward.sums for n in partly], dtype=torch.int32, device=self._device
            )
            run_collective(
                ranks, lambda: dist.all_reduce(made, dist.ReduceOp.MAX, ranks.group, async_op=True)
            )
            for n, is_made in zip(partly, made.tolist(), strict=True):
                if is_made:
                    self._send_sum(backward, n, received)
        for n, weight in received.items():
            note_sums(ranks, {weight: self._names[n]}, {})
            self._run_other_hooks(weight)

    def _send_sum(self, backward: _Backward, n: int, received: dict[int, nn.Parameter]) -> None:
        """Send a sum from the first rank that has it to all, or receive it as the gradient."""
        ranks, weight = self._ranks, not_none(self._weights[n]())
        shard = backward.sums.pop(n, None)
        gradient = None
        if shard is None:
            gradient = torch.zeros_like(weight, memory_format=torch.contiguous_format)
            shard = local_shard(gradient)
        source = dist.get_global_rank(not_none(ranks.group), backward.comers[n][0])
        message = shard.view(-1).view(torch.uint8)
        run_collective(
            ranks, lambda: dist.broadcast(message, source, group=ranks.group, async_op=True)
        )
        if ranks.rank not in backward.comers[n]:
            weight.grad = gradient
            received[n] = weight

    def _run_other_hooks(self, weight: nn.Parameter) -> None:
        """Run the hooks that the backward would have run after the sum, such as the optimizer's."""
        for hook in (*not_none(weight._post_accumulate_grad_hooks).values(),):  # noqa: SLF001 - torch has no public name
            if not isinstance(getattr(hook, "__self__", None), _Hooks | Guard):
                hook(weight)


def _sum_over_part(part: Ranks, number: int, signature: CallSignature, shard: Tensor) -> None:
    """Sum a gradient over the ranks that have it, in place, while others go on."""
    if part.size == 1:
        return
    agree_in_part(part, number, signature, shard.device)
    wide = as_stored(shard).to(torch.promote_types(shard.dtype, torch.float32))
    (gradients,) = exchange(part, [[wide] * part.size], shard.device)
    # All add them up in the order of ranks, and get the same bits.
    shard.copy_(torch.stack(gradients).sum(0))


def _is_reached(weight: nn.Parameter) -> bool:
    """Return True if the backward under way comes to a parameter."""
    if not weight.requires_grad:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(_get_grad_fn_or_grad_acc(weight)))  # noqa: SLF001 - as torch's register_multi_grad_hook
    except RuntimeError:  # torch.autograd.grad returns its gradient, and accumulates none
        return False


def _put_first(weight: nn.Parameter, hook: Any) -> Any:
    """Register a hook of a parameter that runs before those that it has; return its handle."""
    handle = weight.register_post_accumulate_grad_hook(hook)
    hooks: Any = weight._post_accumulate_grad_hooks  # noqa: SLF001 - torch has no public name
    others = [*hooks.items()][:-1]
    for key, _ in others:
        hooks[key] = hooks.pop(key)  # behind the new one
    return handle
