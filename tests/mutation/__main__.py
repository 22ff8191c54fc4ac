"""Mutate ring_core in thousands of small ways and list the mutants that no test notices.

``nox -s mutants`` mutates the modules that decide what is computed; ``-- masks/band`` only that
one. It works on a copy in ``out/mutants``, with the sources where mutmut looks for them and the
quickest tests. An interrupted run continues where it ended, unless sources or tests changed.
``--json FILE`` stores the counts. ``mutmut show NAME`` shows what a mutant changes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "out" / "mutants"
SOURCES = ROOT / "packages" / "ring-core" / "src" / "ring_core"

#: Modules with decisions and formulas, without those that only format text or draw.
MODULES = (
    "base/merge", "base/config", "choose/balance", "layouts/layout", "masks/band", "masks/mask", "philox", "plan/geometry", "plan/item", "plan/plan", "plan/tile_mask", "programs/gather", "programs/gather_work", "programs/intervals", "programs/ring", "reference/item_kernel", "reference/simulated_ranks", "reference/simulator",
)  # fmt: skip

#: Tests, quickest first: mutmut runs those that reach a mutant.
TESTS = (
    "core/test_bad_input.py::test_wrong_values_are_refused_by_name",
    "core/test_bad_input.py::test_refusals_say_what_is_wrong_and_what_to_do", "core/test_layout.py",
    "core/test_balance.py", "core/test_mask.py", "core/test_gather.py", "core/test_geometry.py", "core/test_plan.py", "core/test_reference.py",
    "core/test_simulator.py", "conformance/test_table.py",
)  # fmt: skip

SETTINGS = """\
[tool.pytest]
pythonpath = [".", "tests"]
addopts = ["--import-mode=importlib", "--backend=core", "--hypothesis-profile=mutants"]
markers = ["nightly"]
filterwarnings = ["error"]

[tool.mutmut]
source_paths = ["src/"]
only_mutate = [{modules}]
also_copy = ["conftest.py", "tests"]
pytest_add_cli_args = ["-q", "-x"]
pytest_add_cli_args_test_selection = [{tests}]
timeout_multiplier = 4.0
"""

#: Meanings of mutmut's exit codes; any other is a crash or a timeout.
OUTCOMES = {
    1: "killed", 3: "killed", 0: "survived", 5: "not reached", 33: "not reached", None: "not run",
}  # fmt: skip
WORDS = ("killed", "stopped", "survived", "not reached", "not run")


def main(argv: list[str] | None = None) -> int:
    """Run mutmut and print the counts; return 1 if it killed less than 90 % of those that ran."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "modules", nargs="*", default=MODULES, help="of ring_core: paths without .py"
    )
    parser.add_argument("--children", type=int, default=1, help="mutants tested at once (1)")
    parser.add_argument("--json", type=Path, help="put the counts into this file, too")
    options = parser.parse_args(argv)
    _copy(options.modules)
    command = ["mutmut", "run", "--max-children", str(options.children)]
    subprocess.run(command, cwd=WORK, check=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    outcomes: dict[str, dict[str, str]] = {}  # of each mutant, by mutmut's name
    for module in options.modules:
        meta = WORK / "mutants" / "src" / "ring_core" / f"{module}.py.meta"
        codes = json.loads(meta.read_text())["exit_code_by_key"] if meta.exists() else {}
        outcomes[module] = {name: OUTCOMES.get(code, "stopped") for name, code in codes.items()}
    counts = {
        module: {"mutants": len(of_module), **{x: [*of_module.values()].count(x) for x in WORDS}}
        for module, of_module in outcomes.items()
    }
    if options.json is not None:
        sys.path.insert(0, str(ROOT / "tests"))
        from reliability import keep

        keep(options.json, "modules", counts, "numpy", "mutmut")
    total: Counter[str] = Counter()
    for module, of_module in counts.items():
        total.update(of_module)
        print(f"{module:12} " + ", ".join(f"{n} {word}" for word, n in of_module.items()))
        for name, outcome in outcomes[module].items():
            if outcome in ("survived", "not reached"):
                print(f"    {name}: {outcome}")
    ran, caught = total["mutants"] - total["not run"], total["killed"] + total["stopped"]
    print(f"{caught} of {ran} noticed, {total['not run']} not run; `mutmut show NAME` in {WORK}")
    return 0 if ran and caught >= 0.9 * ran else 1


def _copy(modules: list[str]) -> None:
    """Copy sources and tests again, and keep mutmut's results of earlier runs."""
    for name in ("src", "tests"):
        shutil.rmtree(WORK / name, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SOURCES, WORK / "src" / "ring_core", ignore=ignore)
    shutil.copytree(ROOT / "tests", WORK / "tests", ignore=ignore)
    shutil.copy(Path(__file__).with_name("fresh.py"), WORK / "conftest.py")
    for name in modules:  # mutmut takes a module that it has copied before for a mutated one
        copied = WORK / "mutants" / "src" / "ring_core" / f"{name}.py"
        if not copied.with_name(f"{copied.name}.meta").exists():
            copied.unlink(missing_ok=True)
            (WORK / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)
    quoted = (f'"src/ring_core/{name}.py"' for name in modules)
    tests = (f'"tests/{name}"' for name in TESTS)
    text = SETTINGS.format(modules=", ".join(quoted), tests=", ".join(tests))
    (WORK / "pyproject.toml").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
