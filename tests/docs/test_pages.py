"""Pages are consistent: commands, links, API pages, versions and examples in docstrings."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from pages import ROOT, Page, columns_of
from public_api import public_names

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
INITS = sorted(ROOT.glob("packages/*/src/*/__init__.py"))
READMES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/NOTES.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
]

#: Python blocks that no test runs: page, and the reason that marks them.
MARKED = [
    ("coming-from-maxtext.md", "needs-maxtext"),
    ("coming-from-ring-flash-attn.md", "needs-ring-flash-attn"),
    ("coming-from-transformer-engine.md", "needs-transformer-engine"),
    ("jax-trainers.md", "needs-maxtext"), ("jax-trainers.md", "needs-tunix"),
    ("transformers.md", "needs-gpus"),
]  # fmt: skip


def test_blocks_that_no_test_runs() -> None:
    blocks = [(path, block) for path in PAGES for block in Page.read(path).marked]
    for path, block in blocks:
        compile(block.code, str(path), "exec")
    assert sorted((str(path.relative_to(DOCS)), block.mark) for path, block in blocks) == MARKED


@pytest.mark.parametrize("path", [*PAGES, *READMES], ids=lambda path: str(path.relative_to(ROOT)))
def test_page_says_what_runs_it_and_names_what_there_is(path: Path) -> None:
    page, noxfile = Page.read(path), (ROOT / "noxfile.py").read_text()
    runs = page.settings.get("runs", "none")
    assert runs in ("core", "torch", "jax", "none")
    assert runs == "torch" or "ranks" not in page.settings
    if path in PAGES:
        assert bool(page.program) == (runs != "none"), (
            "front matter: runs: core, torch, jax or none"
        )
    for line in page.commands:
        for named in re.findall(r"\b(?:packages|examples|benchmarks)/[\w/.-]+", line):
            assert (ROOT / named).exists(), line
        for module in re.findall(r"\bpython -m (benchmarks[\w.]+)", line):
            assert (ROOT / f"{module.replace('.', '/')}.py").exists(), line
        for session in re.findall(r"\bnox -s (\w+)", line):
            assert f"def {session}(" in noxfile, line


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    """Sphinx checks those between pages; these are read where the repository is hosted."""
    links = re.findall(r"\]\((?!\w+:)([^)#\s]+)(?:#([\w-]+))?\)", path.read_text())
    for file, anchor in links:
        target = path.parent / file
        assert target.exists(), file
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", x.lower()).replace(" ", "-") for x in headings]
            assert anchor in anchors, f"{file}#{anchor}"


@pytest.mark.parametrize("init", INITS, ids=lambda init: init.parent.name)
def test_api_page_names_all_that_is_public(init: Path) -> None:
    module = init.parent.name
    page = (DOCS / "api" / f"{module.replace('_', '-')}.md").read_text()
    documented = set(re.findall(rf"^\.\. auto\w+:: {module}\.(\w+)$", page, re.MULTILINE))
    elsewhere = rf"\{{py:\w+\}}`(?!{module}\.)ring_\w+\.(\w+)`"  # on the page of another package
    assert public_names(init) <= documented | set(re.findall(elsewhere, page))
    for extra in documented - public_names(init):
        assert (init.parent / f"{extra}.py").exists() or (init.parent / extra).is_dir(), extra


@pytest.mark.parametrize("path", sorted((DOCS / "api").glob("*.md")), ids=lambda path: path.stem)
def test_members_that_are_listed_are_all_there_are(path: Path) -> None:
    """API pages list every public function and class that a documented module defines."""
    listed = re.findall(r"automodule:: ([\w.]+)\n   :members: (.+)", path.read_text())
    for module, members in listed:
        name = module.replace(".", "/")
        (file,) = (
            x for end in (".py", "/__init__.py") for x in ROOT.glob(f"packages/*/src/{name}{end}")
        )
        nodes = ast.parse(file.read_text()).body
        defined = {x.name for x in nodes if isinstance(x, ast.ClassDef | ast.FunctionDef)}
        assert {x for x in defined if x[0] != "_"} <= set(members.split(", ")), module


def test_examples_in_docstrings_show_what_they_return() -> None:
    (source,), report = ROOT.glob("packages/*/src/ring_core"), list[str]()
    runner, finder = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), doctest.DocTestFinder()
    for path in source.rglob("*.py"):
        if ">>> " in path.read_text():
            name = ".".join(path.relative_to(source.parent).with_suffix("").parts)
            module = importlib.import_module(name.removesuffix(".__init__"))
            for test in finder.find(module):
                runner.run(test, out=report.append)
    assert runner.summarize().attempted > 0
    assert not report, "\n".join(report)


PROJECTS: list[dict[str, Any]] = [
    tomllib.loads(path.read_text())["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
]
_TABLE = re.findall(r"^\| what .*(?:\n\|.*)*", (DOCS / "reliability.md").read_text(), re.MULTILINE)
COLUMNS = columns_of(_TABLE[0])
#: Rows of the table of versions, and the package of each.
VERSIONS = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]
PACKAGE = {row["what"]: row["what"].partition(" ")[0] for row in VERSIONS}


def pins(path: Path) -> dict[str, list[str]]:
    """Return each package's versions in a constraints file; Python 3.13 may have another one."""
    versions: dict[str, list[str]] = {}
    for name, version in re.findall(r"^(\S+)==(\S+)", path.read_text(), re.MULTILINE):
        versions.setdefault(name, []).append(version)
    return versions


PINNED = pins(ROOT / "constraints.txt")
LOWEST = {path.stem: pins(path) for path in sorted(ROOT.glob("constraints-lowest-*.txt"))}


def minor(version: str) -> list[str]:
    return version.split(".")[:2]


def test_the_oldest_versions_are_those_that_the_packages_ask_for() -> None:
    asked: dict[str, set[str]] = {}
    for project in PROJECTS:
        hf = project.get("optional-dependencies", {}).get("hf", [])
        for requirement in map(Requirement, (*project["dependencies"], *hf)):
            if not requirement.name.startswith("ring-"):
                on = re.search(r"python_version >= \"(3\.\d+)\"", str(requirement.marker or ""))
                name = requirement.name + (f" on Python {on[1]}" if on else "")
                bounds = {x.version for x in requirement.specifier if x.operator == ">="}
                asked[name] = asked.get(name, set()) | bounds
    shown = {row["what"]: {row["oldest"]} for row in VERSIONS if PACKAGE[row["what"]] != "Python"}
    assert shown == asked
    pythons = [row["oldest"] for row in VERSIONS if PACKAGE[row["what"]] == "Python"]
    for project in PROJECTS:
        named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
        assert named == pythons
        assert project["requires-python"] == f">={pythons[0]}"


def test_rows_of_the_table_of_versions() -> None:
    """Dates are counted as SPEC 0 does; what is tested is pinned, and so is the oldest version."""
    for row in VERSIONS:
        what, released = row["what"], date.fromisoformat(row["released"])
        until = released.replace(year=released.year + (3 if PACKAGE[what] == "Python" else 2))
        assert row["supported at least until"] == until.isoformat(), what
        (version,) = PINNED.get(PACKAGE[what], [row["oldest"]])
        first = row["tested with"].partition(", ")[0]  # others have sessions of their own
        assert minor(version) == first.split("."), what
        lowest = [minor(x) for pinned in LOWEST.values() for x in pinned.get(PACKAGE[what], ())]
        assert PACKAGE[what] == "Python" or minor(row["oldest"]) in lowest, what
