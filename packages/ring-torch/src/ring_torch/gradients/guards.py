"""Memory of which gradients are sums over ranks, and hooks that let none be counted twice.

A summed gradient must be neither added to nor summed again: its old content would count once for
each rank. Programs put other tensors in a gradient's place, as ``p.grad = p.grad * c``, so a sum is
known by its parameter, for as long as no backward has come to that; and also by a mark on the
tensor, which a deep copy keeps. Groups are known by their ranks, as two may have the same.

Two hooks on each parameter detect additions. The first runs before a gradient is accumulated, when
a sum can still be told from zeros. The second runs after, and only if a gradient was really
accumulated, which ``torch.autograd.grad`` does not do. They stay on the parameter, and hold no
tensor.

Not known are clones that a program gives to a copy of the parameter; and to a backward, sums that
were scaled into new tensors behind ``torch.autograd.grad``, which may be its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import TensorWeakRef

from ring_core.base.arguments import not_none
from ring_torch.capture import is_capturing
from ring_torch.comm.ranks import Ranks

#: The global ranks of each group over which one gradient is summed: a mark of plain tuples, as a
#: gradient that is saved may be read with ``weights_only``.
Sums = tuple[tuple[int, ...], ...]
NO_SUMS: Sums = ()
#: Name of the mark: an attribute of a summed gradient, ``(sums, version of the tensor)``.
_MARK = "_ring_torch_sums"
#: torch's decorator of hooks that are not copied with their tensor; it has no types.
unserializable: Callable[[Any], Any] = unserializable_hook


def local_shard(x: Tensor) -> Tensor:
    """Return this rank's shard of a ``DTensor``; any other tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def hook_owners(weight: Tensor) -> Iterator[object]:
    """Yield the objects whose methods are hooks of a parameter's gradient."""
    hooks = (weight._backward_hooks or {}), (weight._post_accumulate_grad_hooks or {})  # noqa: SLF001 - torch has no other lists
    for hook in chain.from_iterable(x.values() for x in hooks):
        if (owner := getattr(hook, "__self__", None)) is not None:
            yield owner


def without_zeros(weights: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters with a gradient that is not all zeros.

    The host waits for each device once, and not at all if no gradient is there.
    """
    kept = []
    weights = sorted((x for x in weights if x.grad is not None), key=lambda x: str(x.device))
    with torch.no_grad():
        for _, items in groupby(weights, key=lambda x: not_none(x.grad).device):
            on_device = list(items)
            flags = torch.stack([local_shard(not_none(x.grad)).any() for x in on_device])
            kept += [x for x, flag in zip(on_device, flags.tolist(), strict=True) if flag]
    return kept


def sums_of(
    weights: Iterable[nn.Parameter], *, later_steps: bool = False
) -> dict[nn.Parameter, Sums]:
    """Return over which ranks the gradients of parameters are summed, of those that hold sums.

    A new tensor in a gradient's place is another gradient if a backward came to the parameter since
    the sum. With ``later_steps`` false it is also one if the parameter was changed since: without
    any backward programs set gradients of their own, as those of master weights, once a step.
    """
    sums = {x: y for x in weights if (y := _remembered(x, later_steps=later_steps))}
    kept = {*without_zeros(sums)}
    for weight in sums.keys() - kept:  # they are asked about no more, as a GPU is waited for
        _forget(weight)
    return {weight: sums[weight] for weight in kept}


def _remembered(weight: nn.Parameter, *, later_steps: bool) -> Sums:
    """Return over which ranks a gradient was summed, which may have been zeroed since."""
    if weight.grad is None:
        return NO_SUMS
    marked, version = getattr(weight.grad, _MARK, (NO_SUMS, 0))
    if (guard := guard_of(weight)) is not None:
        # A tensor that was a sum may be used for a later gradient, as a view of a bucket of DDP.
        if marked and (guard.sums or _version(weight.grad) == version):
            return marked
        return guard.sums_in_any_tensor(weight, later_steps=later_steps)
    # Nobody watches this parameter: its gradient is another's, or a copy of that, loaded (version
    # 0) or deep (version 1); or was changed since.
    return marked if marked and _version(weight.grad) in {0, 1, version} else NO_SUMS


def _forget(weight: nn.Parameter) -> None:
    """Forget that a gradient was summed, as it is zeros now."""
    if hasattr(weight.grad, _MARK):
        delattr(weight.grad, _MARK)
    if (guard := guard_of(weight)) is not None:
        guard.sums = NO_SUMS


def is_marked(weight: nn.Parameter) -> bool:
    """Return True if a gradient is a sum for certain: this very tensor was summed, or a copy."""
    return hasattr(weight.grad, _MARK)


def guard_of(weight: Tensor) -> Guard | None:
    """Return the hooks that a parameter has, or ``None``."""
    return next((x for x in hook_owners(weight) if isinstance(x, Guard)), None)


def members_of(ranks: Ranks) -> tuple[int, ...]:
    """Return the global ranks of a group: two groups may have the same."""
    return tuple(dist.get_process_group_ranks(not_none(ranks.group)))


def note_sums(
    ranks: Ranks, names: Mapping[nn.Parameter, str], earlier: Mapping[nn.Parameter, Sums]
) -> None:
    """Remember that gradients were just summed over a group.

    Args:
        ranks: The ranks of the group.
        names: Names of the parameters.
        earlier: Over which ranks gradients had been summed before.
    """
    guards = [guard_of(weight) or Guard(weight, name) for weight, name in names.items()]
    members = members_of(ranks)
    for weight, guard in zip(names, guards, strict=True):
        guard.watch(weight, (*earlier.get(weight, NO_SUMS), members), guards)


class Guard:
    """Hooks of one parameter that refuse additions to its summed gradient.

    Args:
        weight: The parameter.
        name: Its name, for the error message.

    Attributes:
        name: Its name.
        sums: Sets of ranks over which its gradient was summed last.
    """

    def __init__(self, weight: nn.Parameter, name: str) -> None:
        self.name, self.sums = name, NO_SUMS
        self._weight = TensorWeakRef(weight)
        self._beside = [self]  # guards of the parameters that were summed in the same call
        self._computed = 0  # how often a gradient of the parameter was computed ...
        self._accumulated = 0  # ... and how often it was added to the parameter's
        self._when = (0, 0, 0)  # both counts, and the version of the parameter, at the last sum
        self._is_held = False  # the gradient was a sum before the accumulation under way
        weight.register_hook(self.before)
        weight.register_post_accumulate_grad_hook(self.after)

    def watch(self, weight: nn.Parameter, sums: Sums, beside: list[Guard]) -> None:
        """Remember that the gradient was just summed, beside other gradients."""
        self.sums, self._beside = sums, beside
        self._when = self._computed, self._accumulated, _version(weight)
        _mark(weight.grad, sums)

    def sums_in_any_tensor(self, weight: nn.Parameter, *, later_steps: bool) -> Sums:
        """Return the sums that the gradient holds whatever tensor it is; see :func:`sums_of`."""
        computed, accumulated, version = self._when
        is_same = self._accumulated == accumulated and _version(weight) == version
        return self.sums if (self._computed == computed if later_steps else is_same) else NO_SUMS

    @unserializable
    def before(self, _: Tensor) -> None:
        """Note, before a gradient is accumulated, if the parameter's gradient is a sum."""
        weight = not_none(self._weight())
        # Asking means waiting for the GPU, which a graph that is being captured cannot.
        self._is_held = not is_capturing() and bool(_remembered(weight, later_steps=True))
        if self._is_held:
            beside = (x._weight() for x in self._beside)  # noqa: SLF001 - of the same class
            sums = sums_of((x for x in beside if x is not None), later_steps=True)
            self._is_held = weight in sums
            if self._is_held:  # of a tensor in the place of the one that was summed, too
                _mark(weight.grad, sums[weight])
        if not self._is_held and not is_capturing():
            self.sums = NO_SUMS
        self._computed += 1

    @unserializable
    def after(self, weight: Tensor) -> None:
        """Refuse a gradient that was added to a sum.

        Under ``create_graph`` the total is a new tensor, which requires a gradient.
        """
        self._accumulated += 1
        is_held, self._is_held = self._is_held, False
        gradient = weight.grad
        if (
            is_held
            and gradient is not None
            and (hasattr(gradient, _MARK) or gradient.requires_grad)
        ):
            size = max(map(len, self.sums))
            raise ValueError(
                f"this backward adds to the gradient of {self.name}, which reduce_gradients has "
                f"summed over the {size} ranks of the group: the next reduction would count "
                f"that sum {size} times. Call reduce_gradients once a step, after the last "
                f"backward; then step, then zero_grad(). The gradient is spoiled now: zero_grad()"
            )


def _mark(gradient: Any, sums: Sums) -> None:
    """Mark a gradient as a sum."""
    setattr(gradient, _MARK, (sums, _version(gradient)))


def _version(x: Tensor) -> int:
    """Return how often a tensor was changed in place, as far as torch counts it."""
    return 0 if x.is_inference() else x._version  # noqa: SLF001 - torch has no public name
