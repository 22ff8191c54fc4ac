"""Tiles of a predicate mask: their side, and what they show."""

from __future__ import annotations

TILE = 128
EMPTY, PARTIAL, FULL = 0, 1, 2
