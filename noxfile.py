# /// script
# requires-python = ">=3.12"
# dependencies = ["nox>=2026.4.10", "uv>=0.13"]
# ///
"""Every command of this repository: ``nox -l`` lists them, ``nox -s NAME`` runs one.

Sessions install the packages as a user would get them (built, not editable), each session in an
environment of its own, with the versions in ``constraints.txt``, or with the oldest ones, in
``constraints-lowest-*.txt``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import nox

nox.needs_version = ">=2026.4.10"
nox.options.default_venv_backend = "uv"

ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))

#: What each backend's tests need: packages, with the extras that tests use.
BACKENDS = {
    "core": ["ring-core[viz]"],
    "torch": ["ring-core", "ring-torch[hf]"],
    "jax": ["ring-core", "ring-jax"],
    "jax-gpu": ["ring-core", "ring-jax", "ring-jax-gpu"],
    "jax-tpu": ["ring-core", "ring-jax", "ring-jax-tpu[tpu]"],
}

#: What their tests need beside pytest.
GROUPS = {"torch": ["test", "test-torch"], "jax": ["test", "test-jax"]}

#: What else is tested with what a backend's tests need, in a run of its own.
ALSO = {"torch": ["torch-triton"]}

#: How many tests of a backend run at once, where not as many as there are cores: those of torch
#: start processes of their own.
WORKERS = {"torch": "2"}

#: Tests of core that are the same on another Python: of many numbers, or of what files say.
NUMBERS_ALONE = ("plan", "gather", "geometry", "balance", "fuzz", "numerics")
TEXT_ALONE = ("sources", "tiers")

#: What shows in a minute that the oldest versions work: the compiler, views and the public names.
QUICK_ON_LOWEST = (
    "torch_only/test_compile.py::test_in_one_graph",
    "torch_only/test_compile.py::test_few_graphs_for_all_lengths[ring-zigzag-cu]",
    "torch_only/test_compile.py::test_other_sizes",
    "torch_only/test_compile.py::test_tensors_without_numbers_send_nothing",
    "torch_only/test_api.py",
    "torch_only/test_whole.py",
    "torch_only/test_views.py",
    "torch_only/test_hf_names.py",
)

#: Releases of transformers that are tested beside the pinned one, with what they need.
RELEASES = {
    "5.14": ["transformers==5.14.0", "huggingface-hub==1.33.0", "tokenizers==0.22.2"],
    "5.24": ["transformers==5.24.0", "huggingface-hub==2.4.0", "tokenizers==0.23.3"],
}
#: The tests that run on them for each change, where each has a machine; nightly builds run all that
#: import transformers.
ON_EACH = ["tests/torch_only/test_hf_names.py"]

#: What has to pass before a change is accepted, what takes longest first, and the arguments. The
#: table of cases holds numbers, too.
CI = {
    **dict.fromkeys(f"tests-3.12({backend})" for backend in ("jax", "torch", "jax-gpu", "jax-tpu")),
    "tests-3.12(core)": ["--hypothesis-profile=fewer"],
    "types": None,
    "lowest-3.12(torch)": [f"tests/{name}" for name in QUICK_ON_LOWEST],
    "docs": None,
    "tests-3.13(core)": [
        *(f"--ignore=tests/{x}" for x in ("conformance", "docs", "fuzz", "meta")),
        *(f"--ignore=tests/core/test_{x}.py" for x in (*NUMBERS_ALONE, *TEXT_ALONE)),
    ],
    **dict.fromkeys(("packaging", "lint", "workflows", "size")),
}

#: The module whose doctor tests a backend.
DOCTORS = {"core": "ring_core", "torch": "ring_torch"} | dict.fromkeys(
    ("jax", "jax-gpu", "jax-tpu"), "ring_jax"
)

#: What has to pass before a release.
RELEASE = ["build", "packaging", *(f"smoke-{v}({b})" for v in ("3.12", "3.13") for b in BACKENDS)]

CONSTRAINED = ["--constraint", "constraints.txt"]

#: Backends whose oldest versions are pinned together, in ``constraints-lowest-<side>.txt``, by what
#: their names begin with. In one file for all each would raise the others' bounds: the oldest torch
#: brings an older Triton than ring-jax-gpu needs, and the oldest jax needs a newer numpy than core.
SIDES = ("core", "torch", "jax")


def install(session: nox.Session, packages: list[str], groups: list[str], *options: str) -> None:
    """Install packages of this repository, built anew, and dependency groups."""
    # uv compiles nothing: where no process may keep what it compiled of torch or of jax, each that
    # tests start takes seconds to compile it again.
    session.env["PYTHONDONTWRITEBYTECODE"] = None
    # Siblings are among the arguments; --no-sources keeps the workspace, and its links, out.
    session.install(
        *options,
        "--no-sources",
        *(f"./packages/{package}" for package in packages),
        *nox.project.dependency_groups(PYPROJECT, *groups),
    )


def workers_of(backend: str) -> str:
    """How many tests of a backend run at once."""
    one = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS") == "1"  # what `auto` means to pytest
    return "auto" if one else WORKERS.get(backend, "auto")


@nox.session(python=["3.12", "3.13"])
@nox.parametrize("backend", [nox.param(backend, id=backend) for backend in BACKENDS])
def tests(session: nox.Session, backend: str) -> None:
    """Run one backend's tests, on 3.13 with fewer random examples; arguments go to pytest."""
    install(session, BACKENDS[backend], GROUPS.get(backend, ["test"]), *CONSTRAINED)
    # All tests run on both; examples that hypothesis draws are drawn in full on the first.
    fewer = ["--hypothesis-profile=fewer"] if session.python == "3.13" else []
    for each in (backend, *ALSO.get(backend, [])):
        options = (f"--backend={each}", "-n", workers_of(backend), "--durations=8", *fewer)
        command = ("pytest", "tests", *options)
        session.run(*command, *session.posargs)


@nox.session(python="3.12", default=False)
@nox.parametrize("backend", [nox.param(backend, id=backend) for backend in BACKENDS])
def lowest(session: nox.Session, backend: str) -> None:
    """Run one backend's tests with the oldest versions the packages accept."""
    pins = f"constraints-lowest-{backend.partition('-')[0]}.txt"
    install(session, BACKENDS[backend], GROUPS.get(backend, ["test"]), "--constraint", pins)
    # Old releases may call what newer ones of their own dependencies deprecate.
    warn = ["-W", "default::DeprecationWarning"]
    also = (
        [] if session.posargs else ALSO.get(backend, [])
    )  # paths that are given are of one backend
    for each in (backend, *also):
        command = ("pytest", f"--backend={each}", "-n", workers_of(backend))
        session.run(*command, *warn, *session.posargs)  # without a path of theirs: all of `tests`


@nox.session(python="3.12", default=False)
@nox.parametrize("backend", [nox.param(backend, id=backend) for backend in BACKENDS])
def newest(session: nox.Session, backend: str) -> None:
    """Run one backend's tests with the newest versions there are, which nobody has pinned yet."""
    install(session, BACKENDS[backend], GROUPS.get(backend, ["test"]))
    command = ("pytest", "tests", f"--backend={backend}", "-n", workers_of(backend))
    session.run(*command, *session.posargs)


def install_release(session: nox.Session, release: str) -> None:
    """Install what tests of torch need, with one release of transformers, all else as pinned."""
    pins = RELEASES.get(release, [])
    names = tuple(f"{pin.partition('==')[0]}==" for pin in pins)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    path = Path(session.create_tmp()).resolve() / "constraints.txt"
    path.write_text("\n".join([*(x for x in lines if not x.startswith(names)), *pins]) + "\n")
    install(session, BACKENDS["torch"], GROUPS["torch"], "--constraint", str(path))


@nox.session(python="3.12", default=False)
@nox.parametrize("release", [nox.param(release, id=release) for release in RELEASES])
def transformers(session: nox.Session, release: str) -> None:
    """Run all tests that import transformers, or those named, on another release of it."""
    install_release(session, release)
    command = ("pytest", "--backend=torch", "--transformers", "-n", workers_of("torch"))
    session.run(*command, *session.posargs)  # without a path of theirs: all of `tests`


@nox.session(python="3.12", default=False)
def nightly(session: nox.Session) -> None:
    """Run all cases, examples and all that compiles, where ``ci`` runs a part."""
    for backend, packages in BACKENDS.items():
        groups = ["test"] if backend == "core" else GROUPS.get(backend, GROUPS["jax"])
        groups = [*groups, *(["processes"] if backend == "jax" else [])]
        install(session, packages, groups, *CONSTRAINED)
        for each in (backend, *ALSO.get(backend, [])):
            command = ("pytest", "tests", f"--backend={each}", "--all", "-n", workers_of(backend))
            session.run(*command, *session.posargs)


#: Tests beside the table, by backend, that run its cases under each strategy that ``auto`` leaves.
UNDER_STRATEGIES = {
    "torch": ["tests/torch_only/test_strategies.py"],
    "jax": ["tests/jax_only/test_strategies.py"],
}


@nox.session(python="3.12", default=False)
@nox.parametrize("backend", [nox.param(backend, id=backend) for backend in UNDER_STRATEGIES])
def conformance(session: nox.Session, backend: str) -> None:
    """Run every case of the table: as ``auto`` has it, and under every other strategy."""
    install(session, BACKENDS[backend], GROUPS[backend], *CONSTRAINED)
    command = ("pytest", "tests/conformance", *UNDER_STRATEGIES[backend], f"--backend={backend}")
    session.run(*command, "--all", "-n", workers_of(backend), *session.posargs)


@nox.session(python="3.12", default=False)
@nox.parametrize("backend", [nox.param(x, id=x) for x in ("core", "torch", "jax", "jax-gpu")])
def fuzz(session: nox.Session, backend: str) -> None:
    """Run random cases on a backend, for minutes or, with ``--seconds``, for hours."""
    install(session, BACKENDS[backend], ["test"], *CONSTRAINED)
    session.run("python", "tests/fuzz", f"--backend={backend}", *session.posargs)


@nox.session(python="3.12", default=False)
def reliability(session: nox.Session) -> None:
    """Run the tests of every promise, or of those named, and keep how many ran."""
    packages = ["ring-core[viz]", "ring-torch[hf]", "ring-jax", "ring-jax-tpu[tpu]"]
    install(session, packages, ["test", "test-torch", "test-jax"], *CONSTRAINED)
    session.run("python", "tests/reliability.py", *session.posargs)


@nox.session(python="3.12", default=False)
@nox.parametrize("release", [nox.param(release, id=release) for release in ("pinned", *RELEASES)])
def sweep(session: nox.Session, release: str) -> None:
    """Run every class of models of transformers on two ranks; what was run before is skipped.

    On the pinned release also with each switch of its config.
    """
    install_release(session, release)
    session.run("python", "tests/sweep", "models", *session.posargs)
    if release == "pinned":
        session.run("python", "tests/sweep", "switches", *session.posargs)


@nox.session(python="3.12", default=False)
def sweep_options(session: nox.Session) -> None:
    """Try every option of Trainers and adapters on two ranks; skip rows of the table."""
    install(session, BACKENDS["torch"], GROUPS["torch"], *CONSTRAINED)
    session.run("python", "tests/sweep", "options", *session.posargs)


@nox.session(python="3.12", default=False)
def maxtext(session: nox.Session) -> None:
    """Train with MaxText's own program on the ring, tiny, and compare with its own attention."""
    install(session, BACKENDS["jax"], ["test", "test-jax", "maxtext"], *CONSTRAINED)
    session.run("pytest", "tests", "--backend=maxtext", *session.posargs)


@nox.session(python="3.12", default=False)
def diffusers(session: nox.Session) -> None:
    """Run transformers of diffusers on the ring, tiny, and compare with one process."""
    install(session, BACKENDS["torch"], ["test"], *CONSTRAINED)
    session.install("diffusers==0.42.1", *CONSTRAINED)
    session.run("pytest", "tests", "--backend=diffusers", *session.posargs)


@nox.session(python="3.12", default=False)
def torchtitan(session: nox.Session) -> None:
    """Run models of torchtitan on the ring, tiny, and compare with one process."""
    install(session, BACKENDS["torch"], ["test"])
    session.install("torchtitan==0.3.0")
    session.run("pytest", "tests", "--backend=torchtitan", *session.posargs)


@nox.session(python="3.12", default=False)
@nox.parametrize("release", [nox.param(release, id=release) for release in ("pinned", "newest")])
def flash_attn_4(session: nox.Session, release: str) -> None:
    """Compare flash-attn-4 with what `kernels/fa4/library.py` says of it; needs no GPU."""
    constrained = CONSTRAINED if release == "pinned" else ()
    install(session, ["ring-core", "ring-torch[fa4]"], ["test"], *constrained)
    session.run("pytest", "tests", "--backend=fa4", *session.posargs)


@nox.session(python="3.12", default=False)
def flash_linear_attention(session: nox.Session) -> None:
    """Compare recurrent layers by flash-linear-attention with torch's; needs no GPU."""
    install(session, ["ring-core", "ring-torch[fla]"], ["test"])
    session.run("pytest", "tests", "--backend=fla", *session.posargs)


@nox.session(python="3.12", default=False)
def mutants(session: nox.Session) -> None:
    """Break ring_core in thousands of small ways and list what no test notices."""
    session.install("numpy", *nox.project.dependency_groups(PYPROJECT, "test", "mutants"))
    session.run("python", "tests/mutation", *session.posargs)


@nox.session(python="3.12", default=False)
def soak(session: nox.Session) -> None:
    """Make 10,000 calls of changing shapes, twice, and one of a million tokens: nothing grows."""
    install(session, BACKENDS["torch"], ["examples"], *CONSTRAINED)
    session.run("python", "tests/soak.py", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(python="3.12", default=False)
@nox.parametrize("backend", [nox.param(backend, id=backend) for backend in ("torch", "jax")])
def hosts(session: nox.Session, backend: str) -> None:
    """Run rings over hosts made of network namespaces; needs Linux and root."""
    install(session, BACKENDS[backend], [*GROUPS[backend], "examples"], *CONSTRAINED)
    session.run("python", "tests/hosts.py", backend, *session.posargs)


@nox.session(python="3.12", default=False)
def processes(session: nox.Session) -> None:
    """Run JAX on 2 and 4 processes with every strategy, and restore on other rings with Orbax."""
    install(session, BACKENDS["jax"], [*GROUPS["jax"], "processes"], *CONSTRAINED)
    file = "tests/jax_only/test_processes.py"
    session.run("pytest", file, "--backend=jax", "--all", *session.posargs)


@nox.session(python="3.12", default=False)
def audit(session: nox.Session) -> None:
    """Look up known vulnerabilities of all pinned dependencies; asks the network."""
    session.install("pip-audit>=2.9")
    # Strict: what could not be looked up is a failure, not a package without vulnerabilities.
    options = ("--strict", "--requirement=constraints.txt", "--no-deps", "--disable-pip")
    session.run("pip-audit", *options)


@nox.session(python="3.12", default=False)
@nox.parametrize("backend", [nox.param(backend, id=backend) for backend in ("torch", "jax")])
def gpu(session: nox.Session, backend: str) -> None:
    """Run the table of cases on this machine's GPUs: a process each, or one for all in JAX."""
    in_jax = ["ring-core", "ring-jax", "ring-jax-gpu[cuda13]"]
    install(session, in_jax if backend == "jax" else BACKENDS["torch"], ["test"], *CONSTRAINED)
    session.run("pytest", "tests", f"--backend={backend}-cuda", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting; ``nox -s lint -- --fix`` repairs what it can."""
    install(session, [], ["lint"], *CONSTRAINED)
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")


@nox.session
def workflows(session: nox.Session) -> None:
    """Check the workflows of the repository's host: their syntax, and what they may do."""
    install(session, [], ["workflows"], *CONSTRAINED)
    session.run("zizmor", "--offline", "--pedantic", "--strict-collection", "--quiet", ".github")


@nox.session(python="3.12")
def types(session: nox.Session) -> None:
    """Check types, strictly, in sources, tests, examples, benchmarks and this file; and imports."""
    packages = ["ring-core[viz]", "ring-torch[hf]", "ring-jax", "ring-jax-gpu", "ring-jax-tpu"]
    groups = ["test", "test-jax", "types", "examples", "docs", "nox"]
    install(session, packages, groups, *CONSTRAINED)
    session.run("mypy", *session.posargs)
    session.run("lint-imports", "--no-cache")


@nox.session(python="3.12", default=False)
def packaging(session: nox.Session) -> None:
    """Build every wheel and check what is in it and what importing it brings."""
    install(session, ["ring-core"], ["test", "nox"], *CONSTRAINED)
    session.run("pytest", "tests/packaging", "--backend=none", *session.posargs)


@nox.session(venv_backend="none", default=False, tags=["ci"])
def ci(session: nox.Session) -> None:
    """Run all that has to pass before a change is accepted, two sessions at a time.

    Installing, types and pages take one core whatever there are; the tests of a session get half.
    A third at a time was tried: on two cores all took no less.
    """
    env = {"PYTEST_XDIST_AUTO_NUM_WORKERS": str(max(1, (os.cpu_count() or 1) // 2))}

    def run(name: str) -> tuple[str, subprocess.CompletedProcess[str]]:
        command = (sys.executable, "-m", "nox", "--error-on-missing-interpreters", "-s", name)
        return name, subprocess.run(  # noqa: S603 - this program itself
            (*command, "--", *(CI[name] or ()), *session.posargs), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env=os.environ | env, check=False,
        )  # fmt: skip

    failed = []
    with ThreadPoolExecutor(2) as pool:
        for future in as_completed([pool.submit(run, name) for name in CI]):
            name, ended = future.result()
            sys.stdout.write(ended.stdout)
            sys.stdout.flush()
            failed += [name] if ended.returncode else []
    if failed:
        session.error(f"failed: {', '.join(failed)}")
    session.log("passed: %s", ", ".join(CI))


@nox.session(python="3.12", default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation into ``out/docs``; arguments go to Sphinx."""
    packages = ["ring-core[viz]", "ring-torch", "ring-jax", "ring-jax-gpu", "ring-jax-tpu"]
    install(session, packages, ["docs"], *CONSTRAINED)
    strict = ["--fail-on-warning", "--keep-going", "--fresh-env"]
    session.run("sphinx-build", *strict, "--builder=html", "docs", "out/docs", *session.posargs)


@nox.session(venv_backend="none", default=False)
def size(session: nox.Session) -> None:
    """Print how much there is to read and to run: words, lines, statements, tests, results."""
    session.run(sys.executable, "tests/size.py")


@nox.session(python="3.12", default=False)
def demo(session: nox.Session) -> None:
    """Train a tiny byte-level model on a ring, on GPUs if there are enough; arguments go to it."""
    install(session, ["ring-core[viz]", "ring-torch"], ["examples"], *CONSTRAINED)
    session.run("python", "examples/train_bytes.py", *session.posargs)


@nox.session(python="3.12", default=False)
def demo_packing(session: nox.Session) -> None:
    """Train on packed documents of unlike lengths, with even work; arguments go to the example."""
    install(session, ["ring-core[viz]", "ring-torch"], ["examples"], *CONSTRAINED)
    session.run("python", "examples/train_packed.py", *session.posargs)


@nox.session(python="3.12", default=False)
def demo_hybrid(session: nox.Session) -> None:
    """Train a small Qwen3.5, recurrent layers and all, over processes and in one, and compare."""
    install(session, ["ring-core[viz]", "ring-torch[hf]"], ["examples"], *CONSTRAINED)
    session.run("python", "examples/train_hybrid.py", *session.posargs)


@nox.session(python="3.12", default=False)
def demo_generate(session: nox.Session) -> None:
    """Read a long prompt and answer it over processes and in one, and compare the tokens."""
    install(session, ["ring-core", "ring-torch[hf]"], ["examples"], *CONSTRAINED)
    session.run("python", "examples/generate.py", *session.posargs)


@nox.session(python="3.12", default=False)
def demo_jax(session: nox.Session) -> None:
    """Train the same kind of model in JAX, on host devices; arguments go to the example."""
    install(session, ["ring-core", "ring-jax"], ["examples"], *CONSTRAINED)
    session.run("python", "examples/train_bytes_jax.py", *session.posargs)


@nox.session(python="3.12", default=False)
def bench_gpu(session: nox.Session) -> None:
    """Time the ring and its rivals on this machine's GPUs; arguments go to the benchmark."""
    install(session, ["ring-core", "ring-torch[fa4]"], [], *CONSTRAINED)
    session.run("python", "-m", "benchmarks.torch.scaling", *session.posargs)


@nox.session(python="3.12", default=False)
def bench_options(session: nox.Session) -> None:
    """Time head dims, masks and options beside other kernels on one GPU; arguments go to it."""
    install(session, ["ring-core", "ring-torch[fa4]"], ["examples"], *CONSTRAINED)
    session.run("python", "-m", "benchmarks.torch.options", *session.posargs)


@nox.session(python="3.12", default=False)
def bench_jax_gpus(session: nox.Session) -> None:
    """Time attention over several GPUs in JAX, beside plain JAX; arguments go to it."""
    install(session, ["ring-core", "ring-jax", "ring-jax-gpu[cuda13]"], [], *CONSTRAINED)
    session.run("python", "-m", "benchmarks.jax.scaling", *session.posargs)


@nox.session(python="3.12", default=False)
def bench_jax_options(session: nox.Session) -> None:
    """Time head dims, masks and options in JAX on one GPU, beside cuDNN; arguments go to it."""
    install(session, ["ring-core", "ring-jax", "ring-jax-gpu[cuda13]"], ["examples"], *CONSTRAINED)
    session.run("python", "-m", "benchmarks.jax.options", *session.posargs)


@nox.session(python="3.12", default=False)
def program_size(session: nox.Session) -> None:
    """Print what JAX lowers a call to, in bytes, and the seconds it takes; arguments go to it."""
    install(session, ["ring-core", "ring-jax"], [], *CONSTRAINED)
    session.run("python", "tests/program_size.py", *session.posargs)


@nox.session(python="3.12", default=False)
def gpu_schedule(session: nox.Session) -> None:
    """Test how XLA's compiler for GPUs schedules a ring's loops, no GPU needed."""
    install(session, BACKENDS["jax-gpu"], ["test"], *CONSTRAINED)
    # The compiler alone, without CUDA's libraries.
    session.install("jax-cuda13-pjrt", "jax-cuda13-plugin", "--no-deps", *CONSTRAINED)
    test = "test_loops_transfer_beside_attention_and_copy_nothing"
    path = f"tests/jax_gpu_only/test_compiled.py::{test}"
    # Without the library the test fails here, and is skipped elsewhere.
    session.run(
        "pytest", "--backend=jax-gpu", path, *session.posargs, env={"RING_HAS_GPU_COMPILER": "1"}
    )


@nox.session(python="3.12", default=False)
def tpu_static(session: nox.Session) -> None:
    """Count what TPU kernels cost in their machine code, no TPU needed; arguments go to it."""
    install(session, BACKENDS["jax-tpu"], [], *CONSTRAINED)
    session.run("python", "-m", "benchmarks.development.tpu_static", *session.posargs)


@nox.session(python="3.12", default=False)
def tpu_exposed(session: nox.Session) -> None:
    """Count the bytes that no kernel hides on TPUs, beside MaxText's; arguments go to it."""
    install(session, BACKENDS["jax-tpu"], ["test-jax", "maxtext"], *CONSTRAINED)
    session.run("python", "-m", "benchmarks.development.tpu_exposed", *session.posargs)


@nox.session(default=False)
def constraints(session: nox.Session) -> None:
    """Write ``constraints.txt`` anew, with current versions of everything any session installs.

    And ``constraints-lowest-*.txt``, with the oldest versions that packages and tests ask for.
    """
    install(session, [], ["nox"])

    def write(name: str, packages: list[str], *options: str) -> None:
        session.run(
            *("uv", "pip", "compile", "--universal", "--python-version=3.12", "--upgrade"),
            *options,
            *(f"--no-emit-package={package}" for package in PACKAGES),
            *("--no-annotate", "--quiet"),
            "--custom-compile-command=nox -s constraints",
            f"--output-file={name}",
            *(f"packages/{package}/pyproject.toml" for package in packages),
        )

    groups = (f"--group={group}" for group in PYPROJECT["dependency-groups"])
    write("constraints.txt", PACKAGES, "--all-extras", *groups)
    for side in SIDES:
        backends = [backend for backend in BACKENDS if backend.startswith(side)]
        wanted = sorted({package for backend in backends for package in BACKENDS[backend]})
        tested = {group for backend in backends for group in GROUPS.get(backend, ["test"])}
        options = [f"--extra={extra}" for extra in re.findall(r"\[(.+?)\]", " ".join(wanted))]
        options += [f"--group={group}" for group in sorted(tested)]
        packages = [package.partition("[")[0] for package in wanted]
        write(f"constraints-lowest-{side}.txt", packages, "--resolution=lowest-direct", *options)


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build wheels and source distributions of all packages into ``dist``."""
    install(session, [], ["nox"], *CONSTRAINED)
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run("uv", "build", "--all-packages", "--out-dir=dist")


@nox.session(python=["3.12", "3.13"], default=False, requires=["build"])
@nox.parametrize("backend", [nox.param(backend, id=backend) for backend in BACKENDS])
def smoke(session: nox.Session, backend: str) -> None:
    """Install a backend's wheels alone, as built, and test them from outside of the repository."""
    names = [package.partition("[")[0].replace("-", "_") for package in BACKENDS[backend]]
    wheels = [str(path) for name in names for path in ROOT.glob(f"dist/{name}-*.whl")]
    assert len(wheels) == len(names), wheels
    session.install(*wheels)
    session.chdir(session.create_tmp())
    command = ("python", "-I", "-m", DOCTORS[backend], "doctor")
    session.run(*command, env={"JAX_PLATFORMS": "cpu"})


def released_version() -> str:
    """That of all packages, which tests hold to be one."""
    project = nox.project.load_toml(ROOT / "packages/ring-core/pyproject.toml")["project"]
    version: str = project["version"]
    return version


@nox.session(venv_backend="none", default=False)
def tag(session: nox.Session) -> None:
    """Check that a tag is of this version, and that the changelog has it, with a date."""
    version, date = released_version(), r"\d{4}-\d{2}-\d{2}"
    if session.posargs != [f"v{version}"]:
        session.error(f"the tag of version {version} is v{version}, not {session.posargs}")
    section = rf"^## {re.escape(version)} - {date}$"
    if not re.search(section, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        session.error(f"CHANGELOG.md has no section of version {version} with a date")


@nox.session(python="3.12", default=False, requires=RELEASE)
def release(session: nox.Session) -> None:
    """Build and check all that is released, and show what its changelog would say."""
    install(session, [], ["changelog"], *CONSTRAINED)
    version = released_version()
    session.run("towncrier", "build", "--draft", f"--version={version}")
    session.log("in dist, version %s; `towncrier build` writes the changelog", version)


if __name__ == "__main__":
    nox.main()
