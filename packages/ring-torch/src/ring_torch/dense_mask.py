"""A mask given as an array, row by row: for rules that no option says, where it is affordable.

Inside a call the bias says it, by ``-inf``; kernels skip the blocks of which nothing else is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ring_core import checks
from ring_torch.call import Operands, Options


def with_dense_mask(x: Operands, options: Options, ranks: int) -> tuple[Operands, Options]:
    """Options without an array for a mask, and tensors with a bias that says the same.

    Args:
        x: A call's tensors; its bias is added where the mask is true.
        options: The call's; ``mask`` may be booleans ``[T_local, T_kv]`` or ``[B or 1, H or 1,
            T_local, T_kv]``, rows in layout order, columns for all keys in natural order.
        ranks: That hold a sequence.

    Raises:
        ValueError: The mask is malformed or too large.
    """
    mask, (q, k), bias = options.mask, x[:2], x.bias
    if not isinstance(mask, Tensor):
        return x, options
    if q.ndim != 4 or k.ndim != 4:
        return x, options._replace(mask=None)  # which is refused for that
    fact = checks.Tensor(
        tuple(mask.shape), str(mask.dtype).removeprefix("torch."), str(mask.device)
    )
    checks.check_dense_mask(fact, tuple(q.shape), k.shape[1] * ranks, str(q.device))
    shown = mask if mask.ndim == 4 else mask[None, None]
    zero = torch.zeros((), dtype=q.dtype, device=q.device) if bias is None else bias
    hidden = torch.full((), -torch.inf, dtype=zero.dtype, device=q.device)
    masked = torch.where(shown, zero, hidden)
    return x._replace(bias=masked), options._replace(mask=None, bias_masks=True)
