"""Ranks that are about to exchange tensors make sure that they mean the same call.

Everybody sends a header of fixed size to the rank ahead, before any tensor: what it is about to do
and, so that a difference can be named, that in readable fields. And a pass that fails on a rank
ends on the others with that rank's words, and closes the group for later calls: what was sent may
still be under way, and would be read as something else.
"""

from __future__ import annotations

import json
import secrets
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from ring_core import RankMismatchError
from ring_core.base.arguments import not_none
from ring_torch.capture import is_capturing
from ring_torch.comm.ranks import (
    PeerError,
    QueuedPass,
    Ranks,
    header_device,
    others,
    peer_errors,
    watch,
)
from ring_torch.comm.store import (
    LONGEST_FIELD,
    CallSignature,
    StoreAgreement,
    clear_failure,
    read_failure,
    report_failure,
    timeout_of,
)

HEADER_BYTES = 2048
_WORD_BYTES = 8
_WORDS = HEADER_BYTES // _WORD_BYTES
_MOST_AGREED = 4096
_UNLIKE_SHARDS = (
    " (ranks hold unlike numbers of tokens: pad every shard to the longest, and give the padding "
    "negative segment_ids, so that it neither sees nor is seen)"
)
_HEAD = struct.Struct("<4sIQ8sQQ")
_MAGIC = b"RING"
_IN_WORDS, _COMPARED = 1, 2  # statuses: with fields to read, or of a call compared before


class Header(NamedTuple):
    """What a rank sends ahead of a pass: 2,048 bytes.

    ======  =====  ============================================================
    bytes   field
    ======  =====  ============================================================
    0-3     magic  ``RING``: tensors that arrive in a header's place have none
    4-7     kind 1: all is here
    8-15    number of the call on the group
    16-23   digest of the signature
    24-31   seed   of dropout, two words of 32 bits
    32-39   nonce  of the group, for the names of its notes in the store
    40-     fields JSON, padded with zeros
    ======  =====  ============================================================

    A GPU sends the header of a call that was compared before without fields: 256 times the same
    eight bytes, which are the digest of signature, number and seed. One kernel writes them.
    """

    kind: int
    number: int
    digest: bytes
    seed: int
    nonce: int
    fields: bytes

    @classmethod
    def of(cls, signature: CallSignature, number: int, seed: int, nonce: int = 0) -> Self:
        """Make the header of a pass, in readable fields."""
        assert len(signature.text) <= HEADER_BYTES - _HEAD.size, "a header holds all fields"
        return cls(_IN_WORDS, number, signature.digest, seed, nonce, signature.text)

    @classmethod
    def read(cls, message: bytes) -> Self | None:
        """Return the header in a message, or None if the message is something else."""
        word, kind, number, digest, seed, nonce = _HEAD.unpack_from(message)
        repeated = message[:_WORD_BYTES]
        if any(repeated) and message == repeated * _WORDS:
            return cls(_COMPARED, 0, repeated, 0, 0, b"")
        if (word, kind) != (_MAGIC, _IN_WORDS):
            return None
        return cls(kind, number, digest, seed, nonce, message[_HEAD.size :].rstrip(b"\0"))

    def bytes(self) -> bytearray:
        """Return the message that is sent."""
        if self.kind == _COMPARED:
            return bytearray(self.digest * _WORDS)
        head = _HEAD.pack(_MAGIC, self.kind, self.number, self.digest, self.seed, self.nonce)
        return bytearray((head + self.fields).ljust(HEADER_BYTES, b"\0"))

    def mismatch(self, theirs: Header | None) -> str:
        """What another rank's header says that this one does not, in words."""
        if theirs is None:
            return (
                "what arrived is no header. It is left over from a call that failed, or something "
                "else sends messages over this process group"
            )
        mine, other = self.as_fields(), theirs.as_fields()
        names = sorted(
            name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name)
        )
        differences = "; ".join(
            f"{name} is {other.get(name)!r} there and {mine.get(name)!r} here" for name in names
        )
        return differences + (_UNLIKE_SHARDS if _differ_in_length(mine, other) else "")

    def as_fields(self) -> dict[str, Any]:
        """All that it says."""
        if self.kind == _COMPARED:
            return {"status": "a call like an earlier one"}
        found: object = None
        with suppress(ValueError):
            found = json.loads(self.fields)
        fields = found if isinstance(found, dict) else {"fields": self.fields[:LONGEST_FIELD]}
        return {**fields, "call": self.number, "dropout_seed": self.seed}


def agree(
    ring: Ranks, number: int, seed: int, signature: CallSignature, device: torch.device
) -> None:
    """Check that the rank behind makes the same call, before any of its data is used.

    Messages of unequal size would crash gloo, and of equal size but other shapes would pass
    unnoticed. On a GPU the host reads the header of the first such call; from then on the stream
    compares digests, and a difference ends it in an error. The first such call also waits for all
    ranks to find the same.

    Args:
        ring: The ranks.
        number: The call's number.
        seed: Of dropout.
        signature: What else must be equal on all ranks.
        device: Where the call's tensors are.

    Raises:
        RankMismatchError: The rank behind is making another call, or another rank has found that
            one does.
        PeerError: A rank did not come within the group's timeout.
    """
    if ring.size == 1:
        return
    state = ring.state
    if device.type != "cpu" and dist.get_backend(ring.group) == "gloo":
        device = torch.device("cpu")  # gloo sends from the host
    has_agreed = signature.digest in state.agreed
    if device.type != "cpu" and has_agreed:
        _check_on_stream(ring, number, seed, signature, device)
        return
    sent, received = _exchange_headers(ring, Header.of(signature, number, seed), device)
    if received != sent:  # ranks that make the same call send the same bytes
        _compare(ring, sent, received, signature, has_agreed=has_agreed)
    if not has_agreed:
        group = ring.group
        assert group is not None and state.nonce is not None
        agreement = StoreAgreement.of(group, state.nonce, number, signature.fields["pass"])
        digest = signature.for_call(number, seed)
        patience = timeout_of(group, device)
        with peer_errors(others(ring)):
            note = agreement.wait_for_all(digest, ring.size, patience)
        if note is not None:
            raise RankMismatchError(note)
        _note_agreed(ring, signature, agreement, digest)
    if device.type != "cpu" and not state.is_watched:
        state.is_watched = True
        assert ring.group is not None
        watch(ring, timeout_of(ring.group, device))


def _compare(
    ring: Ranks, sent: bytes, received: bytes, signature: CallSignature, *, has_agreed: bool
) -> None:
    """Say what differs between this rank's header and that of the rank behind, if they do.

    Raises:
        RankMismatchError: They are of different calls.
    """
    mine, theirs = Header.read(sent), Header.read(received)
    assert mine is not None
    if theirs is not None and _are_same(mine, theirs, signature):
        return
    text = (
        f"ranks {ring.behind(1)} and {ring.rank} of the group make different calls: "
        f"{mine.mismatch(theirs)}. All ranks must make the same calls in the same order "
        f"with equal local shapes, dtypes and options"
    )
    state = ring.state
    assert ring.group is not None and state.nonce is not None
    agreement = StoreAgreement.of(ring.group, state.nonce, mine.number, signature.fields["pass"])
    agreement.report_mismatch(text)
    known = theirs is not None and theirs.digest in state.agreed
    # Who finds no difference waits for all in the first such call, and goes on in a later one.
    if theirs is None or (ring.size > 2 and (known or has_agreed)):
        fail(ring, text)
    raise RankMismatchError(text)


def _exchange_headers(ring: Ranks, header: Header, device: torch.device) -> tuple[bytes, bytes]:
    """Send a header to the rank ahead; return what was sent, and what the rank behind has sent.

    The first headers of a group bring its nonce round: rank 0 draws it and sends, each other rank
    receives it before it sends, and rank 0 receives last. Notes that a group of the same name left
    in the store count for nothing from then on. A send and a receive are started apart there: NCCL
    connects all peers of what is started together before anything moves, so that rank 0, which
    would wait for the last rank to connect, would keep the rank ahead from receiving.
    """
    state = ring.state
    arriving = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=device)
    receives = [(arriving, ring.behind(1))]
    is_first, is_origin = state.nonce is None, ring.rank == 0
    if is_first and is_origin:
        assert ring.group is not None
        clear_failure(ring.group)
        state.nonce = secrets.randbits(64)
    elif is_first:
        ring.start([], receives).wait()
        theirs = Header.read(bytes(arriving.cpu().numpy()))
        state.nonce = 0 if theirs is None else theirs.nonce
    assert state.nonce is not None
    sent = header._replace(nonce=state.nonce).bytes()
    mine = torch.frombuffer(sent, dtype=torch.uint8).to(device)
    ring.start([(mine, ring.ahead(1))], [] if is_first else receives).wait()
    if is_first and is_origin:
        ring.start([], receives).wait()
    return bytes(sent), bytes(arriving.cpu().numpy())


def _check_on_stream(
    ring: Ranks, number: int, seed: int, signature: CallSignature, device: torch.device
) -> None:
    """Exchange headers of a call compared before; a difference ends the stream in an error."""
    digest = signature.as_int64(number, seed)
    mine = torch.full((_WORDS,), digest, dtype=torch.int64, device=device)
    theirs = torch.empty_like(mine)
    ring.start([(mine, ring.ahead(1))], [(theirs, ring.behind(1))]).wait()
    # What is queued behind this runs only if the rank behind means the same call.
    torch._assert_async(mine[0] == theirs[0], "ranks of a ring make different calls")  # noqa: SLF001


def _are_same(mine: Header, theirs: Header, signature: CallSignature) -> bool:
    if theirs.kind == _COMPARED:
        return theirs.digest == signature.for_call(mine.number, mine.seed)
    return theirs[:4] == mine[:4]


def _note_agreed(
    ring: Ranks, signature: CallSignature, agreement: StoreAgreement, digest: bytes
) -> None:
    """Note that all ranks make such calls; what they said before this one, all have read."""
    state = ring.state
    if state.last is not None and ring.rank == 0:
        last, read = state.last
        last.clear(read)
    state.last = agreement, digest
    state.agreed[signature.digest] = None
    while len(state.agreed) > _MOST_AGREED:
        state.agreed.pop(next(iter(state.agreed)))


def has_agreed(ring: Ranks, signature: CallSignature) -> bool:
    """Whether this group has compared such calls in words before."""
    return signature.digest in ring.state.agreed


def check_graph(ring: Ranks, signature: CallSignature, device: torch.device) -> None:
    """Check that a pass that is being captured into a CUDA graph was compared before.

    Raises:
        ValueError: It was not.
    """
    if ring.size == 1 or not is_capturing():
        return
    if header_device(ring, device).type == "cpu" or not has_agreed(ring, signature):
        raise ValueError(
            "a call is captured into a CUDA graph before the ranks have compared it: make it once "
            "outside of a graph, forward and backward, then capture it"
        )


@contextmanager
def with_peer_errors(ring: Ranks, number: int, signature: CallSignature) -> Iterator[None]:
    """Around a pass: its failure on one rank ends it on all, in the words of that rank.

    The rank that fails leaves its words in the store. The others wait for it until the group's
    timeout, and find them there. On all of them the group is then closed for later calls.

    Raises:
        RankMismatchError: Ranks make different calls.
        RuntimeError: A peer failed or did not answer, or a pass of an earlier call failed.
    """
    if ring.size == 1:
        yield
        return
    ring.state.check()
    name = signature.fields["pass"]
    try:
        yield
        if ring.state.is_watched:
            _note_queued(ring, f"call {number} ({name})")
    except RankMismatchError:
        raise
    except PeerError as error:
        note, failure = _read_mismatch(ring, number, name), read_failure(not_none(ring.group))
        own = f"call {number} ({name}): rank {ring.rank} {error}"
        fail(ring, note or failure or own, report=False)
        if note is not None:
            raise RankMismatchError(note) from error
        raise RuntimeError(own if failure is None else f"{failure}; {own}") from error
    except BaseException as error:
        where = f"call {number} ({name}) failed on rank {ring.rank} of the group"
        fail(ring, f"{where}: {type(error).__name__}: {error}")
        raise


def _read_mismatch(ring: Ranks, number: int, name: str) -> str | None:
    """Return the note of a rank that found a difference in a pass, if there is one."""
    nonce = ring.state.nonce
    if nonce is None:  # nobody behind this rank has come as far as that
        return None
    assert ring.group is not None
    return StoreAgreement.of(ring.group, nonce, number, name).read_report()


def _note_queued(ring: Ranks, name: str) -> None:
    """Keep what the host has queued, for the thread that looks whether it ends.

    Nothing while a CUDA graph is captured, which a look at an event from any thread could break.
    """
    state = ring.state
    state.queued = None
    if not is_capturing():
        ended = torch.cuda.current_stream().record_event()
        state.queued = QueuedPass(name, time.monotonic(), ended)


def fail(ring: Ranks, text: str, *, report: bool = True) -> None:
    """Close a group for later calls, and say why to the others."""
    assert ring.group is not None
    ring.state.failure = text
    if report:
        report_failure(ring.group, text)


def _differ_in_length(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Return True if q or k, ``[B, T_local, H, D, dtype]``, differ in their tokens alone."""
    for a, b in ((mine.get(name), theirs.get(name)) for name in "qk"):
        if not (isinstance(a, list) and isinstance(b, list) and len(a) == len(b) == 5):
            continue
        if a[1] != b[1] and (a[0], a[2:]) == (b[0], b[2:]):
            return True
    return False
