"""A rank with a new call meets a peer that repeats another: the group is closed for all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ring_core import RankMismatchError
from ring_torch.comm import handshake
from ring_torch.comm.store import CallSignature

NUMBER, SEED, NONCE = 7, 0, 1


@pytest.mark.parametrize("in_words", [True, False])
def test_the_group_is_closed(in_words: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is closed: ranks that repeat a call do not wait, and would miss a mere report."""
    known, new = (CallSignature.of({"x": n}, "forward") for n in (1, 2))
    state = SimpleNamespace(agreed={known.digest: None}, nonce=NONCE)
    ranks: Any = SimpleNamespace(previous=0, rank=1, size=3, state=state, group=object())
    done: list[str] = []
    agreement = SimpleNamespace(report_mismatch=lambda _: done.append("reported"))
    monkeypatch.setattr(handshake, "_agreement", lambda *_: agreement)
    monkeypatch.setattr(handshake, "fail", lambda *_: done.append("closed"))
    word = known.as_int64(NUMBER, SEED).to_bytes(8, "little", signed=True)
    repeated = word * (handshake.HEADER_BYTES // len(word))
    header = bytes(handshake.Header.of(known, NUMBER, SEED, NONCE).bytes())
    sent = bytes(handshake.Header.of(new, NUMBER, SEED, NONCE).bytes())
    with pytest.raises(RankMismatchError):
        handshake._compare(ranks, sent, header if in_words else repeated, new, has_agreed=False)
    assert done == ["reported", "closed"]
