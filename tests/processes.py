"""Starts a Python program as several processes of one JAX job, over loopback.

Each process has some host devices. Its arguments are the coordinator's address, the number of
processes, its own number, and further ones. If one fails, or all take too long, the others are
killed and the test fails with their output.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple


class Started(NamedTuple):
    """Running process and the file with its output."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def text(self) -> str:
        """Return the output so far."""
        return self.output.read_text(errors="replace")


def free_address() -> str:
    """Return a loopback address with a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def started(
    program: Path, count: int, *arguments: str, devices: int = 2
) -> Iterator[list[Started]]:
    """Start the processes, and kill those that still run at the end."""
    address, running = free_address(), list[Started]()
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    with TemporaryDirectory() as folder:
        try:
            for number in range(count):
                command = [sys.executable, str(program), address, str(count), str(number)]
                output = Path(folder) / f"{number}.txt"
                with output.open("w") as file:
                    process = subprocess.Popen(
                        [*command, *arguments], env=environment, stdout=file, stderr=file
                    )
                running.append(Started(process, output))
            yield running
        finally:
            for one in running:
                one.process.kill()
                one.process.wait()


def run(
    program: Path, count: int, *arguments: str, devices: int = 2, seconds: float = 240
) -> list[str]:
    """Run the processes to their end, and return the output of each.

    Raises:
        AssertionError: A process failed, or they were not done in time.
    """
    with started(program, count, *arguments, devices=devices) as running:

        def printed() -> str:
            return "\n".join(f"process {n}:\n{x.text[-4000:]}" for n, x in enumerate(running))

        until = time.monotonic() + seconds
        while None in (codes := [x.process.poll() for x in running]) or any(codes):
            assert not any(codes), f"process {[*map(bool, codes)].index(True)} failed\n{printed()}"
            assert time.monotonic() < until, f"not done in {seconds} s\n{printed()}"
            time.sleep(0.05)
        return [x.text for x in running]
