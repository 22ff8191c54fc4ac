"""Fake installed packages: folders of metadata, written here and put on the path."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

PACKAGES = Path(__file__).parents[1] / "packages"
GROUP = "ring_jax.kernels"

#: Kernel packages besides ``ring-jax``, by the backend that tests them.
PLUGINS = {"jax-gpu": "ring-jax-gpu", "jax-cuda": "ring-jax-gpu", "jax-tpu": "ring-jax-tpu"}


def write(
    folder: Path, name: str, version: str, kernels: Mapping[str, str], group: str = GROUP
) -> None:
    """Write the metadata of a distribution, with entry points for kernels."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"[{group}]", *(f"{key} = {value}" for key, value in kernels.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def show(backend: str, folder: Path) -> None:
    """Make this process and its children see exactly the kernels that a backend tests.

    They see no others, whatever is installed, and use the entry points of the sources: metadata
    at the front of the path hides others of the same name.
    """
    for name in set(PLUGINS.values()):
        if name == PLUGINS.get(backend) or find_spec(name.replace("-", "_")):
            project = tomllib.loads((PACKAGES / name / "pyproject.toml").read_text())["project"]
            kernels = project["entry-points"][GROUP]
            group = GROUP if name == PLUGINS.get(backend) else "hidden"
            write(folder, name, project["version"], kernels, group)
    sys.path.insert(0, str(folder))
    paths = (str(folder), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
