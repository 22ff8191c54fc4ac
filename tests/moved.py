"""Tell where each test went: ``moved.tsv`` maps old to new, and collections show what is lost.

Lists of both are what ``pytest tests --backend=B --all --collect-only -q`` prints, there and here::

    python tests/moved.py OLD NEW

A row is a file, a test, or a pattern of ids, and its new name; or behind it a tab and why there is
none. A pattern's new name is a pattern, too: tests that cover what it did. Rows of tests go before
those of their file, and a file of today may be an old one of another row.
"""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from pathlib import Path

ROWS = [
    line.split("\t")
    for line in Path(__file__).with_suffix(".tsv").read_text().splitlines()
    if not line.startswith("#")
]
EXACT = {old: new for old, new, *_ in ROWS if not set(old) & set("*?")}
PATTERNS = [(old, new) for old, new, *_ in ROWS if set(old) & set("*?")]


def new_names(old: str) -> list[str]:
    """Return the new name of a test, or patterns of those that cover it; none if none is needed."""
    covering = [
        f"tests/{new}" * bool(new) for row, new in PATTERNS if fnmatchcase(old, f"tests/{row}")
    ]
    if covering := [x for x in covering if x != old]:  # a pattern of today may be its own new name
        return [*filter(None, covering)]
    path, _, test = old.removeprefix("tests/").partition("::")
    name, bracket, parameters = test.partition("[")
    if (new := EXACT.get(f"{path}::{name}")) is not None:
        return [f"tests/{new}{bracket}{parameters}"] if new else []
    return [f"tests/{EXACT.get(path, path)}::{test}"]


def lost(test: str, now: set[str], moves: int = 6) -> list[str]:
    """Return the names under which a test is looked for in vain; files were folded three times."""
    if test in now or any(fnmatchcase(x, test) for x in now):
        return []
    names = new_names(test) if moves else [test]
    return [x for name in names for x in ([name] if name == test else lost(name, now, moves - 1))]


def main(old: str, new: str) -> int:
    """Print old tests without a new one; return their number."""
    before, now = (
        [line for line in Path(x).read_text().splitlines() if line.startswith("tests/") and "::" in line]
        for x in (old, new)
    )  # fmt: skip
    missing = [(test, name) for test in before for name in lost(test, {*now})]
    print("".join(f"{test}\t{name}\n" for test, name in missing), end="")
    print(f"{len(before)} tests before, {len(now)} now, {len(missing)} lost")
    return min(len(missing), 100)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
