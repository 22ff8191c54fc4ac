"""Pytest options and fixtures: selects tests by backend; one that cannot start is an error."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import distributions
import hypothesis
import numpy.typing as npt
import pytest
from fuzz.__main__ import BACKENDS
from tiers import check_marks, expect_refusals, imports_transformers, runs_nightly

#: Folders that every framework runs.
MATRICES = ("conformance", "docs", "fuzz", "meta")
FOLDERS = {
    "core": {"api", "core", "conformance", "docs", "fuzz", "meta"},
    "torch": {"api", "torch_only", "faults_of_others", *MATRICES},
    "torch-cuda": {"conformance", "torch_cuda_only"}, "torch-triton": {"torch_triton_only"},
    "jax": {"api", "jax_only", "conformance", "docs", "fuzz", "meta"},
    "jax-cuda": {"conformance", "jax_cuda_only"}, "jax-gpu": {"api", "docs", "jax_gpu_only"},
    "jax-tpu": {"api", "docs", "jax_tpu_only"}, "maxtext": {"maxtext"}, "diffusers": {"diffusers"}, "torchtitan": {"torchtitan"},
    "fa4": {"fa4_only"}, "fla": {"fla_only"}, "none": {"packaging"},
}  # fmt: skip
#: Files of those folders that one backend alone runs.
ONLY = {"docs/test_pages.py": "core", "docs/test_performance.py": "torch"}
#: Modules imported by the fork server of the ranks, besides those of `ring_torch.local`. Otherwise
#: each rank would import them itself: torch's compiler alone takes two seconds.
PRELOADED = {
    "torch": (
        "ring_torch.hf", "transformers.trainer", "peft", "torch._inductor.compile_fx",
        "torch.distributed.tensor.experimental", "hypothesis", "hf_rows", "trl_trained",
        "backends.torch_ranks", "backends.before_ranks",
    ),
    "torch-triton": (
        "backends.quick_interpreter", "hypothesis", "backends.torch_ranks", "backends.before_ranks",
    ),
    "torch-cuda": (),
}  # fmt: skip
ON_ONE_GPU = "backends.on_one_gpu"
#: Most workers of xdist whose ranks share a GPU. A worker keeps a pool of ranks of each world size,
#: up to 18 ranks, and each rank a CUDA context of some 0.5 GB. On an H200 all worlds ran with four
#: workers; with seven some of eight ranks found no memory.
MOST_ON_ONE_GPU = 4
HERE = Path(__file__).parent
ROOT = HERE.parent
#: What JAX reads when it is imported.
JAX_VARIABLES = {
    "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_NUMPY_RANK_PROMOTION": "raise",  # many users, and JAX's own tests, set this
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "NPROC": "32",  # threads for callbacks of several devices, on machines of few cores
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # most programs are small, and many are equal
    "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no TPU: the compiler alone is used
}  # fmt: skip

profile = partial(hypothesis.settings.register_profile, deadline=None)
profile("ci", max_examples=300, derandomize=True)
profile("nightly", max_examples=5000)
profile("fewer", max_examples=100, derandomize=True)
profile("mutants", max_examples=100, derandomize=True, phases=[hypothesis.Phase.generate])
hypothesis.settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's command-line options."""
    parser.addoption("--backend", required=True, choices=sorted(FOLDERS), help="what to test")
    parser.addoption("--all", action="store_true", help="run what is marked nightly, too")
    parser.addoption(
        "--transformers", action="store_true", help="run files alone that import transformers"
    )
    parser.addoption(
        "--one-gpu",
        action="store_true",
        help="let ranks share a GPU, where they read each other's memory; NCCL's tests are left out",
    )
    parser.addoption(
        "--mutant", default=None, help="break the backend on purpose: the run must fail"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Bound the workers whose ranks share a GPU, before xdist counts them, whatever ``-n`` says."""
    if config.getoption("--one-gpu"):
        asked = config.getoption("maxprocesses", None) or MOST_ON_ONE_GPU
        config.option.maxprocesses = min(asked, MOST_ON_ONE_GPU)


def pytest_configure(config: pytest.Config) -> None:
    """Set what jax reads at import: host devices, and few of XLA's optimizations.

    For torch, start the fork server of the ranks, which imports all that they need, once.
    """
    # Workers and ranks occupy all cores: more threads of numpy and torch would only wait.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    backend = config.getoption("--backend")
    if config.getoption("--one-gpu") and backend != "torch-cuda":
        raise pytest.UsageError(f"--one-gpu is of the backend torch-cuda, not of {backend}")
    runs_tests = not config.getoption("numprocesses", None)  # with xdist the workers run them
    if backend in ("torch-triton", "jax-gpu", "fa4", "fla"):
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, in ranks too
    if backend == "torch-cuda":  # before ranks' environment is fixed, where they are forked from
        # How long NCCL waits before it ends a process whose peer is lost; 60 s by default.
        os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"
    if backend in PRELOADED and runs_tests and not config.getoption("--collect-only"):
        from ring_torch.local import PRELOADED as OF_EVERY_RANK

        modules = [*OF_EVERY_RANK, "pytest", *PRELOADED[backend]]
        modules += [ON_ONE_GPU] * config.getoption("--one-gpu")
        multiprocessing.set_forkserver_preload(modules)
        with pytest.MonkeyPatch.context() as patch:
            # Python before 3.12.9 does not hand `sys.path` on to the fork server, which silently
            # skips modules that it cannot import.
            patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{HERE}", prepend=os.pathsep)
            forkserver.ensure_running()
        if backend == "torch-triton":
            importlib.import_module("backends.quick_interpreter")
    if backend in ("torch-cuda", "fa4"):
        # Warnings that FlashAttention-4 and the CuTe DSL cause in each other, and torch 2.11 in its
        # own compiler.
        others = r"(cutlass|flash_attn|quack)(\.|$)"
        config.addinivalue_line("filterwarnings", f"ignore::Warning:{others}")
        config.addinivalue_line("filterwarnings", "ignore:.torch.jit:DeprecationWarning")
    if backend.startswith("jax") or backend == "maxtext":
        distributions.show(backend, _folder(config))
    if backend == "jax-cuda":
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"  # callbacks of checked calls need the CPU
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # workers share the GPUs
    elif backend.startswith("jax"):
        gc.set_threshold(100_000, 50)  # tracing makes many objects; collecting takes 3 % of a run
        os.environ |= JAX_VARIABLES
        if backend == "jax":
            # A cache for the processes that this one's tests start: they compile each program once.
            # Workers of xdist have one each: JAX's writes are not atomic.
            os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_folder(config))
            import jax

            # Few programs of this process are equal: looking them up takes longer than it saves.
            jax.config.update("jax_enable_compilation_cache", False)


def _folder(config: pytest.Config) -> Path:
    """Return a new folder, which is deleted when pytest ends."""
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    return Path(folder.name)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore folders of other backends, which may not import here, and files not asked for."""
    backend = config.getoption("--backend")
    parts = collection_path.relative_to(HERE).parts if collection_path.is_relative_to(HERE) else ()
    others = set().union(*FOLDERS.values()) - FOLDERS[backend]
    if {*parts[:1]} & others or ONLY.get("/".join(parts), backend) != backend:
        return True
    is_test = collection_path.match("test_*.py")
    if is_test and config.getoption("--transformers") and not imports_transformers(collection_path):
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect nightly tests, and on GPUs those that need more GPUs than there are."""
    backend = config.getoption("--backend")
    if backend == "torch":
        expect_refusals(items)
    if not any("::" in argument for argument in config.args):  # else a test may lack some ids
        check_marks(items)
    if not config.getoption("--all"):
        _deselect(config, items, lambda item: runs_nightly(item, backend))
    if not backend.endswith("-cuda"):
        return
    if backend == "jax-cuda":
        gpus = importlib.import_module("jax").local_device_count()
    else:
        gpus = importlib.import_module("torch.cuda").device_count()
    if gpus == 0:
        raise pytest.UsageError(f"backend {backend} was asked for, and there is no GPU")
    if config.getoption("--one-gpu"):
        _deselect(config, items, lambda item: item.get_closest_marker("nccl") is not None)
    else:
        _deselect(config, items, lambda item: _ranks(item) > gpus)


def _deselect(
    config: pytest.Config, items: list[pytest.Item], is_left_out: Callable[[pytest.Item], bool]
) -> None:
    """Deselect the items for which ``is_left_out`` returns True."""
    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]


def _ranks(item: pytest.Item) -> int:
    """Return the number of ranks that a test, or its case, needs."""
    if (mark := item.get_closest_marker("ranks")) is not None:
        return int(mark.args[0])
    callspec = getattr(item, "callspec", None)
    case = callspec.params.get("case") if callspec else None
    return getattr(case, "cp_size", 1)


def pytest_report_header(config: pytest.Config) -> str:
    """Name the backend under test, and the mutant if there is one."""
    backend, mutant = config.getoption("--backend"), config.getoption("--mutant")
    return f"backend: {backend}" + (f", broken on purpose: {mutant}" if mutant else "")


@pytest.fixture(scope="module")  # ranks that wait for a call still poll
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield the backend under test: an object with ``run(case, mutant=None)``."""
    name = request.config.getoption("--backend")
    module, _, kind = BACKENDS[name.removesuffix("-cuda")].partition(":")
    options = {"cuda": True} if name == "torch-cuda" else {}
    running = getattr(importlib.import_module(f"backends.{module}"), kind)(**options)
    yield running
    if hasattr(running, "close"):
        running.close()


@pytest.fixture(scope="module")
def pools() -> Iterator[Any]:
    """Yield pools of torch ranks by world size, each started when a test first asks for it."""
    from backends.torch_ranks import Pools

    with closing(Pools()) as started:
        yield started


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield torch ranks, started for a module: as many as its ``RANKS`` says, or two."""
    from ring_torch.local import LocalRanks

    cuda = request.config.getoption("--backend") == "torch-cuda"
    with LocalRanks(getattr(request.module, "RANKS", 2), cuda=cuda) as ranks:
        yield ranks


@pytest.fixture
def run(backend: Any, request: pytest.FixtureRequest) -> Callable[..., dict[str, npt.NDArray[Any]]]:
    """Run a case on the backend under test, with the mutant of the command line, if any."""
    mutant = request.config.getoption("--mutant")
    return lambda case: backend.run(case, mutant=mutant)
