"""How Sphinx builds these pages: ``nox -s docs``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import ring_core

project = "Ring"
author = "Ring contributors"
copyright = author  # noqa: A001 - Sphinx gives the name
release = ring_core.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated"]
exclude_patterns = ["_ext", "_static"]
nitpicky = True
nitpick_ignore_regex = [
    ("py:(class|func)", r"(collections|jax|numpy|torch)\..*"),  # their documentation is elsewhere
    ("py:(class|mod)", r"ring_\w+(\.\w+)*\._\w+(\.\w+)*"),  # private
    (
        "py:class",
        r"ring_core\.(programs\.intervals\.Interval|plan\.\w+\.\w+Geometry|masks\.expression\.TracedRule)",
    ),  # of no page
]

autodoc_mock_imports = ["transformers"]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

# Docstrings give shapes and dtypes, which types do not.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_static_path = ["_static"]
html_js_files = ["filter.js"]
html_title = f"Ring {release}"
html_copy_source = False
html_show_sphinx = False
