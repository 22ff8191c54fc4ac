"""``score_mod`` and ``mask_mod`` of FlashAttention-4: functions that it compiles into its kernels.

They are written in its own language, CuTe DSL, so this module is imported only where one is needed.
All that they read is given as integers, and tensors by their addresses: tensors given as such would
be read with bounds that the library works out for every score.
"""


# They are compiled: their arguments have no types in Python.
# ruff: noqa: ANN001, ANN202, ARG001
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator, arg-type"

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from cutlass import (
    Boolean,
    Float32,
    Int32,
    Int64,
    const_expr,
    cute,
    max as maximum,
    range_constexpr,
)
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from ring_core.masks.expression import OPERATORS, Expression, evaluated
from ring_torch.kernels.fa4 import library

#: Source of a key's distance for ALiBi: ``causal`` subtracts the numbers of row and column, and no
#: key is ahead of its query; ``counted`` also takes the absolute value, for keys on both sides;
#: ``read`` subtracts positions read from memory.
Alibi = Literal["causal", "counted", "read"]
_OPERATORS = {**OPERATORS, "max": maximum}
scalar_to_ssa = library.scalar_to_ssa()  # compiled functions find it here by its name
_UNBOUNDED = (
    1 << 30
)  # length of a tensor without bounds: its layout needs one, and nothing reads it


class Numbers(NamedTuple):
    """Integers that the functions read, in this order; addresses are 0 where there is no tensor.

    Attributes:
        slopes: Address of ALiBi's slopes, float32 ``[B or 1, H]``.
        slopes_batch: Stride of the slopes from sequence to sequence.
        q_at, k_at: Addresses of positions, float32 ``[n]`` and ``[m]``, padded to whole tiles.
        q_k_offset: The first row's position minus the first column's.
        q_ids, k_ids: Addresses of segment ids, int32 ``[B, n]`` and ``[B, m]``.
        bits: Address of a predicate's partial tiles, int32 ``[tiles, 128, 4]``: 128 bits for each
            row (or column). The last two tiles hide and show everything.
        tiles: Address of the number of each tile of the rectangle, int32, padded beyond it.
        tiles_per_row: Numbers of tiles in a row, padding included.
        q_len, k_len: Rows and columns.
        q_first, k_first: The first row's position, and the first column's.
        lo, hi: The band, ``lo <= i - j <= hi``.
    """

    slopes: int = 0
    slopes_batch: int = 0
    q_at: int = 0
    k_at: int = 0
    q_k_offset: int = 0
    q_ids: int = 0
    k_ids: int = 0
    bits: int = 0
    tiles: int = 0
    tiles_per_row: int = 0
    q_len: int = 0
    k_len: int = 0
    q_first: int = 0
    k_first: int = 0
    lo: int = 0
    hi: int = 0

    def as_args(self) -> tuple[Any, ...]:
        """Return the numbers as the library takes them: addresses as int64, others as int32."""
        addresses = {"slopes", "q_at", "k_at", "q_ids", "k_ids", "bits", "tiles"}
        return tuple(
            (Int64 if name in addresses else Int32)(value)
            for name, value in zip(self._fields, self, strict=True)
        )


@lru_cache(maxsize=64)
def score_mod(cap: float | None, alibi: Alibi | None, packed: int) -> Any:
    """Return a ``score_mod``: ``cap * tanh(score / cap)``, and then ALiBi's ``- slope * |i - j|``.

    With ``packed`` above 1 the library gives ``i // packed`` and ``h * packed + i % packed`` for
    row ``i`` and head ``h``, and all scores of a tile are of one head.
    """

    @cute.jit
    def modified(
        scores, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars=None
    ):
        modified_scores = cute.make_rmem_tensor(scores.shape, Float32)
        for n in range_constexpr(cute.size(scores.shape)):
            score = scores[n]
            if const_expr(cap is not None):
                score = cap - cap * 2.0 * _falling(score, cap)
            if const_expr(alibi is not None):
                numbers = Numbers(*aux_scalars)
                head, row = head_idx[n], q_idx[n]
                if const_expr(packed > 1):
                    head = _floordiv(head_idx[0], packed)
                    row = row * packed + head_idx[n] - head * packed
                slope = _load(numbers.slopes, batch_idx[0] * numbers.slopes_batch + head)
                if const_expr(alibi == "read"):
                    distance = (
                        _at(numbers.q_at, Float32)[row] - _at(numbers.k_at, Float32)[kv_idx[n]]
                    )
                else:
                    distance = Float32(row + numbers.q_k_offset) - Float32(kv_idx[n])
                if const_expr(alibi != "causal"):
                    distance = cute.arch.fmax(distance, -distance)
                score = score - slope * distance
            modified_scores[n] = score
        return modified_scores.load()

    return modified


@lru_cache(maxsize=64)
def score_mod_bwd(cap: float | None) -> Any:
    """Return a ``score_mod_bwd``: the gradient of a score from that of its modified score.

    ALiBi only adds a number to a score, so its gradient is that of ``cap`` alone.
    """

    @cute.jit
    def modified(
        gradients,
        scores,
        batch_idx,
        head_idx,
        q_idx,
        kv_idx,
        seqlen_info,
        aux_tensors,
        aux_scalars=None,
    ):
        if const_expr(cap is None):
            return gradients
        score_grads = cute.make_rmem_tensor(scores.shape, Float32)
        for n in range_constexpr(cute.size(scores.shape)):
            falling = _falling(scores[n], cap)
            score_grads[n] = gradients[n] * (4.0 * falling * (1.0 - falling))
        return score_grads.load()

    return modified


@lru_cache(maxsize=16)
def mask_mod(
    ids: bool, tiles: bool, by_columns: bool, rule: Expression | None, from_0: bool
) -> Any:
    """Return a ``mask_mod``: true where the band, or the mask's rule, and segment ids show a score.

    Args:
        ids: True if there are segment ids.
        tiles: True if the rule is given as bits of tiles.
        by_columns: True if the bits of a column lie together, for kernels whose threads hold
            columns.
        rule: The rule as an expression, for consecutive positions of rows and of columns.
        from_0: True if positions are the numbers of rows and columns, with which compilers
            simplify more of a rule.
    """
    banded = not tiles and rule is None

    @cute.jit
    def seen(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
        numbers = Numbers(*aux_scalars)
        i, j = q_idx[0], kv_idx[0]
        visible = True
        if const_expr(banded):
            visible = (i - j >= numbers.lo) & (i - j <= numbers.hi)
        if const_expr(rule is not None and from_0):
            visible = evaluated(rule, i, j, _OPERATORS)
        if const_expr(rule is not None and not from_0):
            visible = evaluated(rule, i + numbers.q_first, j + numbers.k_first, _OPERATORS)
        if const_expr(ids):
            # The last tiles reach beyond the rows and columns: read within bounds.
            row, column = min(i, numbers.q_len - 1), min(j, numbers.k_len - 1)
            q_id = _at(numbers.q_ids, Int32)[batch_idx[0] * numbers.q_len + row]
            k_id = _at(numbers.k_ids, Int32)[batch_idx[0] * numbers.k_len + column]
            visible = visible & (q_id == k_id) & (q_id >= 0)
        if const_expr(tiles):
            # Find the tile's number, then the 32-bit word of the row (or column), then the bit.
            outer, inner = (j, i) if const_expr(by_columns) else (i, j)
            tile = _at(numbers.tiles, Int32)[(i >> 7) * numbers.tiles_per_row + (j >> 7)]
            bits = _at(numbers.bits, Int32)[(tile * 128 + (outer & 127)) * 4 + ((inner & 127) >> 5)]
            visible = visible & (((bits >> (inner & 31)) & 1) != 0)
        return scalar_to_ssa(visible, Boolean)

    return seen


@cute.jit
def _falling(score, cap):
    """Return ``(1 - tanh(score / cap)) / 2`` as ``1 / (1 + exp(2 * score / cap))``.

    The exponential and the reciprocal are the GPU's approximate instructions.
    """
    power = cute.math.exp2(score * (2.0 * math.log2(math.e) / cap), fastmath=True)
    return cute.arch.rcp_approx(1.0 + power)


@cute.jit
def _floordiv(number, divisor):
    """Return ``number // divisor`` of a number that is not negative."""
    if const_expr(divisor & (divisor - 1) == 0):
        return number >> (divisor.bit_length() - 1)
    return number // divisor


@dsl_user_op
def _load(address, index, *, loc=None, ip=None):
    """Return a float32 from memory that nobody writes during the kernel.

    So the compiler may move the load before waits for matrix products.
    """
    pointer = address + Int64(index) * 4
    instruction = ("ld.global.nc.f32 $0, [$1];", "=f,l")
    value = llvm.inline_asm(
        Float32.mlir_type,
        [Int64(pointer).ir_value(loc=loc, ip=ip)],
        *instruction,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Float32(value)


@cute.jit
def _at(address, dtype):
    """Return a tensor of the numbers that begin at an address, without bounds.

    The address is taken to be a multiple of 16.
    """
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(_UNBOUNDED))
