"""The affine maps of runs in Triton, which flash-linear-attention's own kernels make slowly.

Of a delta rule's run the map is what its recurrence makes of the columns ``[0 | I]``: of zeros what
the run leaves, of the identity its transition. Each program takes some columns through all chunks
of a run. A run of linear attention adds ``D_t k_t v_t^T`` of each token ``t`` to the state, where
``D_t`` is the decay until the run's end: programs sum pieces of it side by side.
"""

# Triton's decorator, and the arguments of kernels, have no types in Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

Bounds = Sequence[tuple[int, int]]  #: First token of each run, and the one behind its last.

_CHUNK = 64  # tokens, of the library's kernels
_PIECE = 1024  # tokens of a sum that one program makes
_COLUMNS = 64  # of a state, of one program


@triton.jit
def _delta_maps(
    k, w, u, decay, bounds, maps, H, HV, K, V, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_DECAY: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Write some columns of a run's ``[state | transition]``, ``[K, V + K]``, of one head."""
    block, head, run = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, end = tl.load(bounds + 2 * run), tl.load(bounds + 2 * run + 1)
    i, j, s = tl.arange(0, BK), block * BV + tl.arange(0, BV), tl.arange(0, C)
    # Columns of the state fill whole blocks; those of the transition begin with the next block.
    of_state = tl.cdiv(V, BV) * BV
    is_key = i < K
    state = tl.where(i[:, None] == j[None, :] - of_state, 1.0, 0.0)
    for start in range(first, end, C):
        t = start + s
        is_token = t < end
        rows, last = t * HV + head, tl.minimum(start + C, end) - 1
        # What the chunk's tokens write is what they write to zeros, less what they take away.
        taken = tl.load(
            w + rows[:, None] * K + i[None, :], mask=is_token[:, None] & is_key[None, :], other=0.0
        )
        written = tl.load(
            u + rows[:, None] * V + j[None, :], mask=is_token[:, None] & (j < V)[None, :], other=0.0
        ).to(tl.float32)  # fmt: skip
        written -= tl.dot(taken, state.to(taken.dtype))
        if BY_CHANNEL:
            channels = (last * HV + head) * K + i
            state *= tl.exp2(tl.load(decay + channels, mask=is_key, other=0.0))[:, None]
        elif HAS_DECAY:
            until = tl.load(decay + last * HV + head)
            sums = tl.load(decay + rows, mask=is_token, other=0.0)
            written *= tl.where(is_token, tl.exp2(until - sums), 0.0)[:, None]
            state *= tl.exp2(until)
        keys = (t * H + head // (HV // H))[None, :] * K + i[:, None]
        key = tl.load(k + keys, mask=is_key[:, None] & is_token[None, :], other=0.0)
        state = tl.dot(key, written.to(key.dtype), state)
    is_state = j < of_state
    column = tl.where(is_state, j, j - of_state + V)
    is_column = tl.where(is_state, j < V, j < of_state + K)
    cells = ((run * HV + head) * K + i)[:, None] * (V + K) + column[None, :]
    tl.store(maps + cells, state, mask=is_key[:, None] & is_column[None, :])


def delta_maps(
    k: Tensor, w: Tensor, u: Tensor, decay: Tensor | None, runs: Bounds, *, by_channel: bool
) -> tuple[Tensor, Tensor]:
    """Return the transitions ``[runs, HV, K, K]`` and states ``[runs, HV, K, V]`` of runs.

    Args:
        k: Keys as states are written, ``[1, tokens, H, K]``, contiguous, in 16 bits.
        w: What each token takes from the state before its chunk, ``[1, tokens, HV, K]``.
        u: What it writes to zeros, ``[1, tokens, HV, V]``.
        decay: Sums of logarithms of decays to base 2 since its chunk began, ``[1, tokens, HV]``, or
            of each key channel ``[1, tokens, HV, K]``; ``None`` for no decay.
        runs: Tokens of each run.
        by_channel: True if each key channel has a decay.
    """
    (_, _, heads, keys), (value_heads, values) = k.shape, u.shape[2:]
    padded = triton.next_power_of_2(max(keys, 16))
    columns = min(_COLUMNS, triton.next_power_of_2(max(keys, values, 16)))
    shape = len(runs), value_heads, keys, values + keys
    both = torch.empty(shape, dtype=torch.float32, device=k.device)
    bounds = torch.tensor(runs, dtype=torch.int64, device=k.device)
    blocks = -(-values // columns) + -(-keys // columns)
    _delta_maps[blocks, value_heads, len(runs)](
        k, w, u, decay, bounds, both, heads, value_heads, keys, values, C=_CHUNK, BK=padded,
        BV=columns, HAS_DECAY=decay is not None, BY_CHANNEL=by_channel,
        # Wide keys of several chunks would not fit into shared memory.
        **({"num_warps": 4} if padded <= 128 else {"num_warps": 8, "num_stages": 1}),
    )  # fmt: skip
    return both[..., values:], both[..., :values]


@triton.jit
def _weighted_products(
    x, y, weight, bounds, sums, tokens, HX, H, K, V, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Write the sum of ``exp(weight_t) x_t y_t^T`` over a piece's tokens, some columns of it."""
    block, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, end = tl.load(bounds + 2 * piece), tl.load(bounds + 2 * piece + 1)
    i, columns, s = tl.arange(0, BK), block * BV + tl.arange(0, BV), tl.arange(0, C)
    is_key, is_column = i < K, columns < V
    total = tl.zeros([BK, BV], tl.float32)
    for start in range(first, end, C):
        t = start + s
        is_token = t < end
        left = tl.load(
            x + (t * HX + head // (H // HX))[None, :] * K + i[:, None],
            mask=is_key[:, None] & is_token[None, :], other=0.0,
        )  # fmt: skip
        right = tl.load(
            y + (t * H + head)[:, None] * V + columns[None, :],
            mask=is_token[:, None] & is_column[None, :], other=0.0,
        )  # fmt: skip
        if HAS_WEIGHT:
            logs = tl.load(weight + head * tokens + t, mask=is_token, other=0.0)
            left = (left.to(tl.float32) * tl.exp(logs)[None, :]).to(right.dtype)
        total = tl.dot(left, right, total)
    cells = ((piece * H + head) * K + i)[:, None] * V + columns[None, :]
    tl.store(sums + cells, total, mask=is_key[:, None] & is_column[None, :])


def weighted_products(x: Tensor, y: Tensor, weight: Tensor | None, runs: Bounds) -> Tensor:
    """Return ``sum_t exp(weight_t) x_t y_t^T`` over each run's tokens.

    It is ``[runs, H, K, V]``, in float32.

    Args:
        x: ``[1, tokens, heads, K]``, contiguous, in 16 bits; ``heads`` divides ``H``.
        y: ``[1, tokens, H, V]``, likewise.
        weight: Logarithms, ``[H, tokens]``, contiguous, in float32; ``None`` for zeros.
        runs: Tokens of each run.
    """
    (_, tokens, x_heads, keys), (heads, values) = x.shape, y.shape[2:]
    padded = triton.next_power_of_2(max(keys, 16))
    columns = min(_COLUMNS, triton.next_power_of_2(max(values, 16)))
    pieces = [[(n, min(n + _PIECE, end)) for n in range(first, end, _PIECE)] for first, end in runs]
    bounds = torch.tensor([n for run in pieces for n in run], dtype=torch.int64, device=x.device)
    sums = torch.empty(len(bounds), heads, keys, values, dtype=torch.float32, device=x.device)
    _weighted_products[-(-values // columns), heads, len(bounds)](
        x, y, weight, bounds, sums, tokens, x_heads, heads, keys, values, C=_CHUNK, BK=padded, BV=columns,
        HAS_WEIGHT=weight is not None, num_warps=4 if padded <= 128 else 8,
    )  # fmt: skip
    return torch.stack([part.sum(0) for part in sums.split([len(run) for run in pieces])])
