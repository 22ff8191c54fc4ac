"""Kernels of other packages are found if they are installed, and run only on their platform.

Programs are lowered for other platforms, and not compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from importlib import invalidate_caches
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple
from unittest.mock import Mock

import distributions
import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.experimental import checkify
from jax_meshes import context, in_ring
from refused import refused

import ring_jax
from ring_core import KernelConfig, UnsupportedError
from ring_core.tools.doctor import Check
from ring_jax.kernels import plugins
from ring_jax.kernels.absent import broken_kernels, only_on
from ring_jax.kernels.plugins import installed_kernels
from ring_jax.nn import make_dot_product_attention
from ring_jax.tools import doctor

VERSION = ring_jax.__version__
#: A kernel that is the plain one, marked by an operation that nothing else here has.
KERNEL = """
import time
from dataclasses import replace
import jax
from jax import lax
from ring_jax.kernels.xla import XlaKernel

def marked(x):
    return x + 0 * lax.{operation}(x.astype("float32")).astype(x.dtype)

class Marked(XlaKernel):
    capabilities = replace(XlaKernel.capabilities, name="{name}", devices=("{platform}",))

    def attend_into(self, *launch):
        return jax.tree.map(marked, super().attend_into(*launch))

    def grads_into(self, *launch):
        return jax.tree.map(marked, super().grads_into(*launch))

time.sleep(0.05)  # other threads come while it is imported
KERNELS = (Marked(),)
"""
MODULES = {
    "for_cuda": KERNEL.format(operation="cbrt", name="triton", platform="cuda"),
    "for_tpu": KERNEL.format(operation="cos", name="pallas", platform="tpu"),
    "broken": "import no_such_library",
    "wrong": "raise AssertionError('loaded, though of another version or project')",
}
MARKS = {"triton": "stablehlo.cbrt", "pallas": "stablehlo.cosine"}


class Offer(NamedTuple):
    """Distribution that registers kernels."""

    name: str
    platform: str
    module: str
    version: str = VERSION


GPU, TPU = Offer("ring-jax-gpu", "cuda", "for_cuda"), Offer("ring-jax-tpu", "tpu", "for_tpu")
NOT_LOADED = "does not load, ModuleNotFoundError: No module named 'no_such_library'. Programs for"
NO_GPU, NO_TPU = (
    dict.fromkeys(names, f"needs {package} {VERSION}, which is not installed")
    for package, names in (("ring-jax-gpu", ("triton", "cudnn")), ("ring-jax-tpu", ("pallas",)))
)
UNLIKE = f"needs ring-jax-gpu {VERSION}, and 9.0 is installed. Programs for cuda are refused"


class Setup(NamedTuple):
    """Set of installed packages, and what is expected of it."""

    offers: tuple[Offer, ...]
    runs: dict[str, str]  # the kernel of each platform, or why a program for it is refused
    absent: dict[str, str]  # kernels that ``explain`` says are absent, with the reasons


PLAIN = {"cpu": "xla", "cuda": "xla", "tpu": "xla"}
SETUPS = {
    "none": Setup((), PLAIN, NO_GPU | NO_TPU),
    "gpu": Setup((GPU,), PLAIN | {"cuda": "triton"}, NO_TPU),
    "tpu": Setup((TPU,), PLAIN | {"tpu": "pallas"}, NO_GPU),
    "both": Setup((GPU, TPU), PLAIN | {"cuda": "triton", "tpu": "pallas"}, {}),
    "broken-gpu": Setup(
        (GPU._replace(module="broken"), TPU), PLAIN | {"tpu": "pallas", "cuda": NOT_LOADED},
        dict.fromkeys(NO_GPU, f"ring-jax-gpu {NOT_LOADED} cuda"),
    ),
    "of another version": Setup(
        (GPU._replace(module="wrong", version="9.0"),), PLAIN | {"cuda": UNLIKE},
        dict.fromkeys(NO_GPU, UNLIKE) | NO_TPU,
    ),
    "of another project": Setup(
        (Offer("their-rings", "cuda", "wrong"), TPU), PLAIN | {"tpu": "pallas"},
        {"cuda of their-rings": "only packages of this project register kernels", **NO_GPU},
    ),
}  # fmt: skip


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that installs packages instead of the real ones."""

    def forget() -> None:
        for name in (*MODULES, "rubbish"):
            sys.modules.pop(name, None)
        invalidate_caches()
        installed_kernels.cache_clear()

    def installed(*offers: Offer, rubbish: str = "") -> None:
        for name, source in (MODULES | {"rubbish": rubbish}).items():
            (tmp_path / f"{name}.py").write_text(source)
        if rubbish:
            offers = (GPU._replace(module="rubbish"),)
        for offer in offers:
            kernels = {offer.platform: f"{offer.module}:KERNELS"}
            distributions.write(tmp_path, offer.name, offer.version, kernels)
        monkeypatch.syspath_prepend(tmp_path)
        forget()

    forget()
    yield installed
    forget()


@pytest.fixture(params=SETUPS)
def setup(request: pytest.FixtureRequest, install: Callable[..., None]) -> Setup:
    """Install each set of packages in turn."""
    chosen = SETUPS[request.param]
    install(*chosen.offers)
    return chosen


def one_device(q: Any, **options: Any) -> Any:
    return ring_jax.ring_attention(q, q, q, axis_name=None, causal=True, **options)


def gradient(q: Any, **options: Any) -> Any:
    """Return the gradient of a vmapped call in ``shard_map`` over a ring of two."""
    over = in_ring(partial(ring_jax.ring_attention, axis_name="cp", causal=True, **options))
    return jax.grad(lambda q: jax.vmap(over)(q[None], q[None], q[None]).sum())(q)


def on_a_mesh(q: Any, **options: Any) -> Any:
    return context(kind="explicit").attention(q, q, q, causal=True, **options)


ONES = jnp.ones((1, 16, 2, 8))


def lowered(call: Callable[..., Any], **options: Any) -> Callable[[str], str]:
    """Return a function that lowers a traced call for a platform and names its kernel."""
    traced = jax.jit(partial(call, **options)).trace(ONES)

    def kernel_on(platform: str) -> str:
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        (name,) = [name for name, mark in MARKS.items() if mark in text] or ["xla"]
        return name

    return kernel_on


@pytest.mark.nightly(unless=[
    *(f"{name}-one_device" for name in SETUPS),
    "both-gradient", "both-on_a_mesh",
])  # fmt: skip
@pytest.mark.parametrize("call", [one_device, gradient, on_a_mesh])
def test_each_platform_takes_its_kernels(setup: Setup, call: Callable[..., Any]) -> None:
    kernel_on = lowered(call)
    for platform, expected in setup.runs.items():
        if expected in ("xla", *MARKS):
            assert kernel_on(platform) == expected
            continue
        refused(expected, kernel_on, platform, error=UnsupportedError)
        assert lowered(call, kernel="xla")(platform) == "xla"


def test_absent_kernels_are_explained_and_never_replaced(setup: Setup) -> None:
    """Absent kernels are named with the reason, and one that is asked for never falls back.

    Nothing stops a CPU.
    """
    for _ in range(2):
        assert jnp.allclose(one_device(ONES), 1.0)
    assert installed_kernels.cache_info().misses == 1
    cp = context(kind="explicit")
    explained = cp.explain(ONES, ONES, ONES, causal=True).partition("\nstrategy")[0].splitlines()
    absent = dict(
        line.removeprefix("  not ").split(" (", 1) for line in explained if line[:6] == "  not "
    )
    assert absent.keys() == setup.absent.keys()
    for name, reason in setup.absent.items():
        assert absent[name].startswith(f"{'tpu' if name == 'pallas' else 'cuda'}): {reason}")
        for config in (name, KernelConfig(name, block_q=8)):
            with pytest.raises(UnsupportedError, match=f"kernel '{name}': {reason}"):
                one_device(ONES, kernel=config)
    for platform, name in setup.runs.items():
        if name in MARKS:
            assert f"kernel {name} ({platform})" in explained
            assert lowered(one_device, kernel=name)(platform) == name


@pytest.mark.nightly(unless=["both", "broken-gpu", "of another project"])
def test_the_doctor_reports_absent_kernels(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    tested: list[str] = []

    def self_test(kernel: Any, *_: str) -> Iterator[Check]:
        tested.append(kernel.capabilities.name)
        yield Check(kernel.capabilities.name, "", "runs", None, 0.0, passed=False)

    monkeypatch.setattr(doctor, "self_test", self_test)
    for platform, name in setup.runs.items():
        tested.clear()
        monkeypatch.setattr(doctor, "platform", lambda platform=platform: platform)
        diagnosis = doctor.diagnose()
        why = {report.name: report.why for report in diagnosis.kernels if not report.available}
        for absent, reason in setup.absent.items():
            assert why[absent].startswith(reason)
        own = {"triton", "cudnn"} if platform == "cuda" else {"pallas"}
        assert set(tested) == {"xla"} | ({name} if name in ("xla", *MARKS) else own)


def test_sources_without_metadata(
    install: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources without metadata make calls for a GPU raise, instead of using another kernel."""
    install()
    monkeypatch.setattr(plugins, "distribution", Mock(side_effect=PackageNotFoundError))
    (tmp_path / "ring_jax_gpu.py").write_text("raise AssertionError('imported')")
    why = "ring-jax-gpu does not load, ImportError: it is on the path without its metadata"
    refused(f"kernel '(triton|cudnn)': {why}", lowered(one_device), "cuda", error=UnsupportedError)
    assert lowered(one_device)("cpu") == lowered(one_device, kernel="xla")("cuda") == "xla"
    reports = [doctor._report(kernel, "cuda") for kernel in installed_kernels()]
    assert {x.name for x in reports if x.why.startswith(why)} == {"triton", "cudnn"}


RUBBISH = {
    "KERNELS = ('triton',)": "AttributeError",
    "KERNELS = 5": "TypeError",
    "KERNELS = ()": "ValueError: it has []",
    "from for_tpu import KERNELS": "ValueError: it has [('pallas', ('tpu',))]",
    "from for_cuda import KERNELS; KERNELS *= 2": "ValueError: it has [('triton', ('cuda',))",
    "KERNELS = (": "SyntaxError",
    "class Own(BaseException): ...\nraise Own('no Exception')": "Own: no Exception",
}


@pytest.mark.parametrize("source", RUBBISH)
def test_what_is_no_kernel_is_broken(source: str, install: Callable[..., None]) -> None:
    install(rubbish=source)
    kernels = broken_kernels(installed_kernels())
    assert [kernel.name for kernel in kernels] == ["triton", "cudnn"]
    assert f"does not load, {RUBBISH[source]}" in kernels[0].reason
    (check,) = doctor.self_test(kernels[0], "float32")
    assert (check.name, check.passed) == ("triton", False)
    assert RUBBISH[source].partition(":")[0] in check.trace
    assert jnp.allclose(one_device(ONES), 1.0)


UNDECODABLE = b"Name: ring-jax-gpu\nVersion: \xff\n"
ENTRIES = b"[ring_jax.kernels]\n"
NOTHING = ("", "", b"")
#: Faults of a plug-in: what programs, ``explain`` and the doctor say, empty for other projects'
#: metadata; the method of its kernel that raises; or bytes in a file of a distribution's metadata.
DAMAGES: dict[str, tuple[str, str, tuple[str, str, bytes]]] = {
    "metadata": ("UnicodeDecodeError", "", ("ring-jax-gpu", "METADATA", UNDECODABLE)),
    "no line": ("register no kernels", "", ("ring-jax-gpu", "entry_points.txt", b"")),
    "own line": ("TypeError", "", ("ring-jax-gpu", "entry_points.txt", ENTRIES + b"cuda")),
    "line of others": ("", "", ("their-rings", "entry_points.txt", ENTRIES + b"cuda")),
    "bytes of others": ("", "", ("their-rings", "entry_points.txt", ENTRIES + b"a=\xff")),
    "refusals": ("PanicException: refusals", "refusals", NOTHING),
    "forward": ("PanicException: attend_into", "attend_into", NOTHING),
    "backward": ("PanicException: grads_into", "grads_into", NOTHING),
    "notes": ("", "notes", NOTHING),
}


class PanicException(BaseException):
    """Error that is no ``Exception``, like a Rust panic in Python."""


@pytest.mark.parametrize("name", DAMAGES)
def test_a_fault_stops_its_own_platform_alone(
    name: str, install: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason, method, (package, file, content) = DAMAGES[name]

    install(GPU, TPU, Offer("their-rings", "cuda", "wrong"))
    if file:
        (info,) = tmp_path.glob(f"{package.replace('-', '_')}-*.dist-info")
        (info / file).write_bytes(content)
    if method:
        panic = Mock(side_effect=PanicException(method))
        monkeypatch.setattr(type(installed_kernels()[0]), method, panic)
    assert jnp.allclose(one_device(ONES), 1.0)
    for call in (on_a_mesh, one_device) if method == "grads_into" else (one_device,):
        kernel_on = lowered(jax.grad(lambda q, call=call: call(q).sum()) if method else call)
        assert (kernel_on("cpu"), kernel_on("tpu")) == ("xla", "pallas")
    explained = context(1).explain(ONES, ONES, ONES, causal=True)
    if not reason:
        assert kernel_on("cuda") == "triton"
        line = "triton has no notes, PanicException: notes"
        assert (f"\n  {line}\n" in explained) == (method == "notes")
        assert (line in doctor._report(installed_kernels()[0], "cuda").notes) == (method == "notes")
        return
    refused(f"kernel '(triton|cudnn)': .*{reason}", kernel_on, "cuda", error=UnsupportedError)
    with pytest.raises((UnsupportedError, PanicException), match=method or reason):
        jax.grad(lambda q: one_device(q, kernel="triton").sum())(ONES)
    assert any(reason in line for line in explained.splitlines() if "triton" in line)
    reports = [doctor._report(kernel, "cpu") for kernel in installed_kernels()]
    assert any(reason in report.why for report in reports if report.name == "triton")
    assert ("ring-jax-gpu" in doctor.versions()) == (name != "metadata")


@pytest.mark.parametrize("where", ["", "refusals", "attend_into"])
@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit"])
def test_what_ends_a_program_passes(error: str, where: str, install: Callable[..., None]) -> None:
    """KeyboardInterrupt and SystemExit propagate: a signal handler may raise them at any time.

    SystemExit in an import counts as a fault of the plug-in.
    """
    kernel = f"{MODULES['for_cuda']}\ndef stop(*_):\n    raise {error}\nMarked.{where} = stop\n"
    install(rubbish=kernel if where else f"raise {error}")
    is_fault = error == "SystemExit" and not where
    with nullcontext() if is_fault else pytest.raises((KeyboardInterrupt, SystemExit)):
        one_device(ONES)


def test_a_finder_that_fails(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls work if another project's finder fails; no installed kernels are known then."""
    finder = Mock(find_distributions=Mock(side_effect=OSError), find_spec=lambda *_: None)
    install(TPU)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert jnp.allclose(one_device(ONES), 1.0)


def test_a_symbolic_batch_takes_plain_xla(install: Callable[..., None]) -> None:
    install(GPU, TPU)
    (batch,) = export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((batch, 16, 2, 8), jnp.float32)
    for platform in ("cpu", "cuda", "tpu"):
        program = export.export(jax.jit(one_device), platforms=[platform])(x)
        assert not any(mark in program.mlir_module() for mark in MARKS.values())
    with pytest.raises(UnsupportedError, match="kernel 'triton': its blocks depend on the symb"):
        jax.eval_shape(partial(one_device, kernel="triton"), x)


def test_damaged_and_older_metadata(install: Callable[..., None], tmp_path: Path) -> None:
    """The first distribution of a name on the path counts; one without a name is ignored."""
    install(TPU)
    older = tmp_path / "older"
    older.mkdir()
    distributions.write(older, TPU.name, "9.0", {"tpu": "wrong:KERNELS"})
    (older / "ring_jax_tpu-9.0.dist-info").rename(older / "~ing_jax_tpu-9.0.dist-info")
    (older / "damaged-1.0.dist-info").mkdir()
    (older / "damaged-1.0.dist-info" / "entry_points.txt").write_text(
        "[ring_jax.kernels]\ntpu = wrong:KERNELS\n"
    )
    sys.path.append(str(older))  # monkeypatch.syspath_prepend of `install` puts the path back
    names = [kernel.capabilities.name for kernel in installed_kernels()]
    assert names == ["pallas", "triton", "cudnn", "xla"]


def test_threads_at_the_first_call(install: Callable[..., None]) -> None:
    """Nothing is loaded before, by the adapters neither."""
    install(GPU, TPU)
    attend = make_dot_product_attention(context(1).attention)
    assert not {"for_cuda", "for_tpu"} & sys.modules.keys()
    barrier = Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: (barrier.wait(), installed_kernels())[1], range(8)))
    assert [kernel.capabilities.name for kernel in results[0]] == ["triton", "pallas", "xla"]
    # Compiled programs are cached by their kernels, so that threads compile none twice.
    assert len({results[0][:2], *(kernels[:2] for kernels in results)}) == 1
    assert jnp.allclose(attend(ONES, ONES, ONES), 1.0)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_kernel_of_another_platform_is_refused_outside_of_programs(platform: str) -> None:
    with jax.disable_jit(), pytest.raises(UnsupportedError, match=r"^kernel 'named': runs on "):
        only_on(platform, "named", jnp.ones(3))


def test_checkify_sees_programs_with_kernels() -> None:
    """Checkify traces calls: it passes parameters on, besides its own one called ``error``."""
    checked = checkify.checkify(lambda x: only_on("tpu", "pallas", x))
    assert "ring_only_on" in str(jax.make_jaxpr(checked)(jnp.ones(2)))
