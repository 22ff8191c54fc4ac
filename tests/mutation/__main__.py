"""Change ring_core in thousands of small ways and list the changes no test notices.

``nox -s mutants`` runs the modules that decide what is computed; ``nox -s mutants -- _band`` one.
Works on a copy in ``out/mutants``: sources where mutmut looks for them, and the tests that kill
fastest. A run that is cut off goes on where it ended, unless sources or tests changed.
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

#: Decisions and formulas; what only words and draws is left to its own tests.
MODULES = (
    "_band", "_block", "_blocks", "_gather", "_geometry", "_item", "_layout", "_mask", "_merge",
    "_program", "_schedule", "_seen", "_simulator", "philox",
)  # fmt: skip

#: Tests by what they take: mutmut runs those that reach a mutant, the quickest first.
TESTS = (
    "core/test_layout.py", "core/test_mask.py", "core/test_merge.py", "core/test_item.py",
    "core/test_gather.py", "core/test_plan.py", "core/test_reference.py",
    "core/test_table_executor.py", "conformance/test_table.py",
)  # fmt: skip

SETTINGS = """\
[tool.pytest]
pythonpath = [".", "tests"]
addopts = ["--import-mode=importlib", "--backend=core", "--hypothesis-profile=mutants"]

[tool.mutmut]
source_paths = ["src/"]
only_mutate = [{modules}]
also_copy = ["tests"]
pytest_add_cli_args = ["-q", "-x"]
pytest_add_cli_args_test_selection = [{tests}]
"""

#: What mutmut's exit codes mean; any other is a crash or a time limit.
OUTCOMES = {1: "killed", 3: "killed", 0: "survived", 5: "not reached", 33: "not reached"}


def main(argv: list[str] | None = None) -> int:
    """Run mutmut and count; 1 if less than 90 % of what ran was killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("modules", nargs="*", default=MODULES, help="of ring_core, without .py")
    parser.add_argument("--children", type=int, default=1, help="mutants tested at once (1)")
    parser.add_argument("--report", action="store_true", help="run nothing, count what has run")
    options = parser.parse_args(argv)
    unknown = set(options.modules) - {path.stem for path in SOURCES.glob("*.py")}
    if unknown:
        parser.error(f"no modules of ring_core: {sorted(unknown)}")
    if not options.report:
        _copy(options.modules)
        command = ["mutmut", "run", "--max-children", str(options.children)]
        subprocess.run(
            command, cwd=WORK, check=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        )
    return _report(options.modules)


def _copy(modules: list[str]) -> None:
    """Lay out sources and tests anew; what mutmut knows of earlier runs stays."""
    for name in ("src", "tests"):
        shutil.rmtree(WORK / name, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SOURCES, WORK / "src" / "ring_core", ignore=ignore)
    shutil.copytree(ROOT / "tests", WORK / "tests", ignore=ignore)
    quoted = (f'"src/ring_core/{name}.py"' for name in modules)
    tests = (f'"tests/{name}"' for name in TESTS)
    text = SETTINGS.format(modules=", ".join(quoted), tests=", ".join(tests))
    (WORK / "pyproject.toml").write_text(text)


def _report(modules: list[str]) -> int:
    total: Counter[str] = Counter()
    for module in modules:
        path = WORK / "mutants" / "src" / "ring_core" / f"{module}.py.meta"
        codes = json.loads(path.read_text())["exit_code_by_key"] if path.exists() else {}
        found = Counter(_outcome(code) for code in codes.values())
        total += found
        print(f"{module:12} " + ", ".join(f"{n} {word}" for word, n in sorted(found.items())))
        for name, code in codes.items():
            if _outcome(code) in ("survived", "not reached"):
                print(f"    {name}: {_outcome(code)}")
    ran = total.total() - total["not run"]
    caught = total["killed"] + total["stopped"]
    print(f"{caught} of {ran} noticed, {total['not run']} not run; `mutmut show NAME` in {WORK}")
    return 0 if ran and caught >= 0.9 * ran else 1


def _outcome(code: int | None) -> str:
    return "not run" if code is None else OUTCOMES.get(code, "stopped")


if __name__ == "__main__":
    sys.exit(main())
