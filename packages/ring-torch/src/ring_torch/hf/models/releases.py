"""Tested releases of transformers, and messages about releases and models that are not tested."""

from __future__ import annotations

import re
import warnings
from importlib.metadata import version

from torch import nn

#: Releases of which ``tests/sweep`` runs every model class: oldest promised, pinned, newest.
TESTED_RELEASES = ("5.14", "5.23", "5.24")


def installed_release() -> str:
    """Return the version of the installed transformers, as ``5.23.0``."""
    return version("transformers")


def lacks(owner: str, name: str) -> str:
    """Return the reason why a model is refused whose code lacks a name that its hooks need."""
    return (
        f"{owner} of transformers {installed_release()} has no {name}, which split sequences need "
        f"(tested: {', '.join(TESTED_RELEASES)})"
    )


def warn_of_untested(model: nn.Module) -> None:
    """Warn of a model that no test has run: from another package, or from a newer transformers.

    The warning points at the caller of the function that calls this one.
    """
    cls = next(x for x in type(model).__mro__ if not x.__module__.startswith("torch."))
    reason = ""
    if not cls.__module__.startswith("transformers."):
        reason = f"its code is of {cls.__module__}, not of transformers"
    elif _minor(installed_release()) > _minor(TESTED_RELEASES[-1]):
        reason = f"transformers is {installed_release()}, and tests run up to {TESTED_RELEASES[-1]}"
    if reason:
        warnings.warn(
            f"no test has run {cls.__name__} on a ring ({reason}): call ring_torch.hf.verify(model, "
            f"cp, batch) once with a short batch, or verify(batch) of the handle",
            stacklevel=3,
        )


def _minor(release: str) -> tuple[int, ...]:
    """Return a version's major and minor number."""
    return tuple(int(x) for x in re.findall(r"\d+", release)[:2])
