"""What has the field's name keeps it: ``tests/vocabulary.toml`` says which words are gone."""

from __future__ import annotations

import re
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORDS: list[dict[str, Any]] = tomllib.loads((ROOT / "tests" / "vocabulary.toml").read_text())[
    "words"
]
TEXT = (tokenize.STRING, tokenize.FSTRING_MIDDLE, tokenize.COMMENT)
SCOPES = {"identifier": ("identifier",), "prose": ("prose",), "both": ("identifier", "prose")}


@cache
def words_of(package: str, scope: str) -> frozenset[str]:
    """All words of a package, in names or in text."""
    found: set[str] = set()
    for path in (ROOT / "packages" / f"ring-{package}" / "src").rglob("*.py"):
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.NAME and scope == "identifier":
                    found.add(token.string)
                if token.type in TEXT and scope == "prose":
                    found |= set(re.findall(r"\w+", token.string))
    return frozenset(found)


def in_use(word: str, entry: dict[str, Any]) -> Iterator[str]:
    """The packages of an entry in which a word is."""
    for package in entry["packages"]:
        if any(word in words_of(package, scope) for scope in SCOPES[entry["scope"]]):
            yield package


def name_of(entry: dict[str, Any]) -> str:
    """For the names of tests."""
    return f"{entry['old']}-{entry['new']}-in-{entry['packages'][0]}"


@pytest.mark.parametrize("entry", WORDS, ids=name_of)
def test_old_words_are_gone(entry: dict[str, Any]) -> None:
    assert list(in_use(entry["old"], entry)) == [], f"the word is {entry['new']!r}"


@pytest.mark.parametrize("entry", WORDS, ids=name_of)
def test_new_words_are_in_use(entry: dict[str, Any]) -> None:
    assert list(in_use(entry["new"], entry))


def test_a_word_has_one_place() -> None:
    places = [(entry["old"], package) for entry in WORDS for package in entry["packages"]]
    assert len(places) == len(set(places))
