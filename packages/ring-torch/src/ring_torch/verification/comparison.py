"""Run a batch split and twice whole, and compare the runs token by token."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ring_torch.verification.judgement import (
    ComparedRuns,
    VerifyReport,
    gradient_differences,
    judge,
)
from ring_torch.verification.runs import Runner
from ring_torch.verification.state import unchanged
from ring_torch.verification.trace import LEAST_FLOOR, Difference, Key, Tokens, Trace


def compare_with_whole(runner: Runner, attention: str, other_attention: str | None) -> VerifyReport:
    """Run the runner's batch split and whole, compare, and return the differences.

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
    outputs = compare_traces(split.trace, whole.trace, other.trace, runner.sequences, runner.rows)
    gradients = gradient_differences(errors, noise, sizes, runner, whole.trace.floor)
    return judge(runner, ComparedRuns(split, whole, other), outputs, gradients)


def compare_traces(
    split: Trace, whole: Trace, other: Trace, sequences: list[Tokens], rows: int
) -> dict[Key, Difference]:
    """Compare this rank's part of a split run with a whole run, and that with a second whole run.

    Args:
        split: Records of the split run on this rank.
        whole: Those of the whole run.
        other: Those of the second whole run.
        sequences: The sequences of the batch, of an encoder and a decoder two.
        rows: Number of rows in the batch, ``B``.

    Returns:
        Differences by record, in the order of the split run. Records without a counterpart, such
        as experts that one run does not call and attention weights, are left out.
    """
    keys, values, floors = [], [], []
    floor = LEAST_FLOOR
    for key, split_record in split.records.items():
        whole_record, other_record = whole.records.get(key), other.records.get(key)
        if whole_record is None or other_record is None or whole_record.shape != other_record.shape:
            continue
        match = _sequence_of(split_record.shape, whole_record.shape, sequences, rows)
        if match is None:
            continue
        dim, tokens = match
        three = split_record, whole_record, other_record
        if not all(dim in x.projections for x in three):
            continue
        split_rows, whole_rows, other_rows = (x.projections[dim] for x in three)
        # A tensor [T] may have been read as one of [B * T_local], where these are equal.
        if tokens is not None and (len(split_rows[0]), len(whole_rows[0])) != (
            tokens.local_length,
            tokens.length,
        ):
            continue
        floor = max(floor, whole_record.floor)  # later values are computed from this one
        keys.append(key)
        values.append(_largest_errors(split_rows, whole_rows, other_rows, tokens))
        floors.append(floor)
    numbers = torch.stack(values).tolist() if values else []
    return {
        key: Difference.of(error, noise, floor)
        for key, (error, noise), floor in zip(keys, numbers, floors, strict=True)
    }


def _sequence_of(
    split: tuple[int, ...], whole: tuple[int, ...], sequences: list[Tokens], rows: int
) -> tuple[int | None, Tokens | None] | None:
    """Return the dimension of a tensor along which a sequence lies, and that sequence.

    Shapes that differ are of a tensor that is split there. In equal shapes it is the last dimension
    that is as long as a whole sequence, which this rank then holds whole. The first dimension may
    hold all rows of the batch one behind the other.

    Returns:
        ``None`` if the shapes cannot be of one tensor; ``(None, None)`` if they are equal, and no
        dimension is as long as a sequence.
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
            sequence if unlike else _held_whole(sequence)
            for sequence in sequences
            if (split[dim], whole[dim])
            in {
                (n * (sequence.local_length if unlike else sequence.length), n * sequence.length)
                for n in (1, times)
            }
        ]
        # If an encoder's and a decoder's sequence have one length, either may be meant: leave out
        # tokens that are padding in any of them.
        if matches:
            real = torch.stack([sequence.real for sequence in matches]).all(dim=0)
            return dim, replace(matches[0], real=real)
    return None if unlike else (None, None)


def _held_whole(sequence: Tokens) -> Tokens:
    """Return a sequence as one that this rank holds whole."""
    indices = torch.arange(sequence.length, device=sequence.positions.device)
    return replace(
        sequence, local_length=sequence.length, positions=indices, local_positions=indices
    )


def _largest_errors(split: Tensor, whole: Tensor, other: Tensor, tokens: Tokens | None) -> Tensor:
    """Return the largest error and the largest noise of a token, relative to its norm, ``[2]``.

    A token with less than the median norm counts as one of median norm. The error is that of this
    rank's tokens, the noise that of all.

    Args:
        split: Split run's projections of this rank's part, ``[B, T_local, k]``.
        whole: Whole run's projections, ``[B, T, k]``.
        other: Projections of the second whole run, ``[B, T, k]``.
        tokens: Sequence of the dimension; ``None`` if no dimension is split.
    """
    size = whole.norm(dim=-1).nan_to_num()  # [B, T]
    real = torch.ones_like(size, dtype=torch.bool)
    if tokens is not None:
        real = _real_tokens(tokens, len(whole))
    # Tokens of nearly no norm would show rounding as a large relative error.
    typical = size[real].median() if bool(real.any()) else size.new_zeros(())
    size = size.maximum(typical).clamp(min=torch.finfo(torch.float32).tiny)
    noise = _largest_relative(other - whole, size, real)
    if tokens is not None:
        real = _real_tokens(tokens, max(len(split), len(whole)))[:, tokens.positions]
        whole, size = whole[:, tokens.positions], size[:, tokens.positions]
        # Rank by rank: each compares its own tokens with the same tokens of the whole run.
        split = split[:, tokens.local_positions]
    # What is not finite in the whole run is not the ring's fault.
    difference = (split - whole).where(whole.isfinite(), 0.0)
    return torch.stack([_largest_relative(difference, size, real), noise])


def _real_tokens(tokens: Tokens, rows: int) -> Tensor:
    """Return True for tokens that are no padding: ``[B, T]``, or ``[1, T]`` for all rows alike."""
    return tokens.real if rows == len(tokens.real) else tokens.real.all(dim=0, keepdim=True)


def _largest_relative(difference: Tensor, size: Tensor, real: Tensor) -> Tensor:
    """Return the largest norm of a token's difference over its size; NaN counts as infinite."""
    relative = (difference.norm(dim=-1) / size).where(real, 0.0).nan_to_num(nan=torch.inf)
    return relative.max() if relative.numel() else size.new_zeros(())
