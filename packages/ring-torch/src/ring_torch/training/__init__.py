"""Helpers of a training loop: losses and log-probabilities of a rank's tokens, and batches.

May import ``context`` and what is below it. ``part`` is the one place that computes a rank's part
of cross entropy and log-probabilities, for ``loss``, ``sequences`` and ``hf``; ``sequences`` sums
over the ranks, and ``loss`` counts their labels by it. ``data`` yields batches, ``rollouts`` those
of prompts and completions.
"""

from ring_torch.training.rollouts import (
    RolloutBatch as RolloutBatch,
    RolloutLoader as RolloutLoader,
)
from ring_torch.training.sequences import (
    sum_by_sequence as sum_by_sequence,
    token_log_probs as token_log_probs,
)

__all__ = ["RolloutBatch", "RolloutLoader", "sum_by_sequence", "token_log_probs"]
