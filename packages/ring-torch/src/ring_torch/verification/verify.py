"""Run a batch split and twice whole, compare the runs, and judge their differences."""

from __future__ import annotations

import math

from ring_torch.verification.comparison import compare_traces
from ring_torch.verification.judgement import (
    ComparedRuns,
    VerifyReport,
    gradient_differences,
    judge,
)
from ring_torch.verification.runs import Runner
from ring_torch.verification.state import unchanged


def compare_with_whole(runner: Runner, attention: str, other_attention: str | None) -> VerifyReport:
    """Run the runner's batch split and whole, compare, and return the differences.

    Args:
        runner: Runner of the model and the batch.
        attention: Attention of the whole run.
        other_attention: Attention of a second whole run, which shows the noise; ``None`` for the
            same, with outputs of modules changed at random by a unit in the last place.

    Raises:
        WrongResultError: The split run differs by more than rounding.
        ValueError: There is nothing to compare, or the whole run's loss is not finite.
    """
    with unchanged(runner.model):
        split = runner.run()
        with runner.unhooked():
            whole = runner.run(attention)
            errors = runner.gradient_distances(split, whole)
            split.gradients.clear()  # free their memory before the next run
            other = runner.run(other_attention or attention, perturbs=other_attention is None)
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
