"""The step program: what to move, compute and send home, in which order.

Executors differ (streams, barriers, a loop over ranks in one process); the order does not, and it
is decided here. Forward, K/V of the next stage travel while a stage computes::

    step 0 (own block) | step 1 | ... | step n      K/V arrive from ever further behind

Backward, the stages run in reverse from the K/V that arrived last, so that the own block comes last
and hides the last hop of dK/dV home::

    step n | ... | step 1 | step 0                  dK/dV travel with K/V, one stage late
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ring_core._schedule import Step

HELP_PIECES = 4


@dataclass(frozen=True)
class Stage:
    """One stage: start the transfers named here, compute a step, then collect the transfers.

    Attributes:
        step: Compute the work items of this step.
        kv_hop: Before computing, start moving K/V to the rank this far ahead, for the next stage;
            ``None`` moves nothing.
        grad_hop: Backward: after computing, add the step's dK/dV to those that arrived and start
            moving them to the rank this far ahead.
        helps: Ranks compute for others in this step, after their own items. What belongs to the
            helped queries travels ``steps[step].shift`` ahead in ``HELP_PIECES`` pieces of rows
            (``WorkItem.cut``), each while the piece before is computed, the first one during the
            stage before; the results go back piece by piece.
    """

    step: int
    kv_hop: int | None = None
    grad_hop: int | None = None
    helps: bool = False


def forward_program(steps: Sequence[Step]) -> tuple[Stage, ...]:
    """Stages of the forward pass; the last one moves nothing."""
    stages = []
    for n, step in enumerate(steps):
        following = steps[n + 1] if n + 1 < len(steps) else None
        stages.append(
            Stage(
                step=n,
                kv_hop=following.shift - step.shift if following else None,
                helps=step.helps != "none",
            )
        )
    return tuple(stages)


def backward_program(steps: Sequence[Step]) -> tuple[Stage, ...]:
    """Stages of the backward pass; the own block, run last, needs no K/V from afar."""
    stages = []
    for n in range(len(steps) - 1, -1, -1):
        hop = steps[n - 1].shift - steps[n].shift if n > 0 else None
        stages.append(
            Stage(
                step=n,
                kv_hop=hop if n > 1 else None,
                grad_hop=hop,
                helps=steps[n].helps != "none",
            )
        )
    return tuple(stages)
