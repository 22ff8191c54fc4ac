"""Preflight: one training step on shards, compared with the same step on whole sequences.

What is wrong in silence is mostly in the user's own step: labels in natural order, a denominator of
one rank, gradients clipped before they are summed. So the step itself is run, split and whole, and
where it differs, experiments tell the likeliest cause: each undoes one mistake, and looks whether
the difference goes away.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ring_core import RankMismatchError, divisor_of
from ring_core.base.arguments import check_choice, numbers_as_python
from ring_torch.gradients.guards import local_shard
from ring_torch.gradients.reduce import reduce_gradients
from ring_torch.recurrent.arguments import sharding_of
from ring_torch.sharding import Sharding
from ring_torch.verification.equality import check_equal
from ring_torch.verification.judgement import (
    MODEL_ORDER,
    Difference,
    first_fault,
    gradient_differences,
    output_differences,
)
from ring_torch.verification.runs import ModelRun, Runner, class_name, unchanged
from ring_torch.verification.trace import LEAST_FLOOR, Tokens, seed_generators, tensors_in

#: A step of training: splits the whole batch, and returns the loss of this rank's part.
Step = Callable[[Any, Any], Tensor]
#: What follows a backward: the reduction of gradients over the ranks, and clipping.
AfterBackward = Callable[[Any], object]
LossKind = Literal["sum", "mean", "whole"]

#: A difference that shrinks so much with fewer edges of shards may be at these.
_FEWER_EDGES = 1.5
#: Square of the cosine from which on gradients are a multiple of others.
_ALIKE = 0.98


@dataclass(frozen=True)
class PreflightReport:
    """Findings of a preflight, the same on all ranks.

    Attributes:
        passed: True if the split step is the whole one but for rounding.
        findings: What is wrong, and the likeliest causes, the first one first.
        loss: Difference of the losses; ``None`` if the runs were not made.
        gradients: Differences of the parameters' gradients, in the order of the forward.
    """

    passed: bool
    findings: tuple[str, ...]
    loss: Difference | None
    gradients: dict[str, Difference]

    def __str__(self) -> str:
        if not self.passed:
            return "preflight failed: " + ". ".join(self.findings)
        worst = max((x.error for x in self.gradients.values()), default=0.0)
        return f"preflight passed: loss {self.loss}; {len(self.gradients)} gradients, at most {worst:.1e}"


class _Comparison(NamedTuple):
    """A split step beside a whole one: differences, and by which factor each is larger."""

    loss: Difference
    gradients: dict[str, Difference]
    loss_ratio: float
    gradient_ratio: float

    @property
    def is_within(self) -> bool:
        """True if all differences are rounding."""
        return all(x.is_within for x in (self.loss, *self.gradients.values()))

    @property
    def error(self) -> float:
        """Largest error."""
        return max(x.error for x in (self.loss, *self.gradients.values()))


class _StepRunner(Runner):
    """Runs a user's step, split and whole."""

    caller, traces_split = "preflight", False

    def __init__(
        self,
        model: nn.Module,
        sharding: Sharding,
        step: Step,
        batch: Any,
        after_backward: AfterBackward | None,
        loss: LossKind,
    ) -> None:
        rows = [x for _, x in tensors_in(batch) if x.ndim > 1]
        shape = (rows[0].shape[0], rows[0].shape[1]) if rows else (0, 0)
        super().__init__(model, sharding.ranks, _sequences_of(rows, sharding), shape, factor=1)
        self.sharding, self.step, self.batch, self.loss = sharding, step, batch, loss
        self.after_backward = after_backward

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Let each rank compute whole sequences alone within the block, without compiled graphs.

        Those would break at the hooks of a trace, and refuse that with ``fullgraph=True``.
        """
        with torch.compiler.set_stance("force_eager"), self.sharding.whole():
            yield

    def compute(self, attention: str | None) -> tuple[Tensor | None, Tensor]:
        """Run the step; return the loss of all ranks, and this rank's."""
        # Each run draws the same random numbers, and may take entries out of its own batch.
        seed_generators({x.device for x in self.model.parameters()}, 0)
        batch = copy.copy(self.batch) if isinstance(self.batch, dict | list) else self.batch
        loss = self.step(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = [*loss.shape] if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"step must return the loss, a tensor of one number, got {what}")
        if attention is not None or self.loss == "whole":
            return loss, loss
        losses = [x for (x,) in self.gather([float(loss.detach())])]
        total = math.fsum(losses) / (self.ranks.size if self.loss == "mean" else 1)
        return torch.tensor(total, dtype=torch.float64, device="cpu"), loss

    def reduced(self, gradients: dict[str, Tensor], *, is_split: bool) -> dict[str, Tensor]:
        """Return the gradients behind the user's own reduction, or without it behind ours."""
        del gradients  # a reduction may put other tensors in their place
        if self.after_backward is not None:
            self.after_backward(self.model)
        elif is_split:
            reduce_gradients(self.sharding.ranks, self.model)
        # Copies: those of DDP may be views of its buckets, which the next run writes to.
        return {name: x.grad.clone() for name, x in self.parameters.items() if x.grad is not None}

    def compared(self, rtol: float | None) -> tuple[_Comparison, ModelRun]:
        """Run the step split, and twice whole; return the differences, and the split run."""
        versions = [x._version for x in self.parameters.values()]  # noqa: SLF001 - no public way
        split = self.run()
        is_changed = versions != [x._version for x in self.parameters.values()]  # noqa: SLF001
        if any(flag for (flag,) in self.gather([float(is_changed)])):
            raise ValueError(
                "preflight: step or after_backward has changed the weights, which are not put back. "
                "Leave the optimizer's step out of both, and load the weights again"
            )
        with self.unhooked():
            whole = self.run("torch")
            errors = self.gradient_distances(split, whole)
            other = self.run("torch", perturbs=True)
            noise = self.gradient_distances(other, whole)
            sizes = self.gradient_distances(None, whole)
        losses = [x.loss for x in (split, whole, other)]
        # The worst of any rank, so that all ranks judge alike.
        rows = self.gather([math.nan if x is None else x for x in losses])
        # A loss that is not finite is the worst: comparisons with NaN would hide it.
        ours, theirs, again = max(
            rows, key=lambda row: abs(row[0] - row[1]) if math.isfinite(sum(row)) else math.inf
        )
        size = max(abs(theirs), 1e-30)
        floor = max(whole.trace.floor, LEAST_FLOOR)
        loss = Difference.of(abs(ours - theirs) / size, abs(again - theirs) / size, floor)
        gradients = gradient_differences(self, errors, noise, sizes, floor)
        if rtol is not None:
            loss = replace(loss, limit=rtol)
            gradients = {name: replace(x, limit=rtol) for name, x in gradients.items()}
        calls = {name: n for n, name in enumerate(whole.trace.calls)}
        order = sorted(gradients, key=lambda name: calls.get(name.rpartition(".")[0], len(calls)))
        comparison = _Comparison(
            loss,
            {name: gradients[name] for name in order},
            ours / theirs if theirs else math.nan,
            self._gradient_ratio(split, whole),
        )
        return comparison, split

    def first_module(self) -> str | None:
        """Return the module that makes the first tensor of the forward that differs on any rank.

        ``None`` if all that could be compared agree. The step runs again, split without compiled
        graphs too, as the modules' hooks would break them.
        """
        self.traces_split = True
        with torch.compiler.set_stance("force_eager"):
            split = self.run()
        self.traces_split = False
        with self.unhooked():
            whole, other = self.run("torch"), self.run("torch", perturbs=True)
        order, culprit, difference = first_fault(
            split, output_differences(self, split, whole, other), {}
        )
        names = [name for name, _ in self.model.named_modules()]
        numbers = (
            [difference.error, difference.noise, difference.limit] if difference else [0.0] * 3
        )
        rows = self.gather([float(order), float(names.index(culprit)), *numbers])
        first, index, *worst = min(rows)
        if first == MODEL_ORDER:
            return None
        name, found = names[int(index)], Difference(*worst)
        kind = class_name(self.model.get_submodule(name))
        return f"{name} ({kind}) by {found}" if name else f"{kind} by {found}"

    def _gradient_ratio(self, split: ModelRun, whole: ModelRun) -> float:
        """Return the multiple of the whole gradients that the split ones are; NaN if of none."""
        dots = [0.0, 0.0, 0.0]
        for name, gradient in whole.gradients.items():
            x, y = local_shard(gradient).double(), split.gradients.get(name)
            dots[1] += float(x.square().sum())
            if y is not None:
                dots[0] += float((x * local_shard(y).double()).sum())
                dots[2] += float(local_shard(y).double().square().sum())
        both, whole_size, split_size = (sum(x) for x in zip(*self.gather(dots), strict=True))
        is_multiple = both * abs(both) > _ALIKE * whole_size * split_size
        return both / whole_size if is_multiple else math.nan


def _sequences_of(rows: list[Tensor], sharding: Sharding) -> list[Tokens]:
    """Return the sequences of a batch that the ring splits evenly.

    They are as long as tensors ``[B, T, ...]``, or shorter by the token that only labels have.
    """
    sequences, size = {}, sharding.ranks.size
    divisor = divisor_of(sharding.layout, size)
    for x in rows:
        for length in (x.shape[1], x.shape[1] - 1):
            if length > 0 and length % divisor == 0:
                local = torch.arange(length // size, device=x.device)
                real = torch.ones(len(x), length, dtype=torch.bool, device=x.device)
                positions = sharding.positions(length, device=x.device)
                sequences[length] = Tokens(length, length // size, positions, local, real)
    return [*sequences.values()]


@numbers_as_python
def preflight(
    cp: Any,
    step: Step,
    *,
    model: nn.Module,
    batch: Any,
    after_backward: AfterBackward | None = None,
    loss: LossKind = "sum",
    rtol: float | None = None,
) -> PreflightReport:
    """Run one training step on shards, and the same step on whole sequences, and compare them.

    Compared are weights and buffers between ranks, the batch between ranks, then the loss and the
    gradients of the step. Where they differ, the report names the first parameter in the order of
    the forward, and the likeliest cause, found by experiments: other runs of the step with one
    thing undone, and one that compares what modules are given and return, where the ring splits the
    batch's lengths evenly. Gradients, buffers, modes, hooks and random generators are put back;
    dropout is off, and no optimizer steps. It takes the memory of whole sequences: give a short
    batch. What is compiled runs compiled on shards, and is not on whole sequences.

    Args:
        cp: The ``ContextParallel`` that the step uses.
        step: Your function ``step(model, batch)``: it splits the whole batch by methods of ``cp``
            and returns the loss. In :meth:`ContextParallel.whole` it is the step of one device.
        model: The model, the same on all ranks.
        batch: The whole batch, the same on all ranks: anything that ``step`` takes.
        after_backward: Your function ``after_backward(model)``: what follows ``loss.backward()``,
            as ``cp.reduce_gradients`` and clipping, but no optimizer's step; ``None`` for the
            reduction alone. In ``cp.whole()`` it may run no collectives of its own.
        loss: ``"sum"`` if the ranks' losses are parts, whose sum is the loss, as those of
            :func:`cross_entropy`; ``"mean"`` if their mean is, as where DDP or FSDP2 average over
            the ring and the loss is multiplied by ``cp.cp_size``;
            ``"whole"`` if each rank returns the whole loss.
        rtol: Largest relative difference that counts as rounding; ``None`` for four times what a
            second whole run differs, with modules' outputs changed by a unit in the last place.

    Returns:
        The report, the same on all ranks: ``report.passed``, and a text.

    Raises:
        ValueError: An argument is malformed; the step returns no loss, or another in each run; or
            weights have changed.
        UnsupportedError: There is too little memory.
        RuntimeError: The step raised an error on another rank, which the message names with it.

    Example::

        report = ring_torch.preflight(cp, step, model=model, batch=batch)
        if not report.passed:
            raise SystemExit(str(report))
    """
    sharding = sharding_of(cp)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, function in (("step", step), ("after_backward", after_backward)):
        if not callable(function) and (name == "step" or function is not None):
            raise ValueError(f"{name} must be a function, got {type(function).__name__}")
    check_choice("loss", loss, ("sum", "mean", "whole"))
    if rtol is not None and not (isinstance(rtol, int | float) and 0 <= rtol < math.inf):
        raise ValueError(f"rtol must be a number from 0 on, or None, got {rtol!r}")
    runner = _StepRunner(model, sharding, step, batch, after_backward, loss)
    for x, what in ((model, "weights"), (batch, "batch")):
        try:
            check_equal(cp, x, what=what)
        except RankMismatchError as error:
            return PreflightReport(False, (str(error),), None, {})
    with unchanged(model):
        comparison, split = runner.compared(rtol)
        if min((x.limit for x in comparison.gradients.values()), default=0) >= 1:
            raise ValueError(
                f"preflight: two whole runs of the step differ so much that nothing can be told of a split "
                f"one (loss {comparison.loss}). Let it draw random numbers of torch's default generators "
                f"alone, and keep nothing from run to run"
            )
        findings = (
            ()
            if comparison.is_within
            else (
                f"{_first_difference(comparison)} in {_place_of(step)}",
                *_causes(cp, runner, comparison, split, rtol),
            )
        )
    return PreflightReport(not findings, findings, comparison.loss, comparison.gradients)


def _place_of(step: Step) -> str:
    """Return the name and line of a function."""
    function: Any = inspect.unwrap(step)
    code = getattr(function, "__code__", None) or getattr(type(step).__call__, "__code__", None)
    name = getattr(function, "__qualname__", type(step).__name__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _first_difference(comparison: _Comparison) -> str:
    """Return what differs first."""
    wrong = [(name, x) for name, x in comparison.gradients.items() if not x.is_within]
    text = f"the loss differs by {comparison.loss}" * (not comparison.loss.is_within)
    if wrong:
        name, difference = wrong[0]
        text += f"{', and ' if text else ''}{len(wrong)} of {len(comparison.gradients)} gradients differ, first that of {name} by {difference}"
    return text


def _causes(
    cp: Any, runner: _StepRunner, comparison: _Comparison, split: ModelRun, rtol: float | None
) -> Iterator[str]:
    """Yield the likeliest causes of a difference, by experiments; all ranks yield the same."""
    size = runner.ranks.size
    try:
        check_equal(cp, split.gradients, what="gradients")
    except RankMismatchError:
        yield (
            "gradients are not the same on all ranks behind after_backward: it has to sum them, by "
            "cp.reduce_gradients(model)"
        )
        return
    if runner.after_backward is not None:
        own, runner.after_backward = runner.after_backward, None
        is_within = runner.compared(rtol)[0].is_within
        runner.after_backward = own
        if is_within:
            yield (
                "with cp.reduce_gradients(model) in its place the gradients are right, so it is "
                "after_backward: clip, scale or accumulate gradients behind the reduction, not before it; and "
                "in cp.whole(), where cp.cp_size is 1, leave out collectives of your own"
            )
            return
    for ratio, what in ((comparison.loss_ratio, "loss"), (comparison.gradient_ratio, "gradients")):
        for factor, times in ((size, f"{size} times"), (1 / size, f"1/{size} of")):
            if size > 1 and abs(ratio / factor - 1) < 0.05:
                yield (
                    f"the {what} {'is' if what == 'loss' else 'are'} {times} the whole step's: divide the sum over this rank's tokens by "
                    f"the count of all ranks' (ring_torch.cross_entropy does), and say loss='whole' if each "
                    f"rank returns the whole loss"
                )
    if cp.layout != "contiguous":
        with _in_natural_order(cp):
            natural = runner.compared(rtol)[0]
        if natural.is_within:
            yield (
                f"in the layout 'contiguous' it is right, so something is in natural order that has to be in "
                f"that of {str(cp.layout)!r}: labels, positions, masks or documents. Split each by cp.shard, and take "
                f"positions of cp.positions(seq_len)"
            )
        elif natural.error * _FEWER_EDGES < comparison.error:
            yield (
                "in the layout 'contiguous', which has fewer edges of shards, it differs less: a convolution, "
                "a shift of labels or a difference of neighbours may not see the next rank's tokens. Use "
                "cp.halo, cp.shift, or shift labels before they are split"
            )
    if (module := runner.first_module()) is not None:
        yield f"the first module whose output differs is {module}"


@contextmanager
def _in_natural_order(cp: Any) -> Iterator[None]:
    """Let a ``ContextParallel`` split sequences into consecutive parts within the block."""
    own = cp._split  # noqa: SLF001 - private to users, not to this package
    cp._split = Sharding(own.group, "contiguous")  # noqa: SLF001
    try:
        yield
    finally:
        cp._split = own  # noqa: SLF001
