"""``python -m ring_torch matrix``: what each kernel supports, as the table of the README."""

from __future__ import annotations

import argparse
import sys

from ring_torch.kernels import matrix


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ring_torch", description=__doc__)
    parser.add_argument("command", choices=["matrix"])
    parser.parse_args(argv)
    print(matrix())
    return 0


if __name__ == "__main__":
    sys.exit(main())
