"""Judgement of a split run: rounding alone, or a fault, with the module to blame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ring_core import WrongResultError
from ring_torch.verification.runs import ModelRun, Runner, class_name
from ring_torch.verification.trace import LEAST_FLOOR, Difference, Key, Trace

#: Fraction of a typical gradient below which one counts as zero.
_SMALL_GRADIENT = 1e-2

#: Order of a fault that only gradients show, and of one in the model itself. Faults that outputs
#: show have smaller ones: the index of the output.
_GRADIENT_ORDER, _MODEL_ORDER = 1 << 40, 1 << 41


@dataclass(frozen=True)
class VerifyReport:
    """Differences of a split run from a whole one, all of which are rounding.

    Attributes:
        loss: Difference of the loss; ``None`` where the model returns none.
        logits: Difference of the model's other outputs, the one closest to its limit; ``None``
            where none could be compared.
        gradients: Difference of the parameters' gradients, the one closest to its limit; ``None``
            where no parameter is trained.
        modules: Number of modules whose inputs or outputs were compared on this rank.
    """

    loss: Difference | None
    logits: Difference | None
    gradients: Difference | None
    modules: int

    def __str__(self) -> str:
        differences = {"loss": self.loss, "logits": self.logits, "gradients": self.gradients}
        return "; ".join(f"{name} {x}" for name, x in differences.items() if x is not None)


@dataclass(frozen=True)
class ComparedRuns:
    """Results of the three runs that are compared.

    Attributes:
        split: The run on the ring.
        whole: The whole run.
        other: A second whole run, with attention computed in another way, or else with outputs of
            modules changed by rounding. Its difference from ``whole`` is the noise.
    """

    split: ModelRun
    whole: ModelRun
    other: ModelRun


@dataclass(frozen=True)
class _Fault:
    """Module to blame if any difference is larger than rounding.

    Attributes:
        order: Position of the fault among all faults, in the order of the computation.
        module: Name of the module; ``""`` is the model itself.
        difference: Difference of its output or gradient.
    """

    order: int
    module: str
    difference: Difference


def judge(
    runner: Runner,
    runs: ComparedRuns,
    outputs: Mapping[Key, Difference],
    gradients: Mapping[str, Difference],
) -> VerifyReport:
    """Judge this rank's differences, exchange them with the other ranks, and return the report.

    Its differences are the worst of any rank. If one is too large all ranks raise the error, which
    blames the first fault of any rank.

    Args:
        runner: Runner that ran the batch.
        runs: The three runs.
        outputs: Differences of what modules were given and returned, in the order of the split run.
        gradients: Differences of gradients by the parameter's name.

    Raises:
        WrongResultError: Something differs by more than rounding.
        ValueError: There is nothing to compare, or noise hides all differences.
    """
    logits = _worst([
        x for (name, _, kind, _), x in outputs.items() if (name, kind) == ("", "returned")
    ])  # fmt: skip
    loss = _loss_difference(runs, logits, runner)
    reported = (loss, logits, _worst([*gradients.values()]))
    fault = _first_fault(runs.split.trace, outputs, gradients)
    names = [name for name, _ in runner.model.named_modules()]
    # Ranks exchange numbers: order, module and difference of their first fault, and three numbers
    # each of the differences to report.
    by_rank = runner.gather([
        float(fault.order), float(names.index(fault.module)), *fault.difference.numbers,
        *(n for x in reported for n in ((0.0, 0.0, 0.0) if x is None else x.numbers)),
    ])  # fmt: skip
    merged = [
        None if x is None else _worst([Difference(*row[n : n + 3]) for row in by_rank])
        for n, x in zip((5, 8, 11), reported, strict=True)
    ]
    report = VerifyReport(merged[0], merged[1], merged[2], len({key[0] for key in outputs}))
    _check_comparable(runner, report)
    if all(x is None or x.is_within for x in merged):
        return report
    order, index, *difference = min(by_rank)[:5]  # the first fault of any rank
    raise WrongResultError(
        _message(runner, _Fault(int(order), names[int(index)], Difference(*difference)), report)
    )


def gradient_differences(
    errors: Tensor, noise: Tensor, sizes: Tensor, runner: Runner, floor: float
) -> dict[str, Difference]:
    """Return differences of the parameters' gradients, relative to the gradients' norms.

    A gradient much smaller than a typical one is divided by one hundredth of the typical norm
    instead of its own: it is zero except for rounding, as that of a bias of keys. The noise of each
    is at least that of all gradients together.

    Args:
        errors: Norms of the split run's differences from the whole run, ``[P]``.
        noise: Norms of the other whole run's differences from it, ``[P]``.
        sizes: Norms of the whole run's gradients, ``[P]``.
        runner: Runner that ran the batch; its model has the ``P`` parameters.
        floor: Relative difference that rounding makes.
    """
    numels = sizes.new_tensor([x.numel() for x in runner.parameters.values()])
    if not len(numels):
        return {}
    typical = (sizes.square().sum() / numels.sum()).sqrt() * numels.sqrt()
    sizes = sizes.maximum(_SMALL_GRADIENT * typical).clamp(min=1e-150)  # its square is above 0
    common = (noise.square().sum() / sizes.square().sum()).sqrt()
    noise = (noise / sizes).maximum(common)
    rows = torch.stack([errors / sizes, noise], dim=1).tolist()
    return {
        name: Difference.of(error, noise_level, floor)
        for name, (error, noise_level) in zip(runner.parameters, rows, strict=True)
    }


def _loss_difference(
    runs: ComparedRuns, logits: Difference | None, runner: Runner
) -> Difference | None:
    """Return the difference of losses, relative to the whole run's; ``None`` if a run has no loss.

    The noise of a single number may be small by chance. So it is at least the noise of the logits
    divided by the square root of the number of tokens, which is that of a mean over tokens.
    """
    if runs.split.loss is None or runs.whole.loss is None or runs.other.loss is None:
        return None
    size = max(abs(runs.whole.loss), 1e-30)
    mean_factor = float(runner.sequences[-1].real.sum()) ** -0.5
    noise = abs(runs.other.loss - runs.whole.loss) / size
    if logits is not None:
        noise = max(noise, logits.noise * mean_factor)
    floor = max(runs.whole.trace.floor * mean_factor, LEAST_FLOOR)
    return Difference.of(abs(runs.split.loss - runs.whole.loss) / size, noise, floor)


def _first_fault(
    split: Trace, outputs: Mapping[Key, Difference], gradients: Mapping[str, Difference]
) -> _Fault:
    """Return the module to blame, if anything is wrong.

    It is the module that made the first input or output that differs. If none differs, it is the
    module whose gradient is the first to differ in the backward. If all gradients differ, or
    nothing does, it is the model itself.
    """
    for order, (key, difference) in enumerate(outputs.items()):
        if not difference.is_within:
            return _Fault(order, split.records[key].module, difference)
    wrong = {name: x for name, x in gradients.items() if not x.is_within}
    if wrong and len(wrong) < len(gradients):
        returns = {name: n for n, name in enumerate(split.calls)}
        culprit = max(wrong, key=lambda name: returns.get(name.rpartition(".")[0], -1))
        return _Fault(_GRADIENT_ORDER, culprit.rpartition(".")[0], wrong[culprit])
    return _Fault(_MODEL_ORDER, "", Difference(0.0, 0.0, 0.0))


def _check_comparable(runner: Runner, report: VerifyReport) -> None:
    """Raise a ValueError if nothing was compared, or if noise is as large as the outputs."""
    model = runner.name
    if report.logits is None and report.loss is None:
        raise ValueError(
            f"verify: {model} returns neither a loss nor outputs of tokens that could be "
            f"compared; give it labels"
        )
    if report.logits is not None and report.logits.limit >= 1:
        raise ValueError(
            f"verify: two whole runs of {model} differ so much that nothing can be told of a "
            f"split one ({report}): give a batch without padding, of which it may read what has no "
            f"meaning, or the model in float32"
        )


def _message(runner: Runner, fault: _Fault, report: VerifyReport) -> str:
    """Return the error message: the differences, and the module to blame."""
    module = runner.model.get_submodule(fault.module)
    name = f"{fault.module} ({class_name(module)})" if fault.module else class_name(module)
    description = (
        f"the first module whose output differs is {name}, by {fault.difference} of its size"
    )
    if fault.order >= _MODEL_ORDER:
        description = (
            f"the outputs of its modules agree, and {name} makes another loss or gradient of them"
        )
    elif fault.order >= _GRADIENT_ORDER:
        description = (
            f"the outputs of its modules agree; the first gradient that differs, in the order of the "
            f"backward, is of {name}, by {fault.difference} of its size"
        )
    return (
        f"verify: {runner.name}, split over {runner.ranks.size} ranks, does not compute what "
        f"it does whole: {description}. {report}. A module that mixes tokens by other means than attention "
        f"needs the whole sequence: ContextParallel.unshard joins it, and shard splits what it returns. One that "
        f"counts positions itself (arange) needs those of ContextParallel.positions"
    )


def _worst(differences: list[Difference]) -> Difference | None:
    """Return the difference closest to its limit, or furthest beyond it."""
    return max(differences, key=lambda x: x.error / x.limit, default=None)
