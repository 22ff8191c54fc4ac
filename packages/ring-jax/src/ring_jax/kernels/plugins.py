"""Kernels of other packages of this project, found by the entry points ``ring_jax.kernels``.

They are loaded at the first call. Where an installed package cannot be used, programs for its own
platform are refused when they are lowered; those for other platforms are as without it. So nothing
that metadata or an import raise leaves this file, but ``KeyboardInterrupt``.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import (
    Distribution,
    EntryPoint,
    PackageNotFoundError,
    distribution,
    distributions,
)
from importlib.util import find_spec

from ring_jax.kernels.absent import AbsentKernel, described
from ring_jax.kernels.xla import XlaKernel
from ring_jax.records import Kernel

#: The packages whose kernels are taken, with their platform and names, known before they are
#: loaded. There are no others, for the protocol of a kernel is private.
PACKAGES = {"ring-jax-gpu": ("cuda", ("triton", "cudnn")), "ring-jax-tpu": ("tpu", ("pallas",))}
_GROUP = "ring_jax.kernels"


@cache
def installed_kernels() -> tuple[Kernel, ...]:
    """Load the kernels of installed packages, once a process.

    Returns:
        The kernels, for one platform the fastest first; then absent ones, and ``xla`` at the end.
    """
    kernels = [kernel for package in PACKAGES for kernel in _load(package)]
    kernels.sort(key=lambda kernel: isinstance(kernel, AbsentKernel))
    return (*kernels, *_foreign_kernels(), XlaKernel())


def _load(package: str) -> tuple[Kernel, ...]:
    """Load the kernels of a package, or say why they are absent."""
    (platform, names), needed = PACKAGES[package], import_module("ring_jax").__version__
    try:
        entry = _entry_point(package)
        if entry is None or entry.dist is None:
            reason = f"needs {package} {needed}, which is not installed"
            return tuple(AbsentKernel(x, platform, package, reason, is_broken=False) for x in names)
        if entry.dist.version == needed:
            return _loaded(entry, platform, names)
        reason = f"needs {package} {needed}, and {entry.dist.version} is installed"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever metadata or an import raise
        reason = f"{package} does not load, {described(error)}"
    return tuple(AbsentKernel.broken(name, platform, package, reason) for name in names)


def _entry_point(package: str) -> EntryPoint | None:
    """Return the entry point of a package's kernels; ``None`` if it is not installed.

    Raises:
        ImportError: Its metadata register nothing; or it can be imported without metadata, as
            sources on a path.
    """
    try:
        entries = distribution(package).entry_points  # of two on the path the first, as for imports
    except PackageNotFoundError:
        if find_spec(package.replace("-", "_")) is None:
            return None
        raise ImportError("it is on the path without its metadata, which register it") from None
    if not entries:
        raise ImportError("its metadata register no kernels")
    return next(iter(entries.select(group=_GROUP)), None)


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


def _foreign_kernels() -> tuple[AbsentKernel, ...]:
    """Return an absent kernel for each entry point that another project registers."""
    found: dict[str, AbsentKernel] = {}
    # Finders of other projects may fail, and their metadata may be damaged.
    with suppress(Exception):
        for installed in distributions():
            with suppress(Exception):
                found |= _foreign_kernels_of(installed)
    return tuple(found.values())


def _foreign_kernels_of(installed: Distribution) -> dict[str, AbsentKernel]:
    """Return the absent kernels of an installed package by their names, if it is not ours."""
    entries = installed.entry_points.select(group=_GROUP)
    package = installed.metadata["Name"].replace("_", "-").lower() if entries else ""
    reason = "only packages of this project register kernels"
    return {
        (name := f"{entry.name} of {package}"): AbsentKernel(
            name, entry.name, package, reason, is_broken=False
        )
        for entry in entries
        if package not in PACKAGES
    }
