"""An error during the capture of a CUDA graph leaves the group usable, as nothing was sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ring_torch.comm import handshake


@pytest.mark.parametrize("captures", [True, False])
def test_the_group_stays_open(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[object] = []
    monkeypatch.setattr(handshake, "fail", lambda *_: closed.append("closed"))
    monkeypatch.setattr(handshake, "is_capturing", lambda: captures)
    ranks: Any = SimpleNamespace(
        size=2, rank=0, check_open=lambda: None, state=SimpleNamespace(before_passes={})
    )
    signature: Any = SimpleNamespace(fields={"pass": "forward"})
    with (
        pytest.raises(ValueError, match="once more"),
        handshake.GuardedPass(ranks, 1, signature),
    ):
        raise ValueError("make it once more outside of a graph")
    assert bool(closed) is not captures
