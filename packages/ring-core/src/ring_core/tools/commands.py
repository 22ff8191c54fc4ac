"""Add commands to command lines, each with its version and an example."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from ring_core import __version__  # all packages carry one version
from ring_core.tools import bench, explain

#: Launchers of several processes, and the environment variables of their number and of the rank.
LAUNCHERS = {
    "a launcher such as torchrun": ("WORLD_SIZE", "RANK"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}


def add_command(
    commands: Any, name: str, purpose: str, *, example: str, version: str, more: str = ""
) -> argparse.ArgumentParser:
    """Add a command to a command line, with ``--version`` and an example at the end of its help.

    Args:
        commands: The result of :meth:`argparse.ArgumentParser.add_subparsers`.
        name: The name of the command.
        purpose: A sentence that says what it does.
        example: A whole command line to show.
        version: The text that ``--version`` prints.
        more: Further sentences of the command's own help.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=purpose[0].lower() + purpose[1:].rstrip("."),
        description=f"{purpose} {more}".rstrip(),
        epilog=f"example: {example}",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=version)
    return parser


def framework_commands(
    package: str, framework: str
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser, argparse.ArgumentParser]:
    """Make the command line of a framework's package.

    Its commands are ``doctor``, ``matrix``, ``explain`` and ``bench``.

    Args:
        package: The package, as ``ring_torch``.
        framework: The name of the framework, as ``PyTorch``.

    Returns:
        The parser, and those of ``explain`` and ``bench``, to which a package may add options.
    """
    program, version = f"python -m {package}", f"{package.replace('_', '-')} {__version__}"
    parser = argparse.ArgumentParser(
        prog=program, description=f"Exact context-parallel attention for {framework}.",
        epilog=f"example: {program} doctor",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    add_command(
        commands, "doctor", "Show what can run here, and test it.", example=f"{program} doctor",
        version=version,
    ).add_argument("--json", action="store_true", help="print JSON")  # fmt: skip
    add_command(
        commands, "matrix", "Show what each kernel supports.", example=f"{program} matrix",
        version=version,
    )  # fmt: skip
    explain_parser = add_command(
        commands, "explain", "Show what a call would do: its kernel, what travels, and the plan.",
        example=f"{program} explain --cp 4 --seq-len 64k --heads 32/8", version=version,
        more="Lengths are in tokens, of which k is 1,024. No other process is needed.",
    )  # fmt: skip
    explain.add_options(explain_parser)
    bench_parser = add_command(
        commands, "bench", "Time a ring against one device that computes everything.",
        example=f"{program} bench --seq-len 16k --window 4096,0", version=version,
    )  # fmt: skip
    bench.add_options(bench_parser)
    return parser, explain_parser, bench_parser


def is_refused(package: str, command: str) -> bool:
    """Return True, and say so on stderr, if a launcher has started this process beside others.

    ``bench`` and ``doctor`` start their ranks themselves. Under a launcher each process would do
    so, on the same devices.

    Args:
        package: The package whose command line it is, as ``ring_torch``.
        command: Name of the command, as ``bench``.
    """
    for launcher, (size_name, rank_name) in LAUNCHERS.items():
        size = os.environ.get(size_name, "1")
        if size == "1":
            continue
        if os.environ.get(rank_name, "0") == "0":  # one process speaks for all
            command_line = f"python -m {package} {command}"
            sys.stderr.write(
                f"{package}: error: {command_line} starts its ranks itself, and {launcher} has started "
                f"{size} processes ({size_name}={size}), each of which would run it. Instead: run "
                f"`{command_line}` once on a machine, without a launcher\n"
            )
        return True
    return False
