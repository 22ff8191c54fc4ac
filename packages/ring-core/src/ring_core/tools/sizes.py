"""Sizes as people write them on command lines: ``65536``, ``64k``, ``1m``."""

from __future__ import annotations

import argparse

_UNIT_SIZES = {"k": 1 << 10, "m": 1 << 20}


def size(text: str) -> int:
    """A whole number, maybe with ``k`` for 1,024 or ``m`` for 1,048,576: a type for ``argparse``.

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
