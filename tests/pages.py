"""Reads the code on the documentation's pages from Markdown, and runs it as a reader would.

``python tests/pages.py PAGE`` runs the ``python`` blocks of a page top to bottom, in one namespace.
A block has to print what the ``output`` block right after it shows, if there is one; under
``torchrun`` rank 0 has to. Blocks that need packages which tests do not install carry a mark:
``torchrun --nproc-per-node=2 tests/pages.py PAGE MARK`` runs only these.
"""

from __future__ import annotations

import io
import os
import re
import sys
import types
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]

_FRONT_MATTER = re.compile(r"\A---\n(.*?)^---$", re.MULTILINE | re.DOTALL)
#: Indent, ticks, language, mark and code of a fenced block.
_FENCED = re.compile(
    r"^( *)(`{3,})(?:\{code-block\} *)?([^`\n]*?) *\n(?: *:class: *(.*?) *\n)?(.*?)^ *\2 *$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """Fenced block: its language, its code, and the page's line where the code starts.

    ``mark`` is the ``:class:`` of a ``{code-block}``, the reason why a block is not run.
    """

    language: str
    code: str
    line: int
    mark: str = ""


@dataclass(frozen=True)
class Page:
    """Page: settings of its front matter, and its blocks."""

    path: Path
    settings: dict[str, str]
    blocks: tuple[Block, ...]

    @classmethod
    def read(cls, path: Path) -> Page:
        """Read a page."""
        text, settings, blocks = path.read_text(), {}, []
        if front_matter := _FRONT_MATTER.match(text):
            for name, _, value in (line.partition(":") for line in front_matter[1].splitlines()):
                settings[name.strip()] = value.strip()
        for match in _FENCED.finditer(text):
            indent, _, language, mark, code = match.groups()
            code = "\n".join(line.removeprefix(indent) for line in code.splitlines())
            line = text.count("\n", 0, match.start(5)) + 1
            blocks.append(Block(language, code, line, mark or ""))
        return cls(path, settings, tuple(blocks))

    @property
    def program(self) -> list[tuple[Block, str | None]]:
        """Return the blocks to run, each with the output that the page shows, if any."""
        return [
            (block, after.code if after is not None and after.language == "output" else None)
            for block, after in pairwise((*self.blocks, None))
            if block is not None and block.language == "python" and not block.mark
        ]

    @property
    def marked(self) -> list[Block]:
        """Return the Python blocks that no test runs; their marks are the reasons."""
        return [block for block in self.blocks if block.language == "python" and block.mark]

    @property
    def commands(self) -> list[str]:
        """Return the lines of the ``sh`` blocks, continuations joined, without comments."""
        text = "\n".join(block.code for block in self.blocks if block.language == "sh")
        lines = text.replace("\\\n", " ").splitlines()
        return [line for raw in lines if (line := raw.split(" #")[0].strip()) and line[0] != "#"]


def run(page: Page) -> None:
    """Run a page in this process.

    Raises:
        AssertionError: A block prints something else than the page shows.
    """
    module = types.ModuleType("page")
    sys.modules["page"] = module  # dataclasses look up their names there
    for block, shown in page.program:
        source = "\n" * (block.line - 1) + block.code  # so that tracebacks name the page's lines
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(source, str(page.path), "exec"), module.__dict__)
        actual = "\n".join(line.rstrip() for line in printed.getvalue().rstrip().splitlines())
        if shown is not None and os.environ.get("RANK", "0") == "0" and actual != shown.rstrip():
            raise AssertionError(
                f"{page.path}, line {block.line}: the page shows\n\n{shown}\n\nand the block prints\n\n{actual}"
            )


def columns_of(table: str) -> dict[str, list[str]]:
    """Return the cells of a Markdown table by column name."""
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()
    ]
    header, _, *rest = rows
    return {name: [row[n] for row in rest] for n, name in enumerate(header)}


def check_jax_matrix(printed: str, kernel: str) -> None:
    """Check that the page has the columns that ``python -m ring_jax matrix`` prints.

    If not, paste what it prints with all kernels installed.
    """
    page = (ROOT / "docs" / "support-matrix.md").read_text()
    _, _, rest = page.partition("<!-- jax support matrix -->")
    shown = columns_of(rest.partition("<!-- end of jax support matrix -->")[0].strip())
    columns = columns_of(printed.strip())
    assert list(shown) == ["", "`xla`", "`pallas`", "`cudnn`", "`triton`"]
    assert {"", "`xla`", f"`{kernel}`"} <= columns.keys()
    for name, cells in columns.items():
        assert shown[name] == cells
        assert name == "" or all(cells)


def main(arguments: Sequence[str]) -> None:
    """Run a page's blocks, or those of a mark, with the libraries that the mark asks for."""
    path, *mark = arguments
    page = Page.read(Path(path))
    if mark:
        page = replace(
            page, blocks=tuple(replace(b, mark="") for b in page.blocks if [b.mark] == mark)
        )
        assert page.program, f"no block of {path} is marked {mark[0]}"
    else:
        warnings.simplefilter("error")
    run(page)


if __name__ == "__main__":
    main(sys.argv[1:])
