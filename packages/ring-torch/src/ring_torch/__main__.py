"""``python -m ring_torch``: what can run here, and whether it is right.

``doctor`` shows versions, devices, and which kernels and transports can run on them and why not,
and compares each kernel with the float64 oracle; ``matrix`` shows what each kernel supports.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ring_torch._doctor import diagnose, shown
from ring_torch.kernels import matrix


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when something fails, or nothing runs."""
    parser = argparse.ArgumentParser(prog="python -m ring_torch", description="Ring for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser("doctor", help="show what can run here, and test it")
    doctor.add_argument("--json", action="store_true", help="for programs")
    commands.add_parser("matrix", help="show what each kernel supports")
    args = parser.parse_args(argv)
    if args.command == "matrix":
        print(matrix())
        return 0
    found = diagnose()
    as_json: dict[str, Any] = asdict(found) | {"healthy": found.healthy}
    print(json.dumps(as_json, indent=2) if args.json else shown(found))
    return 0 if found.healthy else 1


if __name__ == "__main__":
    sys.exit(main())
