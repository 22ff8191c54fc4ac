"""Makes ranks that ask for a GPU each share the first one; the fork server imports it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from benchmarks.torch.one_gpu import share
from ring_torch import local

_join = local._join


def _joined(rank: int, *rest: Any, cuda: bool) -> None:
    _join(rank, *rest, cuda=False)
    if cuda:
        share(rank)


patch.object(local, "_join", _joined).start()  # kept until the process ends
