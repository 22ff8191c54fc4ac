"""Dropout in the backward for Hopper: Philox by global indices, as in ``ring_core.philox``.

One call of Philox draws the words of four neighbouring keys of a query. Threads that hold these
scores are several, so the calls of a block are dealt out anew: each is made once, reduced to four
bits, which say what is kept, and these go to the threads that need them, within a warp.
"""


# The arguments and values of kernels have no types in Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ring_core.philox import KEY_STEPS, MULTIPLIERS, ROUNDS as _ROUNDS

ROUNDS = gl.constexpr(_ROUNDS)
A, B = gl.constexpr(MULTIPLIERS[0]), gl.constexpr(MULTIPLIERS[1])
A_STEP, B_STEP = gl.constexpr(KEY_STEPS[0]), gl.constexpr(KEY_STEPS[1])

#: Layouts of scores ``[128 keys, 64 queries]``: of the calls ``[32, 64]``, and of
#: the scores with the bits of both indices apart, ``[8, 2, 2, 4, 2, 16, 2]``: a thread makes the
#: calls that differ in the second, fifth and last, and keeps their results in one word.
CALLS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [2, 0], [0, 32]],
        lane_bases=[[0, 2], [0, 4], [0, 8], [0, 16], [1, 0]],
        warp_bases=[[4, 0], [8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 64],
    )
)


def _at(dim: int, value: int) -> list[int]:
    return [value if n == dim else 0 for n in range(7)]


SCORES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[_at(6, 1), _at(1, 1), _at(5, 4), _at(5, 8), _at(4, 1)],
        lane_bases=[_at(5, 1), _at(5, 2), _at(3, 1), _at(3, 2), _at(2, 1)],
        warp_bases=[_at(0, 1), _at(0, 2), _at(0, 4)],
        block_bases=[],
        shape=[8, 2, 2, 4, 2, 16, 2],
    )
)


class Seed(NamedTuple):
    """The parts of Philox's counter and key that are the same for all scores of a tile.

    Attributes:
        low, high: uint32, the words of the seed.
        batch, head: Global indices of the batch row and the query head.
    """

    low: Any
    high: Any
    batch: Any
    head: Any


@gluon.constexpr_function
def along(dim, layout):
    """Return the layout of one dimension of a layout."""
    for n in reversed(range(len(layout.shape))):
        layout = gl.SliceLayout(n, layout) if n != dim else layout
    return layout


@gluon.jit
def seed_of(dropout, b, head, consts: gl.constexpr):
    """Return the seed of a batch row and query head; ``dropout`` is int32 ``[3 + H]``.

    It holds the seed's words, the global index of the first batch row, and those of all heads.
    """
    seed = Seed(0, 0, 0, 0)
    if consts.DROPPED is not None:
        seed = Seed(
            gl.load(dropout).to(gl.uint32, bitcast=True),
            gl.load(dropout + 1).to(gl.uint32, bitcast=True),
            gl.load(dropout + 2) + b,
            gl.load(dropout + 3 + head),
        )
    return seed


@gluon.jit
def kept_of_calls(seed, queries, groups, consts: gl.constexpr):
    """Return what is kept of four neighbouring keys each, one bit a key, int32.

    ``queries`` and ``groups`` are indices of queries, and of keys over 4; they broadcast.
    """
    zeros = (queries + groups).to(gl.uint32) * 0
    c0, c1 = zeros + groups.to(gl.uint32), zeros + queries.to(gl.uint32)
    c2, c3 = zeros + seed.head.to(gl.uint32), zeros + seed.batch.to(gl.uint32)
    k0, k1 = seed.low, seed.high
    for _ in gl.static_range(ROUNDS):
        a, b = c0.to(gl.uint64) * A, c2.to(gl.uint64) * B
        c0 = (b >> 32).to(gl.uint32) ^ c1 ^ k0
        c2 = (a >> 32).to(gl.uint32) ^ c3 ^ k1
        c1, c3 = b.to(gl.uint32), a.to(gl.uint32)
        k0 += A_STEP
        k1 += B_STEP
    return (
        gl.where(c0 >= consts.DROPPED, 1, 0)
        | gl.where(c1 >= consts.DROPPED, 2, 0)
        | gl.where(c2 >= consts.DROPPED, 4, 0)
        | gl.where(c3 >= consts.DROPPED, 8, 0)
    )


@gluon.jit
def packed_calls(calls):
    """Return a word ``[8, 2, 16]`` for the eight calls of each thread, for ``calls [32, 64]``."""
    group = gl.arange(0, 32, layout=gl.SliceLayout(1, CALLS))[:, None]
    query = gl.arange(0, 64, layout=gl.SliceLayout(0, CALLS))[None, :]
    shift = (query & 1) * 4 + ((group >> 1) & 1) * 8 + (query >> 5) * 16
    words = (calls << shift).reshape([8, 2, 2, 2, 16, 2])
    words = gl.sum(gl.sum(gl.sum(words, 5), 3), 1)
    # Each goes to the threads of its four keys.
    return gl.convert_layout(
        words,
        gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, gl.SliceLayout(6, SCORES)))),
    )


@gluon.jit
def kept_scores(words, layout: gl.constexpr):
    """Return 1 for scores ``[128, 64]`` that are kept, else 0, for :func:`packed_calls`."""
    words = gl.expand_dims(gl.expand_dims(words, 1), 3)
    words = gl.expand_dims(gl.expand_dims(words, 4), 6)
    key = gl.arange(0, 4, layout=along(3, SCORES))[None, None, None, :, None, None, None]
    group = gl.arange(0, 2, layout=along(1, SCORES))[None, :, None, None, None, None, None]
    far = gl.arange(0, 2, layout=along(4, SCORES))[None, None, None, None, :, None, None]
    near = gl.arange(0, 2, layout=along(6, SCORES))[None, None, None, None, None, None, :]
    kept = (words >> (near * 4 + group * 8 + far * 16 + key)) & 1
    return gl.convert_layout(kept.reshape([128, 64]), layout, assert_trivial=True)
