"""What commands print, for the pages that show it."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout, suppress
from importlib import import_module


def shown(command: str) -> str:
    """``$ python -m PACKAGE ARGUMENTS`` and what it prints, run in this process.

    Raises:
        ValueError: The command failed.
    """
    package, *arguments = command.split()
    printed, code = io.StringIO(), 0
    os.environ["COLUMNS"] = "100"  # for argparse
    with redirect_stdout(printed), suppress(SystemExit):  # that is how ``--help`` ends
        code = import_module(f"{package}.__main__").main(arguments)
    if code:
        raise ValueError(f"python -m {command} ended with {code}")
    return f"```console\n$ python -m {command}\n{printed.getvalue().rstrip()}\n```"
