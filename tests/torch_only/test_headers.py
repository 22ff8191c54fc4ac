"""Headers that ranks send before a pass: unlike any other message, and errors name differences."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from ring_core import RankMismatchError
from ring_torch import ring_attention
from ring_torch.comm import handshake
from ring_torch.comm.handshake import _COMPARED, Header, _check_on_stream
from ring_torch.comm.ranks import ranks_of
from ring_torch.comm.store import CallSignature

FIELDS = {"mask": "causal", "q": [1, 8, 2, 8, "float32"], "softmax_scale": 0.25}


def _header(number: int = 3, seed: int = 0, **fields: Any) -> Header:
    return Header.of(CallSignature.of(FIELDS | fields, "forward"), number, seed)


def test_what_is_sent_is_what_arrives() -> None:
    header = _header(7, 2**64 - 1)
    message = header.bytes()
    assert len(message) == 2048
    assert message[:4] == b"RING"
    assert Header.read(bytes(message)) == header


@pytest.mark.parametrize(
    "message", [bytes(2048), bytes(range(256)) * 8, b"RING" + bytes(2044), b"RING\3" + bytes(2043)]
)
def test_tensors_are_no_header(message: bytes) -> None:
    assert Header.read(message) is None
    assert "is no header" in _header().mismatch(None)


@pytest.mark.parametrize("text", [b"[1, 2]", b"3", b"null", b"{", b"\xff", b""])
def test_fields_that_cannot_be_read_are_no_error_of_ours(text: bytes) -> None:
    theirs = _header()._replace(fields=text)
    assert "mask is None there and 'causal' here" in _header().mismatch(theirs)


@pytest.mark.parametrize(
    ("theirs", "word"),
    [
        (_header(4), "call is 4 there and 3 here"),
        (_header(seed=2**63), f"dropout_seed is {2**63} there and 0 here"),
        (_header(mask="full"), "mask is 'full' there and 'causal' here"),
        (_header(mask="m" * 5000), "mask is"),
        (
            _header()._replace(kind=_COMPARED, number=0, fields=b""),
            "status is 'a call like an earlier one' there",
        ),
    ],
)
def test_a_difference_has_a_name(theirs: Header, word: str) -> None:
    assert word in _header().mismatch(Header.read(bytes(theirs.bytes())))


def test_long_fields_leave_room_and_still_differ() -> None:
    header, other_header = (
        Header.of(
            CallSignature.of({f"field {n}": "x" * 4000 + end for n in range(12)}, "forward"), 3, 0
        )
        for end in ("a", "b")
    )
    assert len(header.bytes()) == len(other_header.bytes()) == 2048
    assert json.loads(header.fields).keys() == json.loads(other_header.fields).keys()
    assert header.mismatch(other_header).count("there and") == 12


@pytest.mark.parametrize("what", ["nothing", "number", "seed", "fields"])
@on_ranks
def test_calls_compared_before_are_compared_by_digest(rank: int, what: str) -> None:
    signature = CallSignature.of(FIELDS, "forward")
    number, seed = 3 + rank * (what == "number"), 5 + rank * (what == "seed")
    if what == "fields" and rank:
        signature = CallSignature.of(FIELDS | {"mask": "full"}, "forward")
    group: Any = dist.new_group()
    with nullcontext() if what == "nothing" else pytest.raises(RuntimeError):
        _check_on_stream(ranks_of(group), number, seed, signature, torch.device("cpu"))


@on_ranks
def test_a_launch_compares_each_call_with_its_own_digest() -> None:
    group: Any = dist.new_group()
    ranks, signature, seen = ranks_of(group), CallSignature.of(FIELDS, "forward"), []
    ranks.state.digest_checks[torch.device("cpu")] = lambda words, digest: seen.append(
        (len(words), words.unique().tolist(), digest)
    )
    for number in (3, 4):
        _check_on_stream(ranks, number, 5, signature, torch.device("cpu"))
    digests = [signature.for_call(number, 5) for number in (3, 4)]
    assert seen == [(256, [digest], digest) for digest in digests]


@pytest.mark.parametrize("strategy", ["ring", "gather", "ulysses"])
@on_ranks
def test_unlike_shards_are_told_how_to_be_padded(rank: int, strategy: str) -> None:
    q, k = torch.ones(1, 5 + rank, 2, 8), torch.ones(1, 6 + 2 * rank, 2, 8)
    with pytest.raises(RuntimeError, match="make different calls") as error:
        ring_attention(q, k, k, strategy=strategy)
    assert "pad every shard to the longest" in str(error.value)
    assert "negative segment_ids" in str(error.value)


@pytest.mark.parametrize("shape", [[2, 8, 2, 8, "float32"], [1, 8, 4, 8, "float32"]])
def test_other_differences_are_not_padded(shape: list[Any]) -> None:
    assert "segment_ids" not in _header().mismatch(_header(q=shape))
    assert "segment_ids" in _header().mismatch(_header(q=[1, 9, 2, 8, "float32"]))


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
    word = known.for_call(NUMBER, SEED).to_bytes(8, "little", signed=True)
    repeated = word * (handshake.HEADER_BYTES // len(word))
    header = bytes(handshake.Header.of(known, NUMBER, SEED, NONCE).bytes())
    sent = bytes(handshake.Header.of(new, NUMBER, SEED, NONCE).bytes())
    with pytest.raises(RankMismatchError):
        handshake._compare(ranks, sent, header if in_words else repeated, new, has_agreed=False)
    assert done == ["reported", "closed"]
