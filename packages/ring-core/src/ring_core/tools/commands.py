"""Add commands to command lines, each with its version and an example."""

from __future__ import annotations

import argparse
import os
from typing import Any


def add_command(
    commands: Any, name: str, purpose: str, *, example: str, version: str
) -> argparse.ArgumentParser:
    """Add a command to a command line, with ``--version`` and an example at the end of its help.

    Args:
        commands: The result of :meth:`argparse.ArgumentParser.add_subparsers`.
        name: The name of the command.
        purpose: A sentence that says what it does.
        example: A whole command line to show.
        version: The text that ``--version`` prints.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=purpose[0].lower() + purpose[1:].rstrip("."), description=purpose,
        epilog=f"example: {example}",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=version)
    return parser


def check_not_launched(command: str) -> None:
    """Refuse to run a command that starts its own ranks in each process of a launcher.

    Args:
        command: The command line without its options, as ``python -m ring_torch bench``.

    Raises:
        ValueError: A launcher such as torchrun has started several processes (``WORLD_SIZE``).
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1":
        raise ValueError(
            f"{command} starts its ranks itself, and here a launcher such as torchrun has started "
            f"{size} processes (WORLD_SIZE={size}), each of which would run it. Instead: run "
            f"`{command}` once on a machine, without a launcher"
        )
