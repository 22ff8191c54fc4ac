"""Attention of some queries over the pages of a K/V cache that one rank holds, in plain torch.

It is split-KV attention (Dao et al., "Flash-Decoding", 2023) over ranks: a launch returns the
output and ``lse`` over its own pages, and the results of all ranks are merged. Masks, ALiBi and
chunks are rules over positions, and a page tells the positions of its rows. So a launch does not
care whose pages they are, in which order they lie, and whether queries are of one request or of
many: :func:`attend` is what another kernel has to compute.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ring_core import Mask
from ring_torch.capture import is_capturing

#: Scores of all heads in a block: 4 MiB in float32.
_BLOCK_SCORES = 1 << 20


class Rules(NamedTuple):
    """Options of attention that make scores.

    Attributes:
        mask: Rule over positions; it is causal.
        scale: Factor of the scores.
        softcap: Soft cap of the scores, or ``None``.
        slopes: ALiBi slopes ``[B or 1, H]``, or ``None``.
    """

    mask: Mask
    scale: float
    softcap: float | None
    slopes: Tensor | None

    def first_key(self, position: int) -> int:
        """Return the first position that the query at a position sees."""
        first, (left, _) = 0, self.mask.band
        if left is not None:
            first = max(first, position - left)
        if self.mask.chunk_size is not None:
            first = max(first, position // self.mask.chunk_size * self.mask.chunk_size)
        return first


class PagedKeys(NamedTuple):
    """Pages of keys and values of some requests that are, or were, on one rank.

    Attributes:
        k: Keys ``[pages, page_size, K, D]``.
        v: Values ``[pages, page_size, K, Dv]``, in any memory: K's first ``Dv`` for latents.
        table: Numbers of each request's pages, int32 ``[B, width]``; of columns behind its last
            page any that exist, as no query sees them.
        owner: Rank that the pages are of.
        ranks: Number of ranks: column ``c`` is page ``c * ranks + owner`` of its request.
    """

    k: Tensor
    v: Tensor
    table: Tensor
    owner: int
    ranks: int

    def columns(self, start: int, stop: int) -> range:
        """Return the columns of the pages that hold positions from ``start`` to ``stop``."""
        page_size = self.k.shape[1]
        first = -(-(start // page_size - self.owner) // self.ranks)
        end = -(-(-(-stop // page_size) - self.owner) // self.ranks)
        return range(max(first, 0), max(end, 0))


def attend(
    q: Tensor, positions: Tensor, keys: PagedKeys, columns: range, rules: Rules
) -> tuple[Tensor, Tensor]:
    """Return attention over the keys of some pages, in float32, or float64 for float64.

    Args:
        q: Queries ``[B, n, H, D]``.
        positions: Their positions, integers ``[B, n]``; a query at a negative one sees nothing.
        keys: The pages, ``B`` rows of a table.
        columns: Columns of the table that may hold what a query sees.
        rules: Options.

    Returns:
        ``out [B, n, H, Dv]`` and ``lse [B, H, n]``; 0 and ``-inf`` where a query sees none of them.
    """
    batch, n, heads, _ = q.shape
    _, page_size, kv_heads, _ = keys.k.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    # Query heads of a K/V head are folded into its rows: [B, K, G * n, D].
    folded = q.transpose(1, 2).to(wide).reshape(batch, kv_heads, heads // kv_heads * n, -1)
    top = folded.new_full(folded.shape[:-1], -torch.inf)
    total = torch.zeros_like(top)
    acc = folded.new_zeros(*top.shape, keys.v.shape[-1])
    step = max(1, _BLOCK_SCORES // (batch * heads * n * page_size))
    rows = torch.arange(page_size, device=q.device)
    for start in range(columns.start, columns.stop, step):
        stop = min(start + step, columns.stop)
        pages = keys.table[:, start:stop].long()
        numbers = torch.arange(start, stop, device=q.device) * keys.ranks + keys.owner
        key_positions = (numbers[:, None] * page_size + rows).view(-1)
        visible = rules.mask.rule(positions[:, :, None], key_positions)  # [B, n, m]
        k, v = (x[pages].flatten(1, 2).transpose(1, 2).to(wide) for x in (keys.k, keys.v))
        scores = (folded @ k.mT).mul_(rules.scale)
        if rules.softcap is not None:
            scores.div_(rules.softcap).tanh_().mul_(rules.softcap)
        by_head = scores.view(batch, heads, n, -1)
        if rules.slopes is not None:
            distance = (positions[:, None, :, None] - key_positions).abs()
            by_head.sub_(rules.slopes[:, :, None, None].to(wide) * distance)
        by_head.masked_fill_(~visible[:, None], -torch.inf)
        # A larger maximum shrinks what was summed up so far.
        new_top = torch.maximum(top, scores.amax(dim=-1))
        safe = new_top.masked_fill(new_top == -torch.inf, 0.0)
        shrink, top = (top - safe).exp_(), new_top
        weights = scores.sub_(safe.unsqueeze(-1)).exp_()
        total = total * shrink + weights.sum(dim=-1)
        acc = acc * shrink.unsqueeze(-1) + _weighted(weights, v, visible)
    out = acc / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return (
        out.view(batch, heads, n, -1).transpose(1, 2),
        (top + total.log()).view(batch, heads, n),
    )


def _weighted(weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Return ``weights @ v`` in which NaN and infinity reach only the rows that see their key.

    Weights of hidden keys are 0, and ``0 * nan`` is ``nan``. Rows that see one get NaN. What stands
    in pages that are free, or behind a request's tokens, is hidden from all.
    """
    # A graph that is captured cannot look at numbers on the host.
    if not is_capturing() and bool(torch.isfinite(v).all()):
        return weights @ v
    finite = torch.isfinite(v)
    result = weights @ v.masked_fill(~finite, 0.0)
    batch, n, keys = visible.shape
    seen = visible[:, None, None].expand(batch, 1, weights.shape[2] // n, n, keys)
    spoilt = seen.reshape(batch, 1, -1, keys).to(v.dtype) @ (~finite).to(v.dtype)
    return result.masked_fill(spoilt > 0, torch.nan)
