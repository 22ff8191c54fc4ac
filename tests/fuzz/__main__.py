"""Run random cases on a backend: ``nox -s fuzz`` (``-- --seconds 3600 --seed 2000`` by hand).

A failure is printed as the expression that makes its case; add it to ``tests/cases.py`` under a
name of its own. ``--json`` names a file of counts by backend, to which this one's are added.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = {
    "core": "simulator:SimulatorBackend", "torch": "torch_ranks:TorchBackend",
    "jax": "jax_devices:JaxBackend", "jax-gpu": "triton_interpreter:TritonBackend",
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the fuzzer and print its findings; return 1 if a case failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--backend", choices=BACKENDS, default="core")
    parser.add_argument("--cases", type=int, default=2000, help="how many seeds (2000)")
    parser.add_argument("--seconds", type=float, default=600.0, help="for how long at most (600)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--json", type=Path, help="add the counts to this file, too")
    options = parser.parse_args(argv)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from reliability import environment, keep
    from tqdm import tqdm

    from fuzz.campaign import Campaign, Tally

    if options.backend.startswith("jax"):
        os.environ |= import_module("conftest").JAX_VARIABLES  # read when jax is imported
    tally = Tally(options.seed, options.seed)
    module, _, name = BACKENDS[options.backend].partition(":")
    backend = getattr(import_module(f"backends.{module}"), name)()
    campaign = Campaign(options.backend, backend, tally)
    began = time.monotonic()
    try:
        # Without a terminal a line at the end replaces the progress bar.
        for _ in tqdm(range(options.cases), options.backend, unit="case", disable=None):
            if time.monotonic() - began > options.seconds:
                break
            if failure := campaign.run_next():
                print(f"\nseed {failure.seed}: {failure.error}\n  {failure.trial}\n", flush=True)
    finally:
        if hasattr(backend, "close"):
            backend.close()
    print(f"{options.backend}: seeds {tally.first} to {tally.next - 1}, {tally.line()}")
    if options.json is not None:
        counts = {
            "seeds": [tally.first, tally.next - 1], "cases": tally.cases,
            "refused": tally.refused.total(), "failed": len(tally.failures),
            "seconds": round(tally.seconds), "worst_error_over_tolerance": round(tally.worst, 3),
            "judged_over_several_draws": tally.redrawn,
            "environment": environment("numpy", "torch", "jax", "triton"),
        }  # fmt: skip
        keep(options.json, "backends", {options.backend: counts})
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
