"""Cross entropy of a rank's tokens, given the number of labels of all ranks; nothing is sent."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100  # torch's default label of a token that has nothing to predict
Count = Tensor | float | None


def loss_part(
    logits: Tensor, labels: Tensor, divisor: Count, *, weight: Tensor | None = None,
    ignore_index: int = IGNORED, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the sum of cross entropy over tokens, divided by the labels of all ranks.

    Args:
        logits: ``[..., V]``; widened to float32.
        labels: Integers, a label for each row of the logits.
        divisor: Number of labels of all ranks, or sum of their weights; ``None`` for the sum alone.
        weight: Weight of each class, ``[V]``.
        ignore_index: Label of rows that do not count.
        label_smoothing: Part of a label's probability that all classes share.
    """
    total = functional.cross_entropy(
        logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32)),
        labels.flatten().long(), weight, ignore_index=ignore_index, reduction="sum",
        label_smoothing=label_smoothing,
    )  # fmt: skip
    return mean_of(total, divisor)


def mean_of(total: Tensor, divisor: Count) -> Tensor:
    """Return a sum over a divisor, of any real dtype, in the dtype of the sum."""
    return total if divisor is None else (total / divisor).to(total.dtype)
