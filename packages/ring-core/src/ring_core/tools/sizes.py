"""Types for arguments of command lines: sizes as ``64k``, windows as ``4096,0``."""

from __future__ import annotations

import argparse

from ring_core.masks.mask import Window

_UNIT_SIZES = {"k": 1 << 10, "m": 1 << 20}


def size(text: str) -> int:
    """Read an integer, which may end in ``k`` for 1,024 or ``m`` for 1,048,576.

    >>> size("64k")
    65536

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    word = text.strip().lower()
    unit = _UNIT_SIZES.get(word[-1:], 1)
    try:
        return int(word[:-1] if unit > 1 else word) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number such as 65536, 64k or 1m"
        ) from None


def window(text: str) -> Window:
    """Read a window as ``LEFT,RIGHT``, as ``window=(left, right)`` of a call; ``none`` is ``None``.

    >>> window("4k,0"), window("none,128")
    ((4096, 0), (None, 128))

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    sides = [None if side.strip().lower() == "none" else size(side) for side in text.split(",")]
    if len(sides) != 2:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no LEFT,RIGHT such as 4096,0 or 4096,none: keys before and after its own "
            f"that a query sees"
        )
    return sides[0], sides[1]
