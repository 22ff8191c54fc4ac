"""Options of command lines: sizes as ``64k``, windows as ``4096,0``, and those of a mask."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ring_core.masks.mask import Mask, Window

_UNIT_SIZES = {"k": 1 << 10, "m": 1 << 20}


def size(text: str) -> int:
    """Read an integer, which may end in ``k`` for 1,024 or ``m`` for 1,048,576.

    >>> size("64k")
    65536

    Raises:
        argparse.ArgumentTypeError: ``text`` is no such integer.
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
        argparse.ArgumentTypeError: ``text`` is no pair of sides.
    """
    sides = [None if side.strip().lower() == "none" else size(side) for side in text.split(",")]
    if len(sides) != 2:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no LEFT,RIGHT such as 4096,0 or 4096,none: keys before and after its own "
            f"that a query sees"
        )
    return sides[0], sides[1]


def head_counts(text: str) -> tuple[int, int]:
    """Read numbers of query heads and of key/value heads as ``H/K``, or ``H`` for as many of both.

    >>> head_counts("32/8"), head_counts("16")
    ((32, 8), (16, 16))

    Raises:
        argparse.ArgumentTypeError: ``text`` is none, or ``K`` does not divide ``H``.
    """
    counts = [int(n) if n.isdecimal() else 0 for n in text.split("/")]
    if len(counts) > 2 or min(counts) < 1 or counts[0] % counts[-1]:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no H/K such as 32/8: query heads, and key/value heads, a divisor of them"
        )
    return counts[0], counts[-1]


def add_each(parser: argparse.ArgumentParser, options: Mapping[str, Mapping[str, Any]]) -> None:
    """Add options to a parser: for each flag the arguments of ``add_argument``."""
    for flag, arguments in options.items():
        parser.add_argument(flag, **arguments)


def add_mask_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a sequence and its mask, which :func:`mask_of` reads."""
    add_each(parser, {
        "--seq-len": {
            "type": size, "required": True, "metavar": "N",
            "help": "queries over all ranks, such as 65536 or 64k",
        },
        "--kv-seq-len": {
            "type": size, "metavar": "N", "help": "keys over all ranks; default: as many",
        },
        "--causal": {
            "action": argparse.BooleanOptionalAction, "default": True,
            "help": "a query sees no later key, which is the default",
        },
        "--window": WINDOW,
        "--chunk-size": {
            "type": size, "metavar": "N",
            "help": "tokens per chunk, where a query sees its own chunk only",
        },
        "--cu-seqlens": {"metavar": "0,...,N", "help": "offsets of packed documents, in tokens"},
    })  # fmt: skip


#: Arguments of the option ``--window``, which :func:`window` reads.
WINDOW = {
    "type": window, "metavar": "LEFT,RIGHT",
    "help": "keys before and after its own that a query sees: 4096,0; none is no limit: 4096,none",
}  # fmt: skip


def mask_of(args: argparse.Namespace) -> Mask:
    """Return the mask that a command line asks for.

    Raises:
        ValueError: An option of it is malformed.
    """
    offsets = args.cu_seqlens
    return Mask(
        causal=args.causal, window=args.window, chunk_size=args.chunk_size,
        cu_seqlens=None if offsets is None
        else tuple(integer("--cu-seqlens", n) for n in offsets.split(",")),
    )  # fmt: skip


def integer(option: str, text: str) -> int:
    """Read one of the integers that an option takes, separated by commas.

    Raises:
        ValueError: ``text`` is no integer; the message begins with ``option``.
    """
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{option} takes integers separated by commas, got {text!r}") from None
