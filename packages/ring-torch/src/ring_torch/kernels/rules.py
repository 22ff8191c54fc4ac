"""Evaluate predicates on the device: as expressions, or by the tiles that a plan found."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ring_core.masks.expression import OPERATORS, evaluated
from ring_core.plan.tile_mask import BlockGeometry, TileLookup
from ring_torch.capture import capture_safe_cache

_OPERATORS = {**OPERATORS, "max": torch.maximum}


def shown(blocks: BlockGeometry, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """Return which queries see which keys by the mask's rule, booleans ``[n, m]``.

    Documents may count or not: callers compare them. Torch never calls the predicate, whose
    fractions it would round to other numbers than the plan has.

    Args:
        blocks: The mask as planned.
        q_pos: Positions of queries among the keys, int64 ``[n]``; those of padding see anything.
        k_pos: Positions of keys, int64 ``[m]``.
    """
    rows, columns, expression = q_pos[:, None], k_pos[None], blocks.rule.expression
    if expression is not None:
        visible = evaluated(expression, rows, columns, _OPERATORS)
    elif (lookup := _lookup(blocks, q_pos.device)) is not None:
        return lookup.shown(rows - blocks.q_offset, columns)  # type: ignore[no-any-return]  # of any framework
    else:
        visible = blocks.dense(*(np.asarray(x.cpu()) for x in (q_pos, k_pos)))
    return torch.as_tensor(visible, dtype=torch.bool, device=q_pos.device).expand(
        len(q_pos), len(k_pos)
    )


@capture_safe_cache(maxsize=16)
def _lookup(blocks: BlockGeometry, device: torch.device) -> TileLookup | None:
    """Return the tiles of a predicate on a device; ``None`` if there are too many."""
    if blocks.lookup is None:
        return None
    tables = (torch.as_tensor(x, device=device) for x in blocks.lookup)
    return TileLookup(*(x if x.dtype == torch.uint8 else x.long() for x in tables))
