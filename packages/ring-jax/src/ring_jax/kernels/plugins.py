"""Kernels of other packages of this project, found by the entry points ``ring_jax.kernels``.

They are loaded at the first call. Where an installed package cannot be used, programs for its own
platform are refused when they are lowered; those for other platforms are as without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import Any, cast

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ring_core import Capabilities, UnsupportedError
from ring_core.base.config import EVERYTHING
from ring_jax.kernels.xla import XlaKernel
from ring_jax.records import Array, Kernel

#: The packages whose kernels are taken, with their platform and names, known before they are
#: loaded. There are no others, for the protocol of a kernel is private.
PACKAGES = {"ring-jax-gpu": ("cuda", ("triton", "cudnn")), "ring-jax-tpu": ("tpu", ("pallas",))}
_DEVICES = {"cuda": "NVIDIA GPUs", "tpu": "TPUs"}


@dataclass(frozen=True)
class AbsentKernel(Kernel):
    """A kernel that is missing, cannot be loaded, or is another project's: it refuses every call.

    Attributes:
        name: Its name, as in ``kernel=``.
        platform: The platform that it is for, as JAX calls it; of another project's kernel the name
            of its entry point.
        package: Name of the package that has it.
        reason: Why it cannot run, and what to do.
        is_broken: The package is installed, or on the path without its metadata; never another
            project's. Then ``auto`` takes no other kernel in its place without a word: programs for
            its platform are refused.
    """

    name: str
    platform: str
    package: str
    reason: str
    is_broken: bool

    @property
    def capabilities(self) -> Capabilities:
        """Every capability on its platform: the reason for refusing is in :meth:`refusals`."""
        return replace(EVERYTHING, name=self.name, devices=(self.platform,))

    def refusals(self, *_: object) -> tuple[str, ...]:
        """Return the reason, whatever the call is."""
        return (self.reason,)

    def attend_into(self, *launch: Any) -> Any:
        """Return the accumulator by a primitive whose lowering raises the reason."""
        message = f"kernel {self.name!r}: {self.reason}"
        return jax.tree.map(partial(only_on_p.bind, platform="", message=message), launch[-1])

    def grads_into(self, *launch: Any) -> Any:
        """Return the accumulator like :meth:`attend_into`."""
        return self.attend_into(*launch)


def broken_kernels(kernels: Iterable[Kernel]) -> tuple[AbsentKernel, ...]:
    """Return the kernels of this project's packages that are installed but cannot be loaded."""
    return tuple(x for x in kernels if isinstance(x, AbsentKernel) and x.is_broken)


#: The identity of an array, for which there is code on one platform alone, or on none: JAX's own
#: errors about a kernel on another platform do not say what to do. No parameter of a primitive is
#: called ``error``, as ``checkify`` passes one of that name.
only_on_p = Primitive("ring_only_on")


def only_on(platform: str, kernel: str, x: Array) -> Array:
    """Return ``x`` by a primitive that lowers on the kernel's platform, and raises on others."""
    message = wrong_platform(platform, kernel)
    return cast("Array", only_on_p.bind(x, platform=platform, message=message))


def wrong_platform(platform: str, kernel: str) -> str:
    """Return the error of a program with a platform's kernel that is lowered for another one."""
    return (
        f"kernel {kernel!r}: runs on {_DEVICES[platform]}, and this program is lowered for another "
        f"platform, or for several. Instead: use kernel='xla' or 'auto', and lower it for each "
        f"platform alone"
    )


def _lower(here: str, _: object, x: Any, *, platform: str, message: str) -> list[Any]:
    """Lower the primitive for a platform, ``here``: to nothing, or raise its error."""
    if platform != here:
        raise UnsupportedError(message)
    return [x]


def _run(x: Array, **params: str) -> Array:
    """Return ``x`` outside of programs, as under ``jax.disable_jit``.

    It is lowered first, which raises the error on a platform that it is not for.
    """
    jax.jit(partial(only_on_p.bind, **params)).lower(x)
    return x


only_on_p.def_impl(_run)
only_on_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(only_on_p, partial(_lower, "other"))
for _platform in _DEVICES:
    mlir.register_lowering(only_on_p, partial(_lower, _platform), platform=_platform)
batching.defvectorized(only_on_p)


@cache
def installed_kernels() -> tuple[Kernel, ...]:
    """Load the kernels of installed packages, once a process.

    Returns:
        The kernels, for one platform the fastest first; then absent ones, and ``xla`` at the end.
    """
    entries: dict[str, EntryPoint] = {}
    for entry in entry_points(group="ring_jax.kernels"):
        # Of two of a name the first on the path is imported. Damaged metadata have no name.
        if name := _package_of(entry):
            entries.setdefault(name, entry)
    kernels = [kernel for package in PACKAGES for kernel in _load(package, entries.get(package))]
    foreign = (
        AbsentKernel(
            f"{entry.name} of {package}", entry.name, package,
            "only packages of this project register kernels", is_broken=False,
        )
        for package, entry in entries.items() if package not in PACKAGES
    )  # fmt: skip
    kernels.sort(key=lambda kernel: isinstance(kernel, AbsentKernel))
    return (*kernels, *foreign, XlaKernel())


def _package_of(entry: EntryPoint) -> str | None:
    """Return the normalized name of the package that registers an entry point, if it has one."""
    with suppress(AttributeError, OSError):  # by version of Python, what missing metadata raise
        name = None if entry.dist is None else entry.dist.metadata.get("Name")
        return name and name.replace("_", "-").lower()
    return None


def _load(package: str, entry: EntryPoint | None) -> tuple[Kernel, ...]:
    """Load the kernels of a package, or say why they are absent."""
    (platform, names), needed = PACKAGES[package], import_module("ring_jax").__version__
    reason, is_broken = f"needs {package} {needed}, which is not installed", entry is not None
    if entry is not None and entry.dist is not None:
        reason = f"needs {package} {needed}, and {entry.dist.version} is installed"
        if entry.dist.version == needed:
            try:
                return _loaded(entry, platform, names)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it raises
                reason = f"{package} {needed} does not load, {type(error).__name__}: {error}"
    elif entry is None and _is_bare(package):
        reason, is_broken = (
            f"{package} is on the path without its metadata, which register it",
            True,
        )
    if is_broken:
        reason += (
            f". Programs for {platform} are refused. Instead: install it anew, uninstall it, or use "
            f"kernel='xla'"
        )
    return tuple(AbsentKernel(name, platform, package, reason, is_broken) for name in names)


def _is_bare(package: str) -> bool:
    """Return True if a package can be imported and is not installed, as sources on a path."""
    try:
        version(package)
    except PackageNotFoundError:
        return find_spec(package.replace("-", "_")) is not None
    return False


def _loaded(entry: EntryPoint, platform: str, names: tuple[str, ...]) -> tuple[Kernel, ...]:
    """Import the kernels of an entry point.

    Raises:
        ValueError: They are others than those that the package is known for, or none.
    """
    kernels = tuple(entry.load())
    loaded = [(kernel.capabilities.name, kernel.capabilities.devices) for kernel in kernels]
    if not loaded or len({*loaded} & {(name, (platform,)) for name in names}) < len(loaded):
        raise ValueError(f"it has {loaded} in place of {names} for {platform}")
    return kernels
