"""Checks of arguments of shift, halo, join and relayout, the same in torch and JAX."""

from __future__ import annotations

from collections.abc import Sequence

from ring_core.base.arguments import (
    SIZE_LIMIT,
    as_python,
    check_size,
    describe_value,
    is_finite,
    is_integer,
)
from ring_core.base.errors import UnsupportedError
from ring_core.layouts.layout import LayoutSpec, divisor_of
from ring_core.masks.mask import mask_of


def check_steps(n: object) -> None:
    """Check how far a shift moves tokens.

    Raises:
        ValueError: It is no integer, or out of range.
    """
    if not is_integer(n) or not -SIZE_LIMIT < n < SIZE_LIMIT:
        raise ValueError(
            f"n must be an integer between -2**40 and 2**40, how many positions tokens move (to "
            f"earlier ones if negative), got {describe_value(n)}"
        )


def check_halo(left: object, right: object, layout: LayoutSpec, cp_size: int) -> None:
    """Check the sides of a halo, in rows, and that ranks hold consecutive tokens.

    Raises:
        ValueError: A side is no integer >= 0.
        UnsupportedError: The layout is striped over several ranks.
    """
    check_size("left", left, low=0)
    check_size("right", right, low=0)
    check_consecutive(layout, cp_size)


def check_fill(fill: object, dtype: str, low: float, high: float) -> None:
    """Check the number that a shift puts where no token comes from.

    Args:
        fill: The number.
        dtype: Name of the dtype of the rows, for the message.
        low: Lowest number of that dtype; an ``int`` if it holds integers alone.
        high: Highest one, likewise.

    Raises:
        ValueError: It is no number, or not one of this dtype.
    """
    number = as_python(fill)
    whole = isinstance(low, int)
    fits = (
        isinstance(number, int | float)
        and (low <= number <= high or (isinstance(number, float) and not is_finite(number)))
        and not (whole and isinstance(number, float))
    )
    if not fits:
        raise ValueError(
            f"fill must be {'an integer' if whole else 'a number'} in [{low}, {high}], as x is of "
            f"{dtype}, got {describe_value(fill)}"
        )


def check_consecutive(layout: LayoutSpec, cp_size: int) -> None:
    """Refuse a layout whose ranks hold no consecutive tokens.

    Raises:
        UnsupportedError: It is striped over several ranks.
    """
    if layout == "striped" and cp_size > 1:
        raise UnsupportedError(
            f"halo gives rows to runs of consecutive tokens, and in the {layout} layout over "
            f"{cp_size} ranks no two neighbours are on one rank. Instead: relayout to "
            f"'contiguous' around the layer, as in cp.relayout(x, to='contiguous')"
        )


def check_dim(shape: Sequence[int], dim: object, name: str = "x") -> int:
    """Check that an array of a shape has the dimension ``dim``, and return it, not negative.

    Raises:
        ValueError: It has not; the message calls the array ``name``.
    """
    rank = len(shape)
    if not is_integer(dim) or not -rank <= dim < rank:
        raise ValueError(
            f"dim must be a dimension of {name}, an integer in [{-rank}, {rank}), got {dim!r}"
        )
    return int(dim) % rank


def check_rows(
    shape: Sequence[int], dim: int, layout: LayoutSpec, cp_size: int, holders: int = 1
) -> int:
    """Check that ``y`` of a join has a row for each run, and return the number of runs a rank.

    Args:
        shape: Its shape.
        dim: Dimension of the tokens, not negative.
        layout: The layout.
        cp_size: Number of ranks that share a sequence.
        holders: Number of ranks whose rows these are.

    Raises:
        ValueError: It has another number of rows.
        UnsupportedError: The layout is striped over several ranks.
    """
    check_consecutive(layout, cp_size)
    runs = divisor_of(layout, cp_size) // cp_size
    rows = runs * holders
    if shape[0] % rows or (dim == 0 and shape[0] != rows) or len(shape) < 2:
        raise ValueError(
            f"y must have a row for each of the {rows} runs {'of' if holders > 1 else 'that a rank holds in'} "
            f"the {layout} layout {'([R, L, ...] with dim=0)' if dim == 0 else 'and each sequence'}, "
            f"as halo returns them, got shape {list(shape)}"
        )
    return runs


def offsets_of(cu_seqlens: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the offsets of documents as a tuple of integers.

    Raises:
        ValueError: They are malformed.
    """
    return mask_of(causal=False, window=None, chunk_size=None, cu_seqlens=cu_seqlens).cu_seqlens
