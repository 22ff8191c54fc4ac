"""Releases of transformers that are tested, and what is told of a name that another one lacks."""

from __future__ import annotations

from importlib.metadata import version

#: Releases whose every class of models ``tests/sweep`` runs: oldest promised, pinned, newest.
TESTED_RELEASES = ("5.14", "5.23", "5.24")


def installed_release() -> str:
    """Return the version of the installed transformers, as ``5.23.0``."""
    return version("transformers")


def lacks(owner: str, name: str) -> str:
    """Return why a model is refused whose code has no such name, or has it no more."""
    return (
        f"{owner} of transformers {installed_release()} has no {name}, which split sequences need "
        f"(tested: {', '.join(TESTED_RELEASES)})"
    )
