"""Runs the tests of each promise of ``docs/reliability.md``: ``nox -s reliability``.

It runs the tests of all promises, or of those named, and stores the counts in
``tests/results/reliability.json``, which the page shows. The exit code is 1 if a test failed
or was skipped, or if none ran.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import distributions, version
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "tests" / "results" / "reliability.json"

#: Promises to users by name, and the tests that fail if one is broken: backends, with paths in this
#: folder and options of pytest. XLA's compiler crashes after some five hundred programs in one
#: process, so kernels for TPUs run in two.
PROMISES: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "exact": (
        "every mask and option gives what dense attention gives, forward and backward",
        (
            ("core", "conformance/test_table.py"), ("torch", "conformance/test_table.py --all"),
            ("jax", "conformance/test_table.py"),
        ),
    ),
    "interpreted": (
        ("so do the kernels for TPUs in the ring, where an interpreter runs them that looks for races "
         "and fills fresh memory with NaN; what they cannot do they refuse by name"),
        (
            ("jax-tpu", "jax_tpu_only/test_kernels.py::test_in_the_ring --all -kplain"),
            ("jax-tpu", "jax_tpu_only/test_kernels.py::test_in_the_ring --all -knot(plain)"),
        ),
    ),
    "noticed": (
        "rings that are broken on purpose are found", tuple((x, "meta") for x in ("core", "torch", "jax")),
    ),
    "values": (
        "a wrong value of any argument of any public function is an error that names it",
        (
            ("core", "core/test_bad_input.py"),
            ("torch", "torch_only/test_bad_input.py"),
            ("jax", "jax_only/test_bad_input.py"),
        ),
    ),
    "disagreement": (
        "ranks that make different calls all end in an error that names the difference",
        (("torch", "torch_only/test_disagreement.py"),),
    ),
    "faults": (
        ("where a rank is killed, stalls or is cut off, the others end within the timeout in an error, "
         "nobody has a wrong result, and no process stays"),
        (("torch", "torch_only/test_lost_ranks.py"), ("jax", "jax_only/test_processes.py")),
    ),
    "restart": (
        "training that torchrun starts anew goes on from its checkpoint with the same losses",
        (("torch", "torch_only/test_demo.py --all -krestarted"),),
    ),
    "numbers": (
        ("logits of 10,000, NaN, infinity, denormals, ties and rows that see nothing come out as from "
         "dense attention; errors do not grow with the ring"),
        (
            ("core", "conformance/test_numbers.py core/test_numerics.py"),
            ("torch", "conformance/test_numbers.py"), ("jax", "conformance/test_numbers.py"),
        ),
    ),
    "interplay": (
        ("compiled, under autocast, checkpointing, FSDP2, DDP, hooks, vmap, scan, remat and with donated"
         " buffers the results are the same, or the refusal is clear"),
        (
            ("torch", "torch_only/test_whole.py torch_only/test_compile.py"),
            ("jax", "jax_only/test_api.py jax_only/test_program.py"),
        ),
    ),
    "offline": (
        "importing and running opens no connection; nothing from outside is unpickled or evaluated",
        (
            ("core", "core/test_sources.py"), ("torch", "torch_only/test_offline.py"),
            ("jax", "jax_only/test_commands.py::test_jax_stays_offline"),
        ),
    ),
    "names": (
        "public names and signatures change on purpose alone", tuple((x, "api") for x in ("core", "torch", "jax")),
    ),
}  # fmt: skip


def count(backend: str, paths: str) -> dict[str, object]:
    """Run tests on a backend, and return the counts."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        arguments = [x if x.startswith("-") else str(ROOT / "tests" / x) for x in paths.split()]
        command = ["-m", "pytest", *arguments, f"--backend={backend}", f"--junit-xml={report}"]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=False)
        suites = list(ET.parse(report).getroot().iter("testsuite"))
    total, wrong, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    )
    failed = wrong + errors
    return {
        "backend": backend, "passed": total - failed - skipped, "failed": failed, "skipped": skipped,
        "seconds": round(time.monotonic() - started),
    }  # fmt: skip


def environment(*packages: str) -> dict[str, str]:
    """Return the versions of Python, of the kernel and of packages, and the machine."""
    installed = {x.name for x in distributions()}
    return {
        "python": platform.python_version(), "machine": platform.machine(),
        "kernel": platform.release(), "cores": str(os.cpu_count()),
        **{x: version(x) if x in installed else "not installed" for x in packages},
    }  # fmt: skip


def keep(path: Path, part: str, results: Mapping[str, object], *packages: str) -> None:
    """Add results to a part of a JSON file, and the environment with these packages, if any."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    if packages:
        stored["environment"] = stored.get("environment", {}) | environment(*packages)
    stored[part] = {**stored.get(part, {}), **results}
    path.write_text(json.dumps(stored, indent=1) + "\n")


def main() -> int:
    """Run the tests, store the counts, and return the exit code."""
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="promise", help=", ".join(PROMISES))
    names = parser.parse_args().names or [*PROMISES]
    if unknown := sorted(set(names) - set(PROMISES)):
        parser.error(f"no promises: {unknown}; there are {', '.join(PROMISES)}")
    failed = False
    for name in tqdm(names, unit="promise", disable=None):
        text, tests = PROMISES[name]
        counts = [count(*test) for test in tests]
        failed |= any(x["failed"] or x["skipped"] or not x["passed"] for x in counts)
        promise = {"text": text, "runs": counts}
        keep(KEPT, "promises", {name: promise}, "numpy", "torch", "jax")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
