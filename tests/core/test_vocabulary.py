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

PAGES = "pages"  # in the place of a package: Markdown, which has prose alone
BENCHMARKS = "benchmarks"  # and programs beside the packages
CODE = re.compile(r"^ *(`{3,}).*?^ *\1 *$|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def pages() -> Iterator[Path]:
    """What is read as prose. The changelog keeps the words of its time."""
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    yield from ROOT.glob("packages/*/README.md")
    yield from (path for path in ROOT.glob("docs/*.md") if path.name != "changelog.md")


def prose_of(page: str) -> str:
    """A page without its code, blocks and words."""
    return CODE.sub(" ", page)


def texts_of(package: str, scope: str) -> Iterator[str]:
    """All names of a package, or all of its text."""
    if package == PAGES:
        yield from (prose_of(path.read_text()) for path in pages() if scope == "prose")
        return
    folder = BENCHMARKS if package == BENCHMARKS else f"packages/ring-{package}/src"
    for path in (ROOT / folder).rglob("*.py"):
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.NAME and scope == "identifier":
                    yield token.string
                if token.type in TEXT and scope == "prose":
                    yield token.string.removeprefix("#")


@cache
def text_of(package: str, scope: str) -> str:
    """All of it in one line, for phrases go from line to line."""
    return " ".join(" ".join(texts_of(package, scope)).split())


@cache
def words_of(package: str, scope: str) -> frozenset[str]:
    """All words of a package, in names or in text."""
    return frozenset(re.findall(r"\w+", text_of(package, scope)))


def is_in(word: str, package: str, scope: str) -> bool:
    """Whether a word, or a phrase, is in use."""
    if re.fullmatch(r"\w+", word):
        return word in words_of(package, scope)
    return bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text_of(package, scope)))


def in_use(word: str, entry: dict[str, Any]) -> Iterator[str]:
    """The packages of an entry in which a word is."""
    for package in entry["packages"]:
        if any(is_in(word, package, scope) for scope in SCOPES[entry["scope"]]):
            yield package


def name_of(entry: dict[str, Any]) -> str:
    """For the names of tests."""
    return f"{entry['old']}-{entry['new']}-in-{entry['packages'][0]}".replace(" ", "_")


@pytest.mark.parametrize("entry", WORDS, ids=name_of)
def test_old_words_are_gone(entry: dict[str, Any]) -> None:
    assert list(in_use(entry["old"], entry)) == [], f"the word is {entry['new']!r}"


@pytest.mark.parametrize("entry", WORDS, ids=name_of)
def test_new_words_are_in_use(entry: dict[str, Any]) -> None:
    assert list(in_use(entry["new"], entry))


def test_a_word_has_one_place() -> None:
    places = [(entry["old"], package) for entry in WORDS for package in entry["packages"]]
    assert len(places) == len(set(places))


def test_pages_are_read_without_their_code() -> None:
    page = "Keys `pull` here.\n\n```python\npull(x)\n```\n\n  ```sh\npull\n  ```\nAnd\nthere.\n"
    assert prose_of(page).split() == ["Keys", "here.", "And", "there."]
    assert {path.name for path in pages()} >= {"README.md", "performance.md"}
    assert "changelog.md" not in {path.name for path in pages()}
