"""Judgement of a split run: rounding alone, or a fault, with the module to blame."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from ring_core import WrongResultError
from ring_torch.verification.runs import ModelRun, Runner, class_name, unchanged
from ring_torch.verification.trace import LEAST_FLOOR, Key, Record, Tokens

#: Largest error of a split run, in multiples of the noise, that counts as rounding.
NOISE_FACTOR = 4.0

#: Fraction of a typical gradient below which one counts as zero.
_SMALL_GRADIENT = 1e-2

#: Order of a fault that only gradients show, and of one in the model itself. Faults that outputs
#: show have smaller ones: the index of the output.
_GRADIENT_ORDER, MODEL_ORDER = 1 << 40, 1 << 41


@dataclass(frozen=True)
class Difference:
    """Difference between a split run and a whole one, relative to the whole one's size.

    Attributes:
        error: Relative difference of the split run from the whole one.
        noise: Relative difference of a second whole run, whose attention is computed in another
            way; with modules' outputs changed by a unit in the last place.
        limit: Largest error that counts as rounding.
    """

    error: float
    noise: float
    limit: float

    @classmethod
    def of(cls, error: float, noise: float, floor: float) -> Difference:
        """Return a difference whose limit is ``NOISE_FACTOR`` times the noise plus a floor."""
        return cls(error, noise, NOISE_FACTOR * noise + floor)

    @property
    def is_within(self) -> bool:
        """True if the error is small enough to be rounding."""
        return self.error <= self.limit

    def __str__(self) -> str:
        return f"{self.error:.1e} (noise {self.noise:.1e}, limit {self.limit:.1e})"


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


def compare_with_whole(runner: Runner, attention: str, other_attention: str | None) -> VerifyReport:
    """Run the runner's batch split and whole, compare, and return the differences.

    Ranks exchange them: the report has the worst of any rank, and if one is too large all ranks
    raise the error, which blames the first fault of any rank.

    Args:
        runner: Runner of the model and the batch.
        attention: Attention of the whole run.
        other_attention: Attention of a second whole run, which shows the noise: outputs of its
            modules in float32 or float64 are changed at random by a unit in the last place, as
            layers beside attention round, too. ``None`` for the same attention, with outputs of any
            dtype changed.

    Raises:
        WrongResultError: The split run differs by more than rounding.
        ValueError: There is nothing to compare, the whole run's loss is not finite, or noise hides
            all differences.
    """
    with unchanged(runner.model):
        split = runner.run()
        with runner.unhooked():
            whole = runner.run(attention)
            errors = runner.gradient_distances(split, whole)
            split.gradients.clear()  # free their memory before the next run
            # In 16 bits the floor is the rounding of layers beside attention.
            perturbs = other_attention is None or whole.trace.floor == LEAST_FLOOR
            other = runner.run(other_attention or attention, perturbs=perturbs)
            noise = runner.gradient_distances(other, whole)
            sizes = runner.gradient_distances(None, whole)
    if whole.loss is not None and not math.isfinite(whole.loss):
        raise ValueError(
            f"verify: the whole model's loss is {whole.loss}, with which nothing can be compared; "
            f"give a batch whose loss is finite"
        )
    outputs = output_differences(runner, split, whole, other)
    gradients = gradient_differences(runner, errors, noise, sizes, whole.trace.floor)
    logits = _worst(
        [x for (name, _, kind, _), x in outputs.items() if not name and kind == "returned"]
    )
    loss = _loss_difference(runner, (split, whole, other), logits)
    local = loss, logits, _worst([*gradients.values()])
    order, culprit, difference = first_fault(split, outputs, gradients)
    names = [name for name, _ in runner.model.named_modules()]
    # Ranks exchange numbers: order, module and difference of their first fault, and three numbers
    # each of the differences to report.
    triples = [(x.error, x.noise, x.limit) if x else (0.0, 0.0, 0.0) for x in (difference, *local)]
    by_rank = runner.gather([float(order), float(names.index(culprit)), *chain(*triples)])
    merged = [
        _worst([Difference(*row[n : n + 3]) for row in by_rank]) if x else None
        for n, x in zip((5, 8, 11), local, strict=True)
    ]
    report = VerifyReport(merged[0], merged[1], merged[2], len({key[0] for key in outputs}))
    _check_comparable(runner.name, report)
    if not all(x is None or x.is_within for x in merged):
        first, index, *numbers = min(by_rank)[:5]  # the first fault of any rank
        raise WrongResultError(
            _message(runner, int(first), names[int(index)], Difference(*numbers), report)
        )
    return report


def output_differences(
    runner: Runner, split: ModelRun, whole: ModelRun, other: ModelRun
) -> dict[Key, Difference]:
    """Compare this rank's part of a split run with a whole run, and that with a second whole run.

    The result is in the order of the split run. Records without a counterpart, such as experts that
    one run does not call and attention weights, are left out.
    """
    errors: dict[Key, tuple[Tensor, float]] = {}
    floor = LEAST_FLOOR
    for key, record in split.trace.records.items():
        counterpart, again = (run.trace.records.get(key) for run in (whole, other))
        if counterpart is not None and again is not None:
            largest = _largest_errors(runner, record, counterpart, again)
            if largest is not None:
                floor = max(floor, counterpart.floor)  # later values are computed from this one
                errors[key] = largest, floor
    # One copy to the host for all of them.
    numbers = torch.stack([x for x, _ in errors.values()]).tolist() if errors else []
    return {
        key: Difference.of(error, noise, floor)
        for (key, (_, floor)), (error, noise) in zip(errors.items(), numbers, strict=True)
    }


def _largest_errors(runner: Runner, split: Record, whole: Record, other: Record) -> Tensor | None:
    """Return the largest error and the largest noise of a token, relative to its norm, ``[2]``.

    A token with less than the median norm counts as one of median norm. The error is that of this
    rank's tokens, the noise that of all. ``None`` if these cannot be records of one tensor.
    """
    match = _sequence_of(split.shape, whole.shape, runner.sequences, runner.rows)
    if whole.shape != other.shape or match is None:
        return None
    dim, tokens = match
    lengths = (None, None) if tokens is None else (tokens.local_length, tokens.length)
    mine = _by_token(split.values, dim, lengths[0], runner.rows)
    full, again = (_by_token(x.values, dim, lengths[1], runner.rows) for x in (whole, other))
    size = full.norm(dim=-1).nan_to_num()  # [B, T]
    real = torch.ones_like(size, dtype=torch.bool)
    if tokens is not None:
        real = (
            tokens.real if len(size) == len(tokens.real) else tokens.real.all(dim=0, keepdim=True)
        )
    # Tokens of nearly no norm would show rounding as a large relative error.
    chosen = size[real.expand_as(size)]
    typical = chosen.median() if len(chosen) else size.new_zeros(())
    size = size.maximum(typical).clamp(min=torch.finfo(torch.float32).tiny)
    noise = _largest_relative(again - full, size, real)
    if tokens is not None:
        # Rank by rank: each compares its own tokens with the same tokens of the whole run.
        full, size, real = (x[:, tokens.positions] for x in (full, size, real))
        mine = mine[:, tokens.local_positions]
    # What is not finite in the whole run is not the ring's fault.
    difference = (mine - full).where(full.isfinite(), 0.0)
    return torch.stack([_largest_relative(difference, size, real), noise])


def _largest_relative(difference: Tensor, size: Tensor, real: Tensor) -> Tensor:
    """Return the largest norm of a token's difference over its size; NaN counts as infinite."""
    relative = (difference.norm(dim=-1) / size).where(real, 0.0).nan_to_num(nan=torch.inf)
    return relative.max() if relative.numel() else size.new_zeros(())


def _by_token(x: Tensor, dim: int | None, length: int | None, rows: int) -> Tensor:
    """Return values as ``[B, n, features]`` of the ``length`` tokens along a dimension.

    The first dimension may hold the tokens of all rows of the batch one behind the other. Without a
    dimension each of its entries stands for a token.
    """
    if dim is None or length is None:
        return x.reshape(1, len(x), -1)
    if dim == 0:
        return x.reshape(len(x) // length, length, -1)
    if len(x) in (1, rows):
        return x.movedim(dim, 1).reshape(len(x), length, -1)
    return x.movedim(dim, 0).reshape(1, length, -1)


def _sequence_of(
    split: tuple[int, ...], whole: tuple[int, ...], sequences: list[Tokens], rows: int
) -> tuple[int | None, Tokens | None] | None:
    """Return the dimension of a tensor along which a sequence lies, and that sequence.

    Shapes that differ are of a tensor that is split there. In equal shapes it is the last dimension
    that is as long as a whole sequence, which this rank then holds whole. The result is ``None`` if
    the shapes cannot be of one tensor, ``(None, None)`` if no dimension is as long as a sequence.
    """
    if len(split) != len(whole):
        return None
    unlike = [
        dim
        for dim, sizes in enumerate(zip(split, whole, strict=True))
        if sizes[0] != sizes[1] and (dim or sizes != (rows, 1))
    ]
    # Splitting changes one dimension; with two the tensors are not the same. A first dimension of
    # 1 in the whole run, beside the batch's rows in the split run, is none: it broadcasts.
    if len(unlike) > 1:
        return None
    for dim in unlike or range(len(split) - 1, -1, -1):
        # Batch and sequence may be merged into one dimension, the first: [B * T, ...].
        times = 1 if dim or whole[dim] % rows or split[dim] % rows else rows
        matches = [
            tokens
            for tokens in (sequences if unlike else [x.held_whole() for x in sequences])
            for n in {1, times}
            if (split[dim], whole[dim]) == (n * tokens.local_length, n * tokens.length)
        ]
        # If an encoder's and a decoder's sequence have one length, either may be meant: leave out
        # tokens that are padding in any of them.
        if matches:
            real = torch.stack([tokens.real for tokens in matches]).all(dim=0)
            return dim, replace(matches[0], real=real)
    return None if unlike else (None, None)


def gradient_differences(
    runner: Runner, errors: Tensor, noise: Tensor, sizes: Tensor, floor: float
) -> dict[str, Difference]:
    """Return differences of the parameters' gradients, relative to the gradients' norms.

    A gradient much smaller than a typical one is divided by one hundredth of the typical norm
    instead of its own: it is zero except for rounding, as that of a bias of keys. The noise of each
    is at least that of all gradients together.

    Args:
        runner: Runner that ran the batch; its model has ``P`` parameters.
        errors: Norms of the split run's differences from the whole run, ``[P]``.
        noise: Norms of the other whole run's differences from it, ``[P]``.
        sizes: Norms of the whole run's gradients, ``[P]``.
        floor: Relative difference that rounding makes.
    """
    numels = sizes.new_tensor([x.numel() for x in runner.parameters.values()])
    if not len(numels):
        return {}
    typical = (sizes.square().sum() / numels.sum()).sqrt() * numels.sqrt()
    sizes = sizes.maximum(_SMALL_GRADIENT * typical).clamp(min=1e-150)  # its square is above 0
    common = (noise.square().sum() / sizes.square().sum()).sqrt()
    rows = torch.stack([errors / sizes, (noise / sizes).maximum(common)], dim=1).tolist()
    return {
        name: Difference.of(error, noise_level, floor)
        for name, (error, noise_level) in zip(runner.parameters, rows, strict=True)
    }


def _loss_difference(
    runner: Runner, runs: tuple[ModelRun, ModelRun, ModelRun], logits: Difference | None
) -> Difference | None:
    """Return the difference of losses, relative to the whole run's; ``None`` if a run has no loss.

    The noise of a single number may be small by chance. So it is at least the noise of the logits
    divided by the square root of the number of tokens, which is that of a mean over tokens.
    """
    split, whole, other = (run.loss for run in runs)
    if split is None or whole is None or other is None:
        return None
    size = max(abs(whole), 1e-30)
    mean_factor = float(runner.sequences[-1].real.sum()) ** -0.5
    noise = max(abs(other - whole) / size, logits.noise * mean_factor if logits else 0.0)
    floor = max(runs[1].trace.floor * mean_factor, LEAST_FLOOR)
    return Difference.of(abs(split - whole) / size, noise, floor)


def first_fault(
    split: ModelRun, outputs: Mapping[Key, Difference], gradients: Mapping[str, Difference]
) -> tuple[int, str, Difference | None]:
    """Return the module to blame if anything is wrong: its order among faults, name, difference.

    It is the module that made the first input or output that differs. If none differs, it is the
    module whose gradient is the first to differ in the backward. If all gradients differ, or
    nothing does, it is the model itself.
    """
    for order, (key, difference) in enumerate(outputs.items()):
        if not difference.is_within:
            return order, split.trace.records[key].module, difference
    wrong = {name: x for name, x in gradients.items() if not x.is_within}
    if wrong and len(wrong) < len(gradients):
        returns = {name: n for n, name in enumerate(split.trace.calls)}
        culprit = max(wrong, key=lambda name: returns.get(name.rpartition(".")[0], -1))
        return _GRADIENT_ORDER, culprit.rpartition(".")[0], wrong[culprit]
    return MODEL_ORDER, "", None


def _check_comparable(model: str, report: VerifyReport) -> None:
    """Raise a ValueError if nothing was compared, or if noise is as large as the outputs."""
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


def _message(
    runner: Runner, order: int, culprit: str, difference: Difference, report: VerifyReport
) -> str:
    """Return the error message: the differences, and the module to blame."""
    module = runner.model.get_submodule(culprit)
    name = f"{culprit} ({class_name(module)})" if culprit else class_name(module)
    text = f"the first module whose output differs is {name}, by {difference} of its size"
    if order >= MODEL_ORDER:
        text = (
            f"the outputs of its modules agree, and {name} makes another loss or gradient of them"
        )
    elif order >= _GRADIENT_ORDER:
        text = (
            f"the outputs of its modules agree; the first gradient that differs, in the order of the "
            f"backward, is of {name}, by {difference} of its size"
        )
    return (
        f"verify: {runner.name}, split over {runner.ranks.size} ranks, does not compute what "
        f"it does whole: {text}. {report}. A module that mixes tokens by other means than attention "
        f"needs the whole sequence: ContextParallel.unshard joins it, and shard splits what it returns. One that "
        f"counts positions itself (arange) needs those of ContextParallel.positions"
    )


def _worst(differences: list[Difference]) -> Difference | None:
    """Return the difference closest to its limit, or furthest beyond it."""
    return max(differences, key=lambda x: x.error / x.limit, default=None)
