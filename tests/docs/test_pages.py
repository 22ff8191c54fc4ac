"""Pages are consistent: front matter, commands, and the names on API pages exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
INITS = sorted(ROOT.glob("packages/*/src/*/__init__.py"))
READMES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "NOTES.md",
    *sorted(ROOT.glob("packages/*/README.md")),
]
RUNS = ("core", "torch", "jax", "none")

#: Python blocks that no test runs, by the reason that marks them.
MARKED: dict[str, dict[str, int]] = {
    "coming-from-ring-flash-attn.md": {"needs-ring-flash-attn": 1},
    "coming-from-transformer-engine.md": {"needs-transformer-engine": 1},
    "coming-from-maxtext.md": {"needs-maxtext": 1},
    "jax-trainers.md": {"needs-maxtext": 1, "needs-tunix": 1},
    "transformers.md": {"needs-gpus": 1},
}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_page_says_what_runs_it(path: Path) -> None:
    page = Page.read(path)
    runs = page.settings.get("runs", "none")
    assert runs in RUNS
    assert bool(page.program) == (runs != "none"), "front matter: runs: core, torch, jax or none"
    assert runs == "torch" or "ranks" not in page.settings


def test_blocks_that_no_test_runs() -> None:
    blocks: dict[str, dict[str, int]] = {}
    for path in PAGES:
        for block in Page.read(path).marked:
            compile(block.code, str(path), "exec")
            reasons = blocks.setdefault(str(path.relative_to(DOCS)), {})
            reasons[block.mark] = reasons.get(block.mark, 0) + 1
    assert blocks == MARKED


@pytest.mark.parametrize("path", [*PAGES, *READMES], ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_name_what_there_is(path: Path) -> None:
    noxfile = (ROOT / "noxfile.py").read_text()
    for line in Page.read(path).commands:
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
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("init", INITS, ids=lambda init: init.parent.name)
def test_api_page_names_all_that_is_public(init: Path) -> None:
    module = init.parent.name
    page = (DOCS / "api" / f"{module.replace('_', '-')}.md").read_text()
    documented = set(re.findall(rf"^\.\. auto\w+:: {module}\.(\w+)$", page, re.MULTILINE))
    elsewhere = rf"\{{py:\w+\}}`(?!{module}\.)ring_\w+\.(\w+)`"  # on the page of another package
    named = set(re.findall(elsewhere, page))
    assert public(init) <= documented | named
    for extra in documented - public(init):
        assert (init.parent / f"{extra}.py").exists() or (init.parent / extra).is_dir(), extra


@pytest.mark.parametrize("path", sorted((DOCS / "api").glob("*.md")), ids=lambda path: path.stem)
def test_members_that_are_listed_are_all_there_are(path: Path) -> None:
    """API pages list every public function and class that a documented module defines."""
    listed = re.findall(r"automodule:: ([\w.]+)\n   :members: (.+)", path.read_text())
    for module, members in listed:
        (file,) = (
            folder
            for name in (
                f"{module.replace('.', '/')}.py",
                f"{module.replace('.', '/')}/__init__.py",
            )
            for folder in ROOT.glob(f"packages/*/src/{name}")
        )
        defined = {
            node.name
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        }
        assert defined <= set(members.split(", ")), module


def public(init: Path) -> set[str]:
    """Return the public names of a module: those it defines or imports with ``as``."""
    names: set[str] = set()
    for node in ast.parse(init.read_text()).body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname for alias in node.names if alias.asname}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}
