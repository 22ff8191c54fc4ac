"""Built packages: their contents, their requirements and the modules that an import loads."""

from __future__ import annotations

import ast
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


def requirements(name: str) -> list[Requirement]:
    """Return the requirements of a package, without extras."""
    return [Requirement(text) for text in PACKAGES[name].get("dependencies", [])]


def reachable(name: str) -> set[str]:
    """Return the packages and frameworks that installing a package installs."""
    names = {name} | BROUGHT_ALONG.get(name, set())
    for requirement in requirements(name) if name in PACKAGES else []:
        names |= reachable(requirement.name)
    return names


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


def metadata(built: Path, name: str) -> PathDistribution:
    entries = zipfile.Path(wheel(built, name)).iterdir()
    (folder,) = (entry for entry in entries if entry.name.endswith(".dist-info"))
    return PathDistribution(folder)


def environment(folder: Path, *installs: str | Path) -> Path:
    """Make an empty environment, install into it, and return its Python."""
    uv("venv", "--quiet", "--python", sys.executable, folder)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    uv("pip", "install", "--quiet", "--python", python, "-c", "constraints.txt", *installs)
    return python


@pytest.fixture(scope="session")
def numpy_only(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with ring-core and numpy only."""
    folder = tmp_path_factory.mktemp("numpy") / "venv"
    return environment(folder, "--no-deps", "numpy", wheel(built, "ring-core"))


@pytest.fixture(scope="session")
def torch_only(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with ring-torch and its requirements."""
    wheels = [wheel(built, name) for name in ["ring-core", "ring-torch"]]
    return environment(tmp_path_factory.mktemp("torch") / "venv", *wheels)


@pytest.fixture(scope="session")
def jax_only(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with ring-jax, ring-jax-tpu and their requirements.

    It also has ring-jax-gpu, without its requirements: only machines with a GPU need Triton.
    """
    wheels = [wheel(built, name) for name in ["ring-core", "ring-jax", "ring-jax-tpu"]]
    python = environment(tmp_path_factory.mktemp("jax") / "venv", *wheels)
    own = wheel(built, "ring-jax-gpu")
    uv("pip", "install", "--quiet", "--python", python, "--no-deps", own)
    return python


# Prints the top-level names that anything tried to import, found or not. Names with an underscore
# are the standard library's own, for other platforms.
WATCH = """
import json, sys

class Watch:
    tried = set()
    def find_spec(self, name, path=None, target=None):
        self.tried.add(name.partition(".")[0])

sys.meta_path.insert(0, Watch())
{code}
tried = {{name for name in Watch.tried if name[0] != "_"}}
print(json.dumps(sorted(tried - set(sys.stdlib_module_names))))
"""

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

MODULES_OF = """
import importlib, pkgutil, {package}
for found in pkgutil.walk_packages({package}.__path__, "{package}."):
    if not found.name.endswith("__main__") and found.name not in {but}:
        importlib.import_module(found.name)
"""

#: Modules of core that are Triton's: who launches them imports them.
KERNELS = {f"ring_core.triton.{name}" for name in ("backward", "forward", "scores")}


def tried_imports(python: Path, code: str) -> set[str]:
    return set(json.loads(run(python, "-I", "-W", "error", "-c", WATCH.format(code=code))))


@each_package
def test_wheel_holds_all_sources_types_and_licence(built: Path, name: str) -> None:
    with zipfile.ZipFile(wheel(built, name)) as archive:
        names = set(archive.namelist())
        (licence,) = (entry for entry in names if entry.endswith("dist-info/licenses/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    expected = {
        path.relative_to(sources(name).parent).as_posix()
        for pattern in ("*.py", "*.json")
        for path in sources(name).rglob(pattern)
    }
    assert expected | {f"{module(name)}/py.typed"} == {
        entry for entry in names if ".dist-info/" not in entry and not entry.endswith("/")
    }


@each_package
def test_source_distribution_holds_licence_and_readme(built: Path, name: str) -> None:
    (path,) = built.glob(f"{module(name)}-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {entry.partition("/")[2] for entry in archive.getnames()}
    assert {"LICENSE", "README.md", f"src/{module(name)}/py.typed"} <= names


@each_package
def test_metadata(built: Path, name: str) -> None:
    """Versions agree, siblings are pinned to this minor version, and the index knows the rest."""
    project, core = PACKAGES[name], PACKAGES["ring-core"]
    text = (sources(name) / "__init__.py").read_text()
    assert metadata(built, name).version == core["version"]
    assert re.findall(r'^__version__ = "(.*)"$', text, flags=re.MULTILINE) == [core["version"]]
    assert project["requires-python"] == core["requires-python"]
    assert project.get("urls") == core.get("urls"), "none as long as the project is not public"
    named = project["classifiers"]
    assert named == sorted(set(named)) and set(named) <= classifiers
    major, minor, _ = project["version"].split(".")
    expected = Requirement(f"x>={major}.{minor},<{major}.{int(minor) + 1}").specifier
    asked = [Requirement(text) for text in metadata(built, name).requires or []]
    siblings = {r.name: r for r in asked if r.name in PACKAGES}
    assert (name == "ring-core") == (not siblings)
    assert all(r.specifier == expected and r.url is None for r in siblings.values())
    assert not {r.name for r in asked} & (FRAMEWORKS | set(PACKAGES)) - reachable(name)


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    core = PACKAGES["ring-core"]
    assert (citation["version"], citation["license"]) == (core["version"], core["license"])
    assert f"\n## {core['version']} - " in (ROOT / "CHANGELOG.md").read_text()


def test_frameworks_of_each_package() -> None:
    framework = {name: reachable(name) & FRAMEWORKS for name in PACKAGES}
    assert framework == {
        "ring-core": set(),
        "ring-torch": {"torch", "triton"},
        "ring-jax": {"jax", "jaxlib"},
        "ring-jax-gpu": {"jax", "jaxlib", "jax-triton", "triton"},
        "ring-jax-tpu": {"jax", "jaxlib"},
    }


@each_package
def test_sources_import_no_other_framework_or_backend(name: str) -> None:
    foreign = {module(n) for n in (FRAMEWORKS | set(PACKAGES)) - reachable(name)}
    offending = []
    for path in sources(name).rglob("*.py"):
        is_kernel = f"{module(name)}.{path.parent.name}.{path.stem}" in KERNELS
        own = KERNELS if name == "ring-core" else set()
        others = foreign - {"triton"} if is_kernel else foreign | own
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported = [node.module]
            else:
                continue
            offending += [
                f"{path.name}: {i}" for i in imported if {i, i.partition(".")[0]} & others
            ]
    assert not offending


def test_every_module_of_core_needs_numpy_only(numpy_only: Path) -> None:
    """Every module of core but the kernels imports with numpy alone; none imports kernels."""
    code = MODULES_OF.format(package="ring_core", but=sorted(KERNELS))
    assert tried_imports(numpy_only, code) <= {"ring_core", "numpy"}


def installed(python: Path) -> set[str]:
    listed = uv("pip", "list", "--quiet", "--python", python, "--format", "json")
    return {entry["name"] for entry in json.loads(listed)}


def test_torch_installs_without_jax_and_asks_for_no_device(torch_only: Path) -> None:
    names = installed(torch_only)
    assert {"ring-core", "ring-torch", "torch"} <= names
    assert not names & {"jax", "jaxlib", "jax-triton", "matplotlib", *JAX_PACKAGES}
    run(torch_only, "-I", "-c", NO_DEVICE)


def test_jax_installs_without_torch_asks_for_no_device_and_runs(jax_only: Path) -> None:
    names = installed(jax_only)
    assert {"ring-core", *JAX_PACKAGES, "jax"} <= names
    assert not names & {"torch", "triton", "jax-triton", "flax", "libtpu", "matplotlib"}
    run(jax_only, "-I", "-c", NO_JAX_DEVICE)


def test_constraints_pin_every_requirement_and_nothing_local() -> None:
    text = (ROOT / "constraints.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert not [line for line in lines if not re.match(r"^[a-z0-9-]+==[0-9][^/@]*$", line)]
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    lists: list[list[str]] = list(groups.values())
    for project in PACKAGES.values():
        lists += [
            project.get("dependencies", []),
            *project.get("optional-dependencies", {}).values(),
        ]
    pinned, asked = {line.partition("==")[0] for line in lines}, [x for some in lists for x in some]
    names = {Requirement(text).name for text in asked} - set(PACKAGES)
    assert names <= pinned
