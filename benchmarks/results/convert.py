"""Stored figures under the names of layouts, strategies and transports: run once, from the root."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

MOVES = {"pull": "gather/symm_mem", "p2p": "ring/p2p", "gather": "gather/p2p"}
LAYOUTS = {"plain": "contiguous", "dealt": "chunks"}


def named(text: str) -> str:
    """``zigzag/fa4/pull`` is ``zigzag/fa4/gather/symm_mem``, ``fa4/p2p`` is ``fa4/ring/p2p``."""
    found = re.fullmatch(r"((?:[a-z]+/)?[a-z0-9]+)/(pull|p2p|gather)((?:/(?:alone|graph))*)", text)
    if found is None:
        return text
    layout, _, kernel = found[1].rpartition("/")
    return "/".join(filter(None, (LAYOUTS.get(layout, layout), kernel, MOVES[found[2]]))) + found[3]


def converted(x: Any) -> Any:
    """All of a report."""
    if isinstance(x, dict):
        if x.get("transport") in ("ppermute", "gather"):
            names = {"transport": "strategy"}
            x = {names.get(key, key): "ring" if y == "ppermute" else y for key, y in x.items()}
        return {named(key): converted(value) for key, value in x.items()}
    if isinstance(x, list):
        return [converted(one) for one in x]
    return named(x) if isinstance(x, str) else x


for path in Path(__file__).parent.glob("*.json"):
    text = path.read_text()
    after = converted(json.loads(text))
    if after != json.loads(text):
        second = text.splitlines()[1]
        indent = len(second) - len(second.lstrip(" "))
        path.write_text(json.dumps(after, indent=indent) + "\n" * text.endswith("\n"))
