"""Built packages: their contents, their requirements and the modules that an import loads."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from trove_classifiers import classifiers

ROOT = Path(__file__).parents[2]
PACKAGES = {
    path.parent.name: tomllib.loads(path.read_text())["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
JAX_PACKAGES = ["ring-jax", "ring-jax-gpu", "ring-jax-tpu"]
FRAMEWORKS = {"torch", "jax", "jaxlib", "triton", "jax-triton"}
#: torch installs Triton itself, so a package on torch may import it.
BROUGHT_ALONG = {"torch": {"triton"}, "jax-triton": {"triton"}}

each_package = pytest.mark.parametrize("name", PACKAGES)


def module(name: str) -> str:
    return name.replace("-", "_")


def sources(name: str) -> Path:
    return ROOT / "packages" / name / "src" / module(name)


def reachable(name: str) -> set[str]:
    """Return the packages and frameworks that installing a package, without extras, installs."""
    asked = PACKAGES.get(name, {}).get("dependencies", [])
    below = (reachable(Requirement(text).name) for text in asked)
    return {name}.union(BROUGHT_ALONG.get(name, ()), *below)


def run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def uv(*arguments: str | Path) -> str:
    program = shutil.which("uv")
    assert program, "these tests build and install packages with uv, which is not on the path"
    return run(program, *arguments)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build each package's source distribution, and a wheel out of it; return their folder."""
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "--quiet", "--all-packages", "--out-dir", folder)
    return folder


def wheel(built: Path, name: str) -> Path:
    (path,) = built.glob(f"{module(name)}-*.whl")
    return path


def environment(folder: Path, built: Path, *installs: str) -> Path:
    """Make an empty environment, install into it, and return its Python."""
    uv("venv", "--quiet", "--python", sys.executable, folder)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    wheels = (wheel(built, name) if name in PACKAGES else name for name in installs)
    uv("pip", "install", "--quiet", "--python", python, "-c", "constraints.txt", *wheels)
    return python


def installed(python: Path) -> set[str]:
    listed = uv("pip", "list", "--quiet", "--python", python, "--format", "json")
    return {entry["name"] for entry in json.loads(listed)}


# Makes every function fail by which torch, or a program that uses it, asks for devices.
NO_DEVICE = """
import sys
import torch

def refuse(*args, **kwargs):
    raise AssertionError("an import asked for a device")

for owner, names in {
    torch.cuda: "is_available device_count current_device get_device_properties _lazy_init "
    "get_device_capability get_device_name current_stream mem_get_info init",
    torch.accelerator: "is_available device_count current_accelerator current_device_index",
    torch._C: "_cuda_getDeviceCount _cuda_init _cuda_getDevice",
}.items():
    for name in names.split():
        if hasattr(owner, name):
            setattr(owner, name, refuse)

import ring_torch, ring_torch.compat
assert not torch.cuda.is_initialized()
assert not {"jax", "jaxlib", "transformers", "matplotlib"} & set(sys.modules)
assert "ring_torch.hf" not in sys.modules  # nor what it is made of
"""

# jax starts its backends when it is first asked for devices; none may have started.
NO_JAX_DEVICE = """
import sys
import ring_jax, ring_jax.compat, ring_jax.flax, ring_jax.maxtext, ring_jax.nn, ring_jax_gpu, ring_jax_tpu
from jax._src import xla_bridge
assert not xla_bridge._backends, "an import asked for a device"
assert not {"torch", "triton", "jax_triton", "flax", "equinox", "matplotlib"} & set(sys.modules)

import jax.numpy as jnp
from ring_jax.kernels.plugins import PACKAGES, installed_kernels
x = jnp.ones((1, 8, 2, 4))
assert jnp.allclose(ring_jax.ring_attention(x, x, x, axis_name=None, causal=True), 1.0)
for package in (ring_jax_gpu, ring_jax_tpu):
    assert package.ring_attention is ring_jax.ring_attention
    assert package.ContextParallel is ring_jax.ContextParallel
names = [name for _, names in PACKAGES.values() for name in names]
assert [kernel.capabilities.name for kernel in installed_kernels()] == [*names, "xla"]
"""

EVERY_MODULE = """
import importlib, pkgutil, ring_core
for found in pkgutil.walk_packages(ring_core.__path__, "ring_core."):
    if not found.name.endswith("__main__") and found.name not in {but}:
        importlib.import_module(found.name)
"""

#: Modules of core that are Triton's: who launches them imports them.
KERNELS = {f"ring_core.triton.{name}" for name in ("backward", "forward", "scores")}


@each_package
def test_distributions_hold_all_sources_types_and_licence(built: Path, name: str) -> None:
    with zipfile.ZipFile(wheel(built, name)) as archive:
        names = {entry for entry in archive.namelist() if not entry.endswith("/")}
        (licence,) = (entry for entry in names if entry.endswith("dist-info/licenses/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    files = [path for kind in ("*.py", "*.json") for path in sources(name).rglob(kind)]
    expected = {path.relative_to(sources(name).parent).as_posix() for path in files}
    assert expected | {f"{module(name)}/py.typed"} == {x for x in names if ".dist-info/" not in x}
    (path,) = built.glob(f"{module(name)}-*.tar.gz")
    with tarfile.open(path) as sdist:
        held = {entry.partition("/")[2] for entry in sdist.getnames()}
    assert {"LICENSE", "README.md", f"src/{module(name)}/py.typed"} <= held


@each_package
def test_metadata(built: Path, name: str) -> None:
    """Versions agree, siblings are pinned to this minor version, and the index knows the rest."""
    project, core = PACKAGES[name], PACKAGES["ring-core"]
    text = (sources(name) / "__init__.py").read_text()
    entries = zipfile.Path(wheel(built, name)).iterdir()
    (folder,) = (entry for entry in entries if entry.name.endswith(".dist-info"))
    metadata = PathDistribution(folder)
    assert metadata.version == core["version"]
    assert re.findall(r'^__version__ = "(.*)"$', text, flags=re.MULTILINE) == [core["version"]]
    assert project["requires-python"] == core["requires-python"]
    assert project.get("urls") == core.get("urls"), "none as long as the project is not public"
    named = project["classifiers"]
    assert named == sorted(set(named)) and set(named) <= classifiers
    major, minor, _ = project["version"].split(".")
    expected = Requirement(f"x>={major}.{minor},<{major}.{int(minor) + 1}").specifier
    asked = [Requirement(text) for text in metadata.requires or []]
    siblings = {r.name: r for r in asked if r.name in PACKAGES}
    assert (name == "ring-core") == (not siblings)
    assert all(r.specifier == expected and r.url is None for r in siblings.values())
    assert not {r.name for r in asked} & (FRAMEWORKS | set(PACKAGES)) - reachable(name)


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    core = PACKAGES["ring-core"]
    assert (citation["version"], citation["license"]) == (core["version"], core["license"])
    assert f"\n## {core['version']} - " in (ROOT / "CHANGELOG.md").read_text()


IMPORT = re.compile(r"^ *(?:from ([\w.]+) import|import ([\w.]+))", re.MULTILINE)


@each_package
def test_sources_import_no_other_framework_or_backend(name: str) -> None:
    foreign = {module(n) for n in (FRAMEWORKS | set(PACKAGES)) - reachable(name)}
    for path in sources(name).rglob("*.py"):
        is_kernel = f"{module(name)}.{path.parent.name}.{path.stem}" in KERNELS
        kernels = KERNELS if name == "ring-core" else set()
        others = foreign - {"triton"} if is_kernel else foreign | kernels
        imported = {x or y for x, y in IMPORT.findall(path.read_text())}
        assert not (imported | {x.partition(".")[0] for x in imported}) & others, path


def test_every_module_of_core_needs_numpy_only(built: Path, tmp_path: Path) -> None:
    """Every module of core but the kernels imports with numpy alone; none imports kernels."""
    python = environment(tmp_path / "venv", built, "--no-deps", "numpy", "ring-core")
    run(python, "-I", "-W", "error", "-c", EVERY_MODULE.format(but=sorted(KERNELS)))


def test_torch_installs_without_jax_and_asks_for_no_device(built: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", built, "ring-core", "ring-torch")
    names = installed(python)
    assert {"ring-core", "ring-torch", "torch"} <= names
    assert not names & {"jax", "jaxlib", "jax-triton", "matplotlib", *JAX_PACKAGES}
    run(python, "-I", "-c", NO_DEVICE)


def test_jax_installs_without_torch_asks_for_no_device_and_runs(
    built: Path, tmp_path: Path
) -> None:
    """ring-jax-gpu is there without its requirements: only machines with a GPU need Triton."""
    python = environment(tmp_path / "venv", built, "ring-core", "ring-jax", "ring-jax-tpu")
    own = wheel(built, "ring-jax-gpu")
    uv("pip", "install", "--quiet", "--python", python, "--no-deps", own)
    names = installed(python)
    assert {"ring-core", *JAX_PACKAGES, "jax"} <= names
    assert not names & {"torch", "triton", "jax-triton", "flax", "libtpu", "matplotlib"}
    run(python, "-I", "-c", NO_JAX_DEVICE)


def test_constraints_pin_every_requirement_and_nothing_local() -> None:
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x[0] != "#"]
    assert not [line for line in lines if not re.match(r"^[a-z0-9-]+==[0-9][^/@]*$", line)]
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    lists = [*groups.values(), *(x.get("dependencies", []) for x in PACKAGES.values())]
    lists += [x for p in PACKAGES.values() for x in p.get("optional-dependencies", {}).values()]
    names = {Requirement(text).name for some in lists for text in some} - set(PACKAGES)
    assert names <= {line.partition("==")[0] for line in lines}
