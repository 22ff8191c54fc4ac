"""Run random cases on a backend: ``nox -s fuzz`` (``-- --seconds 3600 --seed 2000`` by hand).

A failure is printed as the expression that makes its case; add it to ``tests/cases.py`` under a
name of its own. ``--json`` names a file of counts by backend, to which this one's are added.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str] | None = None) -> int:
    """Run the fuzzer and print its findings; return 1 if a case failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--backend", choices=("core", "torch", "jax", "jax-gpu"), default="core")
    parser.add_argument("--cases", type=int, default=2000, help="how many seeds (2000)")
    parser.add_argument("--seconds", type=float, default=600.0, help="for how long at most (600)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--json", type=Path, help="add the counts to this file, too")
    options = parser.parse_args(argv)
    if options.backend.startswith("jax"):  # read when jax is imported
        os.environ["NPROC"] = "32"  # threads for callbacks of several devices
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    return _run(options)


def _run(options: Any) -> int:
    from tqdm import tqdm

    from fuzz.campaign import Campaign, Tally

    tally = Tally(options.seed, options.seed)
    backend = _backend(options.backend)
    campaign = Campaign(options.backend, backend, tally)
    began = time.monotonic()
    try:
        # Without a terminal a line at the end replaces the progress bar.
        for _ in tqdm(range(options.cases), options.backend, unit="case", disable=None):
            if time.monotonic() - began > options.seconds:
                break
            if failure := campaign.run_next():
                print(f"\nseed {failure.seed} failed: {failure.error}\n  {failure.trial}")
                print(f"  simplest: {failure.simplest}\n", flush=True)
    finally:
        if hasattr(backend, "close"):
            backend.close()
    print(f"{options.backend}: seeds {tally.first} to {tally.next - 1}, {tally.line()}")
    if options.json is not None:
        _keep(options.json, options.backend, tally)
    return 1 if tally.failures else 0


def _backend(name: str) -> Any:
    if name == "torch":
        from backends.torch_ranks import TorchBackend

        return TorchBackend()
    if name == "jax":
        from backends.jax_devices import JaxBackend

        return JaxBackend()
    if name == "jax-gpu":
        from backends.triton_interpreter import TritonBackend

        return TritonBackend()
    from backends.simulator import SimulatorBackend

    return SimulatorBackend()


def _keep(path: Path, name: str, tally: Any) -> None:
    """Write a backend's tally to a file, and keep those of other backends in it."""
    kept = json.loads(path.read_text()) if path.exists() else {"backends": {}}
    kept["backends"][name] = {
        "seeds": [tally.first, tally.next - 1], "cases": tally.cases,
        "refused": tally.refused.total(), "failed": len(tally.failures),
        "seconds": round(tally.seconds), "worst_error_over_tolerance": round(tally.worst, 3),
        "judged_over_several_draws": tally.redrawn, "environment": _environment(),
    }  # fmt: skip
    path.write_text(json.dumps(kept, indent=1) + "\n")


def _environment() -> dict[str, str]:
    environment = {"python": platform.python_version(), "machine": platform.machine()}
    for package in ("numpy", "torch", "jax", "triton"):
        try:
            environment[package] = version(package)
        except PackageNotFoundError:
            continue
    return environment


if __name__ == "__main__":
    sys.exit(main())
