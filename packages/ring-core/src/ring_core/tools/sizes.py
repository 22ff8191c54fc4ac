"""Sizes as people write them on command lines: ``65536``, ``64k``, ``1m``."""

from __future__ import annotations

import argparse

from ring_core.masks.mask import Window

_UNITS = {"k": 1 << 10, "m": 1 << 20}


def size(text: str) -> int:
    """A whole number, maybe with ``k`` for 1,024 or ``m`` for 1,048,576: a type for ``argparse``.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    word = text.strip().lower()
    unit = _UNITS.get(word[-1:], 1)
    try:
        return int(word[:-1] if unit > 1 else word) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number such as 65536, 64k or 1m"
        ) from None


def window(text: str) -> Window:
    """``LEFT`` or ``LEFT,RIGHT``, keys besides a query's own: a type for ``argparse``.

    Raises:
        argparse.ArgumentTypeError: It is neither.
    """
    words = [word.strip().lower() for word in text.split(",")]
    sides = [None if word == "none" else size(word) for word in words]
    if len(sides) > 2:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no LEFT or LEFT,RIGHT such as 4096, 4096,0 or 4096,none"
        )
    return sides[0], sides[1] if len(sides) == 2 else 0
