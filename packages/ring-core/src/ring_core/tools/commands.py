"""Command lines: what those of all packages share; what differs is a table of commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ring_core import __version__  # all packages carry one version
from ring_core.tools import bench, doctor
from ring_core.tools.case import BENCH_OPTIONS, EXPLAIN_OPTIONS, Case, Options, explained_case

#: Launchers of several processes, and the environment variables of their number and of the rank.
LAUNCHERS = {
    "a launcher such as torchrun": ("WORLD_SIZE", "RANK"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}


@dataclass(frozen=True)
class Command:
    """A command of a package's command line.

    Attributes:
        name: The name of the command.
        purpose: A sentence that says what it does.
        run: Returns the text to print and the exit code, of the arguments and the names of those
            that were given.
        options: Its options.
        example: Arguments of an example, at the end of its help.
        more: Further sentences of its help.
        starts_ranks: True if it starts ranks itself: under a launcher each process would do so.
        failure: Exit code of an error, if it is not 2, for a mistake of the user's.
    """

    name: str
    purpose: str
    run: Callable[[argparse.Namespace, set[str]], tuple[str, int]]
    options: Options = field(default_factory=dict)
    example: str = ""
    more: str = ""
    starts_ranks: bool = False
    failure: int = 2


def main(
    package: str, description: str, commands: Sequence[Command], argv: Sequence[str] | None,
    failures: tuple[type[Exception], ...] = (),
) -> int:  # fmt: skip
    """Run a command line, and return its exit code.

    It is 0 on success, 1 if something fails or nothing can run, and 2 for a mistake of the user's.

    Args:
        package: The package, as ``ring_torch``.
        description: What its commands are for.
        commands: Its commands; the example of the first is that of the package.
        argv: Arguments without the program's name; ``None`` for those of the process.
        failures: Errors of this machine.
    """
    program, version = f"python -m {package}", f"{package.replace('_', '-')} {__version__}"
    parsers: dict[str, argparse.ArgumentParser] = {}
    examples = [f"example: {program} {x.name} {x.example}".rstrip() for x in commands]
    parser = argparse.ArgumentParser(prog=program, description=description, epilog=examples[0])
    added = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command, example in zip(commands, examples, strict=True):
        parsers[command.name] = added.add_parser(
            command.name, help=command.purpose[0].lower() + command.purpose[1:].rstrip("."),
            description=f"{command.purpose} {command.more}".rstrip(), epilog=example,
        )  # fmt: skip
        for flag, arguments in command.options.items():
            parsers[command.name].add_argument(flag, **arguments)
    for each in (parser, *parsers.values()):
        each.add_argument("--version", action="version", version=version)
    args = parser.parse_args(argv)
    (command,) = (x for x in commands if x.name == args.command)
    if command.starts_ranks and is_refused(package, command.name):
        return 2
    default = parsers[command.name].get_default
    given = {name for name, value in vars(args).items() if value != default(name)} - {"command"}
    try:
        text, code = command.run(args, given)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        sys.stderr.write(f"{package}: error: {' '.join(str(error).split())}\n")
        return 1 if isinstance(error, failures) else command.failure
    sys.stdout.write(text and f"{text}\n")
    return code


def framework_commands(
    *, diagnose: Callable[[], doctor.Diagnosis], matrix: Callable[[], str],
    explained: Callable[[Case, argparse.Namespace], tuple[str, str]],
    timed: Callable[[argparse.Namespace, set[str]], bench.Result | str],
    options: Mapping[str, Options],
) -> tuple[Command, ...]:  # fmt: skip
    """Return the commands of a framework's package: doctor, matrix, explain and bench.

    Args:
        diagnose: Examines and tests this machine.
        matrix: Returns what each kernel supports, as a Markdown table.
        explained: Returns the name of the device, and what rank 0 would do in a call.
        timed: Runs ``bench``, and may return text to print instead of times.
        options: Further options of these commands.
    """

    def explain(args: argparse.Namespace, _given: set[str]) -> tuple[str, int]:
        case = explained_case(args)
        device, text = explained(case, args)
        return f"{case.describe_rank(device)}\n{text}", 0

    return (
        doctor_command("Show what can run here, and test it.", diagnose),
        Command("matrix", "Show what each kernel supports.", lambda *_: (matrix(), 0)),
        Command(
            "explain", "Show what a call would do: its kernel, what travels, and the plan.", explain,
            {**EXPLAIN_OPTIONS, **options.get("explain", {})},
            "--cp 4 --seq-len 64k --heads 32/8",
            "Lengths are in tokens, of which k is 1,024. No other process is needed.",
        ),
        Command(
            "bench", "Time a ring against one device that computes everything.",
            lambda args, given: bench.report(timed(args, given), as_json=args.json),
            {**BENCH_OPTIONS, **options.get("bench", {})}, "--seq-len 16k --window 4096,0",
            starts_ranks=True,
        ),
    )  # fmt: skip


def doctor_command(
    purpose: str, diagnose: Callable[[], doctor.Diagnosis], *, starts_ranks: bool = True
) -> Command:
    """Return the command ``doctor``."""

    def run(args: argparse.Namespace, _given: set[str]) -> tuple[str, int]:
        diagnosis = diagnose()
        return doctor.report(diagnosis, as_json=args.json), int(not diagnosis.healthy)

    options = {"--json": {"action": "store_true", "help": "print JSON"}}
    return Command("doctor", purpose, run, options, starts_ranks=starts_ranks, failure=1)


def is_refused(package: str, command: str) -> bool:
    """Return True, and say so on stderr, if a launcher has started this process beside others."""
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
