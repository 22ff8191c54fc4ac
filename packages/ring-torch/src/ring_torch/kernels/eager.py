"""Kernel ``eager``: blockwise attention in plain torch, for any device, dtype and option.

One block of scores is in memory at a time. The forward keeps a running softmax (Milakov and
Gimelshein, arXiv 1805.02867) that starts from the accumulated state, so that merging costs nothing;
the backward recomputes probabilities from the final ``lse`` (Dao et al., arXiv 2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce

import numpy as np
import torch
from torch import Tensor

from ring_core import WorkItem, philox
from ring_core.base.arguments import EMPTY, FULL, TILE, not_none
from ring_core.base.config import EVERYTHING
from ring_torch.accumulate import sums_one_by_one
from ring_torch.kernels.api import Kernel
from ring_torch.kernels.rules import shown
from ring_torch.records import (
    AttentionState,
    Backward,
    BackwardInputs,
    Forward,
    KernelParams,
    KeyBlock,
    KeyGrads,
    Mode,
    QueryBlock,
    QueryGrads,
)

BLOCK_K = 256  # keys of a block
BLOCK_SCORES = 1 << 19  # scores of all heads in a block: 2 MiB in float32
_LOW_WORD = 0xFFFFFFFF


class EagerKernel(Kernel):
    """Kernel ``eager``, in torch's operations: slow, exact, and complete."""

    capabilities = replace(
        EVERYTHING,
        name="eager",
        dtypes=("float64", "float32", "bfloat16", "float16"),
        fused_backward=False,
    )
    reads_on_host = True

    def forward(self, item: WorkItem, params: KernelParams) -> Forward:
        """Return the launch of an item's forward, which merges as it computes."""
        return Forward(item, partial(self.attend, item, params), ("merge",))

    def backward(self, items: Sequence[WorkItem], params: KernelParams, *, adds: bool) -> Backward:
        """Return the launch of the backward of items."""
        launches = [partial(self.differentiate, item, params) for item in items]
        return sums_one_by_one(items, launches, params, adds=adds)

    def attend(
        self,
        item: WorkItem,
        params: KernelParams,
        rows: QueryBlock,
        columns: KeyBlock,
        into: AttentionState | None,
        _mode: Mode,
        _key: object = None,
    ) -> AttentionState:
        """Attend to the item's keys and merge into ``into``, one block of rows after the other."""
        assert into is not None
        blocks = ScoreBlocks(rows, columns, item, params)
        v_clean = is_clean(columns.v)
        # Rows of different blocks share nothing, so each block goes through all its keys at once.
        for i in _row_blocks(rows, params):
            q = _to_groups(rows.q[:, i], columns.k.shape[2], into.out.dtype)
            block_state = into.take(i)
            # Resume the running softmax from the accumulated state: with `top = lse` its
            # denominator is 1, or 0 in rows that have seen nothing.
            acc = _to_groups(block_state.out, columns.k.shape[2], into.out.dtype)
            top = block_state.lse.reshape(acc.shape[:-1])
            total = (top > -torch.inf).to(acc.dtype)
            acc = acc * total.unsqueeze(-1)
            for j in blocks.key_blocks(i, params.block_k or BLOCK_K):
                scores, _, visible = blocks.scores(q, i, j)
                # A larger maximum shrinks what was summed up so far.
                new_top = torch.maximum(top, scores.amax(dim=-1))
                safe = new_top.masked_fill(new_top == -torch.inf, 0.0)
                shrink = (top - safe).exp_()
                weights = scores.sub_(safe.unsqueeze(-1)).exp_()
                total = total * shrink + weights.sum(dim=-1)
                v = _heads_first(columns.v[:, j], acc.dtype)
                # Dropout changes the weighted sum, but not the denominator, which is summed above.
                keep = blocks.keep(weights, i, j)
                if keep is not None:
                    weights.mul_(keep)
                acc = acc * shrink.unsqueeze(-1) + _masked_matmul(
                    weights, visible, v, clean=v_clean
                )
                top = new_top
            # Write the normalised output and `lse` back over the state.
            block_state.out.copy_(
                _from_groups(
                    acc / total.masked_fill(total == 0, 1.0).unsqueeze(-1), block_state.out.shape
                )
            )
            block_state.lse.copy_((top + total.log()).view(block_state.lse.shape))
        return into

    def differentiate(
        self,
        item: WorkItem,
        params: KernelParams,
        rows: QueryBlock,
        columns: KeyBlock,
        upstream: BackwardInputs,
        row_grads: QueryGrads,
        column_grads: KeyGrads,
    ) -> None:
        """Add the item's gradients to the accumulators, one block of scores after the other."""
        blocks = ScoreBlocks(rows, columns, item, params)
        kv_heads, dtype = columns.k.shape[2], row_grads.dq.dtype
        q_clean, k_clean, do_clean = map(is_clean, (rows.q, columns.k, upstream.dout))
        for i in _row_blocks(rows, params):
            q, dout = (_to_groups(x[:, i], kv_heads, dtype) for x in (rows.q, upstream.dout))
            lse = upstream.lse[:, :, i].reshape(q.shape[:-1]).unsqueeze(-1)
            # Probabilities of rows that see nothing become 0.
            safe = torch.where(lse == -torch.inf, torch.inf, lse)
            delta = not_none(upstream.delta)[:, :, i].reshape(q.shape[:-1]).unsqueeze(-1)
            # dQ of these rows is summed apart, and added once. dK and dV are added to in place:
            # later blocks of rows add to the same columns.
            dq = torch.zeros_like(q)
            for j in blocks.key_blocks(i, params.block_k or BLOCK_K):
                k, v = _heads_first(columns.k[:, j], dtype), _heads_first(columns.v[:, j], dtype)
                scores, slope, visible = blocks.scores(q, i, j)
                # Final probabilities: `lse` is that over all keys, not of this item.
                probs = scores.sub_(safe).exp_()
                if visible is not None:  # in rows that hold NaN, masked scores became NaN too
                    probs.masked_fill_(~visible, 0.0)
                keep = blocks.keep(probs, i, j)
                dscores = dout @ v.mT
                if keep is not None:
                    dscores.mul_(keep)
                dscores.sub_(delta).mul_(probs)
                if visible is not None:  # 0 times NaN
                    dscores.masked_fill_(~visible, 0.0)
                if row_grads.dbias is not None:
                    blocks.add_bias_grad(row_grads.dbias, dscores, i, j)
                dscores.mul_(params.scale)
                if slope is not None:
                    dscores.mul_(slope)
                    if visible is not None:  # the slope of a masked score may be NaN
                        dscores.masked_fill_(~visible, 0.0)
                dq += _masked_matmul(dscores, visible, k, clean=k_clean)
                weights = probs if keep is None else probs * keep
                visible_t = None if visible is None else visible.mT
                column_grads.dk[:, j] += _masked_matmul(
                    dscores.mT, visible_t, q, clean=q_clean
                ).transpose(1, 2)
                column_grads.dv[:, j] += _masked_matmul(
                    weights.mT, visible_t, dout, clean=do_clean
                ).transpose(1, 2)
            row_grads.dq[:, i] += _from_groups(dq, row_grads.dq[:, i].shape)


@dataclass(frozen=True)
class ScoreBlocks:
    """Blocks of scores of a work item: which of them are visible, and their masked scores.

    Scores of a block of rows ``i`` and columns ``j`` are ``[B, K, G * len(i), len(j)]``: the ``G =
    H / K`` query heads of a K/V head are folded into the rows.
    """

    rows: QueryBlock
    columns: KeyBlock
    item: WorkItem
    params: KernelParams

    def key_blocks(self, i: slice, size: int) -> Iterator[slice]:
        """Yield the blocks of columns, of ``size`` each, that some of the rows ``i`` may see."""
        item, first_row, last_row = self.item, i.start, i.stop - 1
        start = 0 if item.hi is None else max(0, first_row - item.hi)
        stop = (
            self.columns.k.shape[1]
            if item.lo is None
            else min(self.columns.k.shape[1], last_row - item.lo + 1)
        )
        if item.cu_q is not None and item.cu_k is not None:
            documents = np.searchsorted(item.cu_q, [first_row, last_row], side="right")
            start = max(start, int(item.cu_k[documents[0] - 1]))
            stop = min(stop, int(item.cu_k[documents[1]]))
        # A predicate, or a mask in the form of a bias, may hide blocks between them.
        bias = self.rows.bias if self.params.bias_masks else None
        for j in _slices(start, stop, size):
            is_hidden = item.tiles is not None and not self._tiles(i, j).any()
            if not is_hidden and (bias is None or (self._bias(bias, i, j) != -torch.inf).any()):
                yield j

    def scores(self, q: Tensor, i: slice, j: slice) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the masked scores of a block, the derivative of its softcap, and its mask.

        A derivative of ``None`` is 1 everywhere; a mask of ``None`` shows everything. Masked scores
        are ``-inf``.
        """
        rows, params = self.rows, self.params
        x = (q @ _heads_first(self.columns.k[:, j], q.dtype).mT).mul_(params.scale)
        slope = None
        if params.softcap is not None:
            squashed = torch.tanh(x / params.softcap)
            x, slope = squashed * params.softcap, 1 - squashed * squashed
        visible = self._visible(i, j)
        if rows.bias is None and rows.slopes is None and visible is None:
            return x, slope, None
        by_head = self._by_head(x, i)
        if rows.bias is not None:
            bias = self._bias(rows.bias, i, j).to(x.dtype)
            shift = rows.bias_shift
            by_head = by_head + (bias if shift is None else bias - shift[:, :, i, None])
            visible = bias != -torch.inf if visible is None else visible & (bias != -torch.inf)
        if rows.slopes is not None:
            distance = (not_none(rows.position)[i, None] - not_none(self.columns.position)[j]).abs()
            by_head = by_head - rows.slopes[:, :, None, None].to(x.dtype) * distance.to(x.dtype)
        if visible is None:
            return by_head.reshape(x.shape), slope, None
        by_head.masked_fill_(~visible, -torch.inf)
        return by_head.reshape(x.shape), slope, visible.expand(by_head.shape).reshape(x.shape)

    def _bias(self, bias: Tensor, i: slice, j: slice) -> Tensor:
        """Return a block of the bias, ``[B or 1, H or 1, n, m]``."""
        return bias[:, :, i].index_select(-1, not_none(self.columns.position)[j])

    def keep(self, like: Tensor, i: slice, j: slice) -> Tensor | None:
        """Return the factors of dropout, 0 or ``1 / (1 - p)``, for a block; ``None`` without it."""
        p = self.params.dropout_p
        if p == 0:
            return None
        seed, heads = not_none(self.rows.dropout)
        index, position = not_none(self.rows.indices)[i], not_none(self.columns.position)[j]
        is_kept = dropout_keep(
            p,
            seed,
            range(len(self.rows.q)),
            self.rows.q.shape[2] if heads is None else heads,
            index,
            position,
        )
        return is_kept.to(like.dtype).div_(1 - p).view(like.shape)

    def add_bias_grad(self, dbias: Tensor, dscores: Tensor, i: slice, j: slice) -> None:
        """Add a block's gradient to the bias's, summed over the dimensions it broadcasts over."""
        grad = self._by_head(dscores, i)
        for dim in (0, 1):
            if dbias.shape[dim] == 1:
                grad = grad.sum(dim=dim, keepdim=True)
        dbias[:, :, i].index_add_(-1, not_none(self.columns.position)[j], grad.to(dbias.dtype))

    def _by_head(self, x: Tensor, i: slice) -> Tensor:
        """Return ``x [B, K, G * n, m]`` as ``[B, H, n, m]``."""
        return x.reshape(x.shape[0], self.rows.q.shape[2], i.stop - i.start, x.shape[-1])

    def _visible(self, i: slice, j: slice) -> Tensor | None:
        """Return the mask of a block without the bias's, ``[B or 1, 1, n, m]``; ``None`` shows all.

        It is made of the band, documents, the predicate and segment ids.
        """
        item, rows, columns, device = self.item, self.rows, self.columns, self.rows.q.device
        conditions = []
        if (item.lo is not None and i.start - (j.stop - 1) < item.lo) or (
            item.hi is not None and i.stop - 1 - j.start > item.hi
        ):
            distance = torch.arange(i.start, i.stop, device=device)[:, None] - torch.arange(
                j.start, j.stop, device=device
            )
            conditions += [distance >= item.lo] if item.lo is not None else []
            conditions += [distance <= item.hi] if item.hi is not None else []
        if item.cu_q is not None:
            q_doc, k_doc = self._documents
            conditions.append(q_doc[i, None] == k_doc[j])
        if item.tiles is not None and not (self._tiles(i, j) == FULL).all():
            # The whole rule of the mask: the predicate's, and documents and chunks.
            q_pos, k_pos = not_none(rows.position)[i], not_none(columns.position)[j]
            conditions.append(shown(not_none(self.params.blocks), q_pos, k_pos))
            if (cuts := self.params.boundaries) is not None:
                q_cell, k_cell = (torch.bucketize(x, cuts, right=True) for x in (q_pos, k_pos))
                conditions.append(q_cell[:, None] == k_cell)
        visible = reduce(torch.logical_and, conditions)[None, None] if conditions else None
        if rows.segments is None or columns.segments is None:
            return visible
        q_ids, k_ids = rows.segments[:, i, None], columns.segments[:, None, j]
        same_segment = ((q_ids == k_ids) & (q_ids >= 0))[:, None]
        return same_segment if visible is None else visible & same_segment

    @cached_property
    def _documents(self) -> tuple[Tensor, Tensor]:
        """Number of the document of each row, and of each column."""
        device, item = self.rows.q.device, self.item
        q_doc, k_doc = (
            torch.bucketize(
                torch.arange(n, device=device), torch.as_tensor(cu, device=device), right=True
            )
            for n, cu in ((self.rows.q.shape[1], item.cu_q), (self.columns.k.shape[1], item.cu_k))
        )
        return q_doc, k_doc

    def _tiles(self, i: slice, j: slice) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        """Return the kinds of the tiles that a block touches; ``EMPTY`` is 0."""
        assert self.item.tiles is not None and EMPTY == 0
        rows = slice(i.start // TILE, -(-i.stop // TILE))
        return self.item.tiles[rows, j.start // TILE : -(-j.stop // TILE)]


def _row_blocks(rows: QueryBlock, params: KernelParams) -> Iterator[slice]:
    """Yield blocks of rows, so many that a block of scores has about ``BLOCK_SCORES`` numbers."""
    batch, length, heads, _ = rows.q.shape
    size = params.block_q or max(16, BLOCK_SCORES // (batch * heads * (params.block_k or BLOCK_K)))
    return _slices(0, length, size)


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def _to_groups(x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Return ``x [B, n, H, D]`` as ``[B, K, G * n, D]``: a K/V head's query heads are stacked."""
    batch, n, heads, dim = x.shape
    return x.transpose(1, 2).to(dtype).reshape(batch, kv_heads, heads // kv_heads * n, dim)


def _from_groups(x: Tensor, shape: torch.Size) -> Tensor:
    """Undo :func:`_to_groups`, for ``shape = [B, n, H, D]``."""
    batch, n, heads, dim = shape
    return x.reshape(batch, heads, n, dim).transpose(1, 2)


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x [B, m, K, D]`` as ``[B, K, m, D]``, in a dtype."""
    return x.transpose(1, 2).to(dtype)


def _masked_matmul(weights: Tensor, visible: Tensor | None, x: Tensor, *, clean: bool) -> Tensor:
    """Return ``weights @ x`` without letting NaN or infinity in rows of ``x`` through the mask.

    Masked weights are 0, and ``0 * nan`` is ``nan``. ``clean`` says that ``x`` is finite.
    """
    if visible is None or clean:
        return weights @ x
    is_nonfinite = ~torch.isfinite(x).all(dim=-1)
    result = weights @ x.masked_fill(is_nonfinite.unsqueeze(-1), 0.0)
    # Rows with NaN or infinity are few: add each by itself, where it is visible.
    for j in is_nonfinite.flatten(0, 1).any(dim=0).nonzero().flatten().tolist():
        term = weights[..., :, j, None] * x[..., j, None, :]
        is_visible = visible[..., :, j, None] & is_nonfinite[..., j, None, None]
        result = result + torch.where(is_visible, term, 0.0)
    return result


def is_clean(x: Tensor) -> bool:
    """Return True if all numbers are finite."""
    return bool(torch.isfinite(x).all())


def dropout_keep(
    p: float, seed: int, batch: range, heads: int | Tensor, index: Tensor, position: Tensor
) -> Tensor:
    """Return which softmax weights survive dropout.

    The random numbers are those of Philox-4x32-10 in ``ring_core``, the same in every kernel.

    Args:
        p: Probability to drop.
        seed: The seed, 64 bits.
        batch: Indices of sequences of the batch.
        heads: Number of heads, which count from 0, or their global indices, int64.
        index: Global indices of the queries.
        position: Global indices of the keys, ascending.

    Returns:
        Booleans ``[len(batch), H, len(index), len(position)]``.
    """
    device = index.device
    groups, group_index = torch.unique_consecutive(position >> 2, return_inverse=True)
    b = torch.arange(batch.start, batch.stop, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=device) if isinstance(heads, int) else heads
    h = h.view(1, -1, 1, 1)
    random_words = torch.stack(
        _random_words((groups, index.view(-1, 1), h, b), philox.seed_key(seed)), dim=-1
    )
    return random_words.flatten(-2)[
        ..., group_index * 4 + (position & 3)
    ] >= philox.dropout_threshold(p)


def _random_words(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, ...]:
    """Return the four words that Philox makes of each counter, each in int64."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(philox.ROUNDS):
        high0, low0 = _multiply(c0, philox.MULTIPLIERS[0])
        high1, low1 = _multiply(c2, philox.MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + philox.KEY_STEPS[0]) & _LOW_WORD, (k1 + philox.KEY_STEPS[1]) & _LOW_WORD
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of the product of 32-bit numbers held in int64.

    The product needs 64 bits and int64 has a sign, so the high half comes from two 48-bit products.
    """
    high, low = a * (b >> 16), a * (b & 0xFFFF)
    return (high + (low >> 16)) >> 16, (a * b) & _LOW_WORD
