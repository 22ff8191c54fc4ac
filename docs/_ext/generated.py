"""Directives whose content is a Python expression: pictures that the code draws, and tables.

``{picture}`` takes a mask, a plan, or a function that draws to a path, and shows the expression;
``{generated}`` takes Markdown. Both are evaluated when the pages are built.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Any, ClassVar

import commands
import pictures
import tables
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata, OptionSpec

import ring_core
from ring_core import viz

NAMES = {
    "Mask": ring_core.Mask,
    "balanced_layout": ring_core.balanced_layout,
    "make_plan": ring_core.make_plan,
    "ring_program": ring_core.ring_program,
    "commands": commands,
    "pictures": pictures,
    "tables": tables,
}


class Generated(SphinxDirective):
    """Markdown that the expression makes."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Parse it where it stands."""
        markdown = _evaluated(self)
        box = nodes.container()
        self.state.nested_parse(StringList(markdown.splitlines(), ""), self.content_offset, box)
        return list(box.children)


class Picture(SphinxDirective):
    """A picture drawn into the build's own folder, above the expression that draws it."""

    has_content = True
    option_spec: ClassVar[OptionSpec] = {"alt": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """Draw it; its name is the digest of the expression."""
        text = "\n".join(self.content)
        if "alt" not in self.options:
            raise self.error("a picture needs :alt:, what it shows in words")
        folder = Path(self.env.doctreedir) / "pictures"
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        path = folder / f"{digest}.svg"
        value = _evaluated(self)
        if isinstance(value, ring_core.Mask):
            value = pictures.gallery(value)
        if isinstance(value, ring_core.Plan):
            value = ring_core.ring_program(value)
        draw = partial(viz.plot, value) if isinstance(value, ring_core.RingProgram) else value
        draw(path)
        source = Path(self.env.doc2path(self.env.docname)).parent
        image = nodes.image(uri=os.path.relpath(path, source), alt=self.options["alt"])
        caption = nodes.caption("", "", nodes.literal(text, " ".join(text.split())))
        figure = nodes.figure("", image, caption)
        self.set_source_info(image)
        return [figure]


def _evaluated(directive: SphinxDirective) -> Any:
    """The value of a directive's content, which is part of this repository."""
    directive.env.note_dependency(__file__)
    text = "\n".join(directive.content)
    try:
        return eval(f"(\n{text}\n)", dict(NAMES))  # noqa: S307 - the pages are ours
    except Exception as error:
        raise directive.error(f"{text!r} failed: {error!r}") from error


def _prepare_docstring(
    _app: Sphinx, what: str, _name: str, documented: Any, _options: Any, lines: list[str]
) -> None:
    """What napoleon does not read as it is meant."""
    is_of_ring = type(documented).__module__.startswith("ring_")
    if what == "function" and is_of_ring:  # an object that is called like one
        lines[:] = cleandoc(type(documented).__call__.__doc__ or "").splitlines()
    lines[:] = _one_by_one(lines)


def _restore_property(
    _app: Sphinx, what: str, _name: str, documented: Any, _options: Any, lines: list[str]
) -> None:
    """Napoleon takes what stands before the first colon of a property's docstring for a type."""
    if what == "property":
        lines[:] = [*cleandoc(documented.__doc__ or "").splitlines(), ""]


def _one_by_one(lines: list[str]) -> Iterator[str]:
    """Attributes described together, ``a, b: text``, each by itself, as napoleon does Args."""
    line_number = lines.index("Attributes:") + 1 if "Attributes:" in lines else len(lines)
    yield from lines[:line_number]
    while line_number < len(lines):
        stop = line_number + 1
        while stop < len(lines) and lines[stop].startswith("     "):
            stop += 1
        together = re.fullmatch(r"    (\w+(?:, \w+)+): (.*)", lines[line_number])
        heads = [lines[line_number]]
        if together:
            heads = [f"    {name}: {together[2]}" for name in together[1].split(", ")]
        for head in heads:
            yield from (head, *lines[line_number + 1 : stop])
        line_number = stop


def _exported(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """Names of ``ring_core`` that other packages export are documented there."""
    if node.get("refdomain") != "py":
        return None
    name = str(node["reftarget"]).rpartition(".")[2]
    target = f"ring_core.{name}"
    python = env.domains.python_domain
    if target not in python.objects:
        return None
    document = str(node["refdoc"])
    return python.resolve_xref(env, document, app.builder, "obj", target, node, content)


def setup(app: Sphinx) -> ExtensionMetadata:
    """Called by Sphinx."""
    app.add_directive("generated", Generated)
    app.add_directive("picture", Picture)
    app.connect("missing-reference", _exported)
    app.connect("autodoc-process-docstring", _prepare_docstring, priority=400)  # napoleon: 500
    app.connect("autodoc-process-docstring", _restore_property, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
