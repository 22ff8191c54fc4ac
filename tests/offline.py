"""Runs programs that may open no connection from Python and leave no socket open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Code that ends the process if anything looks up a host, connects, listens, or fetches a page.
PRELUDE = """
import os, sys

def hook(event, arguments):
    refused = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname",
               "socket.sendto", "urllib.Request", "http.client.connect", "ftplib.connect")
    if event in refused:
        sys.stderr.write(f"opened the network: {event} {arguments}\\n")
        os._exit(3)

sys.addaudithook(hook)
"""

#: Code that checks that native code, too, has no connection or unconnected socket open.
EPILOGUE = """
if sys.platform == "linux":
    names = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{n}")]
    assert not [name for name in names if name.startswith("socket:")], names
print("offline")
"""


def run_offline(program: str) -> None:
    """Run a program between the two; the error message says what it opened."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program + EPILOGUE],
        env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "offline"
