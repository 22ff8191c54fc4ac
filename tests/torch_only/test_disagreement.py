"""Ranks that make different calls get an error on every rank, in both passes, that says how.

The rank ahead of the one that differs finds it at once. Others learn of it at once in the first
such call, later when the message they wait for does not come within the group's timeout.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import RANDOM
from on_ranks import on_ranks, on_two_ranks
from patched import replaced
from refused import refused
from torch import Tensor

from ring_core import ChunkLayout, Mask, RankMismatchError
from ring_torch import ring_attention
from ring_torch.comm import handshake, store
from ring_torch.comm.handshake import _COMPARED, Header, _check_on_stream
from ring_torch.comm.ranks import ranks_of
from ring_torch.comm.store import CallSignature
from ring_torch.kernels.measured import RATES_VARIABLE
from ring_torch.local import LocalRanks

TIMEOUT = 2.0
ODD = 1  # the rank that differs


#: Options of the other ranks and of the odd one, and the name in the error.
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "length": ({}, {"shape": (1, 16, 2, 8)}, "q"),
    "head dim": ({}, {"shape": (1, 8, 2, 16)}, "q"),
    "dtype": ({}, {"dtype": torch.float64}, "q"),
    "shapes of equal size": ({}, {"shape": (1, 4, 4, 8)}, "q"),
    "a larger message": ({}, {"shape": (1, 64, 2, 8)}, "q"),
    "layout": ({"causal": True}, {"causal": True, "layout": "zigzag"}, "layout"),
    "chunks of a layout": ({"layout": RANDOM[3]}, {"layout": ChunkLayout(RANDOM[3].chunks[::-1])}, "chunks"),
    "causal": ({}, {"causal": True}, "mask"),
    "window": ({"window": (3, 0)}, {"window": (4, 0)}, "mask"),
    "chunks": ({"chunk_size": 4}, {"chunk_size": 5}, "mask"),
    "documents": ({"cu_seqlens": (0, 5, 24)}, {"cu_seqlens": (0, 6, 24)}, "cu_seqlens"),
    "many documents": ({"cu_seqlens": (0, *range(1, 13), 24)}, {"cu_seqlens": (0, *range(1, 12), 13, 24)}, "cu_seqlens"),
    "a mask's documents": ({"mask": Mask(cu_seqlens=(0, 5, 24))}, {"mask": Mask(cu_seqlens=(0, 6, 24))}, "cu_seqlens"),
    "tokens before padding": ({"seq_len": 22}, {"seq_len": 23}, "seq_len"),
    "predicate": ({"odd": 2}, {"odd": 3}, "plan"),
    "scale": ({}, {"softmax_scale": 0.3}, "softmax_scale"),
    "cap": ({}, {"softcap": 3.0}, "softcap"),
    "sinks": ({}, {"sinks": torch.zeros(2)}, "sinks"),
    "bias": ({}, {"bias": torch.zeros(1, 1, 8, 24)}, "bias"),
    "slopes": ({}, {"alibi_slopes": torch.zeros(2)}, "alibi_slopes"),
    "segments": ({}, {"segment_ids": torch.zeros(1, 8, dtype=torch.int32)}, "segment_ids"),
    "probability": ({"dropout_p": 0.1, "dropout_seed": 1}, {"dropout_p": 0.2, "dropout_seed": 1}, "dropout_p"),
    "seed": ({"dropout_p": 0.1, "dropout_seed": 1}, {"dropout_p": 0.1, "dropout_seed": 2}, "dropout_seed"),
    "deterministic": ({}, {"deterministic": True}, "deterministic"),
    "lse": ({}, {"return_lse": True}, "return_lse"),
    "kernel": ({"kernel": "sdpa"}, {"kernel": "eager"}, "kernel"),
    "strategy": ({"strategy": "ring"}, {"strategy": "gather"}, "strategy"),
    "gradient": ({}, {"grad": False}, "needs_grad"),
    "rates": ({}, {"rates": True}, "rates"),
}  # fmt: skip


def attend(options: dict[str, Any]) -> Tensor:
    options = dict(options)
    with a_table_of_its_own() if options.pop("rates", False) else nullcontext():
        x = torch.ones(options.pop("shape", (1, 8, 2, 8)), dtype=options.pop("dtype", None))
        if (n := options.pop("odd", None)) is not None:
            options["mask"] = Mask(predicate=lambda i, j: (i - j) % n == 0)
        x.requires_grad_(options.pop("grad", True))
        out: Any = ring_attention(x, x, x, **options)
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first


@contextmanager
def a_table_of_its_own() -> Iterator[None]:
    """Let calls inside choose kernels by a measured order."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as variables, replaced():
        path = Path(folder) / "rates.json"
        path.write_text('{"device": "cpu", "rows": []}')
        variables.setenv(RATES_VARIABLE, str(path))
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalRanks]:
    """Start three ranks, which stay usable after a disagreement that all of them learn of."""
    with LocalRanks(3, timeout=TIMEOUT) as pool:
        yield pool


@pytest.mark.parametrize("name", DIFFERENCES)
@on_ranks
def test_a_difference_is_an_error_on_all(rank: int, name: str) -> None:
    """The error is also raised on a rank that receives nothing from the one that differs."""
    others, odd, word = DIFFERENCES[name]
    refused(rf"\b{word} is ", attend, odd if rank == ODD else others, error=RankMismatchError)


@pytest.mark.parametrize(("what", "word"), [("another call", "call"), ("no backward", "pass")])
@on_ranks
def test_a_difference_in_backward_is_an_error_on_all(rank: int, what: str, word: str) -> None:
    first, second = attend({}), attend({})
    call: Callable[[], Any] = (second if rank == ODD else first).sum().backward
    if what == "no backward" and rank == ODD:
        call = partial(attend, {})
    refused(rf"\b{word} is ", call, error=RankMismatchError)


def _differ_after_agreeing(rank: int) -> None:
    for _ in range(2):
        attend({}).sum().backward()
    options, message = {"causal": True} if rank == ODD else {}, "mask is '(full|causal)' there"
    refused(message, attend, options, error=RankMismatchError)


def _one_call_less(rank: int) -> None:
    attend({}).sum().backward()
    message = rf"(?s)(?=.*call 2 \(forward\)).*rank {rank} waited in vain for ranks"
    if rank != ODD:
        refused(message, attend, {}, error=RuntimeError)


@pytest.mark.parametrize(("ranks", "calls"), [(4, _differ_after_agreeing), (3, _one_call_less)])
def test_a_difference_after_equal_calls_is_an_error_on_all(ranks: int, calls: Any) -> None:
    """Ranks that learn of it late raise it within the timeout; one of four is no neighbour."""
    with LocalRanks(ranks, timeout=TIMEOUT) as pool:
        pool.run(calls)


@on_ranks
def test_a_store_that_does_not_answer_keeps_nobody_waiting() -> None:
    """Its link is down."""
    never = threading.Event()
    silent = SimpleNamespace(check=lambda _: not never.wait(), set=lambda *_: never.wait())
    with patch.object(store, "_PATIENCE", timedelta(seconds=0.1)):
        agreement = store.StoreAgreement(silent, 0, 1, "forward")
        agreement.report_mismatch("words")
        assert agreement.read_report() is None
        assert not never.is_set()
    never.set()


FIELDS = {"mask": "causal", "q": [1, 8, 2, 8, "float32"], "softmax_scale": 0.25}


def _header(number: int = 3, seed: int = 0, **fields: Any) -> Header:
    return Header.of(CallSignature.of(FIELDS | fields, "forward"), number, seed)


@pytest.mark.parametrize(
    "message", [bytes(2048), bytes(range(256)) * 8, b"RING" + bytes(2044), b"RING\3" + bytes(2043)]
)
def test_tensors_are_no_header(message: bytes) -> None:
    sent = _header(7, 2**64 - 1).bytes()
    assert Header.read(bytes(sent)) == _header(7, 2**64 - 1) and len(sent) == 2048
    assert Header.read(message) is None
    assert "is no header" in _header().mismatch(None)


@pytest.mark.parametrize(
    ("theirs", "word"),
    [
        (_header(4), "call is 4 there and 3 here"),
        (_header(seed=2**63), f"dropout_seed is {2**63} there and 0 here"),
        (_header(mask="full"), "mask is 'full' there and 'causal' here"),
        (_header(mask="m" * 5000), "mask is"),
        (_header()._replace(kind=_COMPARED, number=0, fields=b""), "status is 'a call like an earlier one' there"),
        # Fields that cannot be read are no error of ours.
        *((_header()._replace(fields=x), "mask is None there and 'causal' here")
          for x in (b"[1, 2]", b"3", b"null", b"{", b"\xff", b"")),
    ],
)  # fmt: skip
def test_a_difference_has_a_name(theirs: Header, word: str) -> None:
    assert word in _header().mismatch(Header.read(bytes(theirs.bytes())))


def test_long_fields_leave_room_and_still_differ() -> None:
    long: dict[str, Any] = {f"field {n}": "x" * 4000 for n in range(12)}
    header, other = (_header(**{name: x + end for name, x in long.items()}) for end in "ab")
    assert len(header.bytes()) == len(other.bytes()) == 2048
    assert json.loads(header.fields).keys() == json.loads(other.fields).keys()
    assert header.mismatch(other).count("there and") == 12


@pytest.mark.parametrize("what", ["nothing", "number", "seed", "fields"])
@on_two_ranks
def test_calls_compared_before_are_compared_by_digest(rank: int, what: str) -> None:
    """On a stream a launch compares each of them with its own digest."""
    mask = "full" if what == "fields" and rank else "causal"
    signature, seen = CallSignature.of(FIELDS | {"mask": mask}, "forward"), list[Any]()
    number, seed = 3 + rank * (what == "number"), 5 + rank * (what == "seed")
    group: Any = dist.new_group()
    ranks, cpu = ranks_of(group), torch.device("cpu")
    with nullcontext() if what == "nothing" else pytest.raises(RuntimeError):
        _check_on_stream(ranks, number, seed, signature, cpu)
    ranks.state.digest_checks[cpu] = lambda words, digest: seen.append((words.tolist(), digest))
    if what == "nothing":
        for number in (4, 5):
            _check_on_stream(ranks, number, seed, signature, cpu)
            digest = signature.for_call(number, seed)
            assert seen[-1] == ([digest] * 256, digest)


@pytest.mark.parametrize("strategy", ["ring", "gather", "ulysses"])
@on_two_ranks
def test_unlike_shards_are_told_how_to_be_padded(rank: int, strategy: str) -> None:
    q, k = torch.ones(1, 5 + rank, 2, 8), torch.ones(1, 6 + 2 * rank, 2, 8)
    message = "(?s)make different calls.*pad every shard to the longest.*negative segment_ids"
    call = partial(ring_attention, strategy=strategy)
    refused(message, call, q, k, k, error=RuntimeError)


def test_other_differences_are_not_padded() -> None:
    for shape, is_told in (([2, 8, 2, 8], False), ([1, 8, 4, 8], False), ([1, 9, 2, 8], True)):
        said = _header().mismatch(_header(q=[*shape, "float32"]))
        assert ("segment_ids" in said) == is_told


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
