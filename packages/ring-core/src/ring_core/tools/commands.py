"""Add commands to command lines, each with its version and an example."""

from __future__ import annotations

import argparse
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
