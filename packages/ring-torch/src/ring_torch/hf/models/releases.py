"""Releases of transformers: those that are tested, and how a name that one of them lacks is told."""

from __future__ import annotations

from importlib.metadata import version

#: Releases whose every class of models ``tests/sweep`` runs: oldest promised, pinned, newest.
TESTED_RELEASES = ("5.14", "5.23", "5.24")


def installed_release() -> str:
    """Return the version of the installed transformers, as ``5.23.0``."""
    return version("transformers")


def lacks(owner: str, name: str) -> str:
    """Return the reason why a model is refused whose code has no such name any more."""
    return (
        f"{owner} of transformers {installed_release()} has no {name}, by which its hook finds what "
        f"to do; tested: {', '.join(TESTED_RELEASES)}"
    )
