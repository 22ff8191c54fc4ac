"""Handshake before each pass: ranks make sure that they are about to run the same call.

Before any tensor, each rank sends the next rank a header of fixed size: a digest of its call and,
so that a difference can be named, readable fields. If a pass fails on a rank, it ends on the others
with that rank's error message, and the group is closed for later calls: messages of the failed pass
may still be in flight, and would be received as something else.
"""

from __future__ import annotations

import json
import secrets
import struct
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from ring_core import RankMismatchError
from ring_core.base.arguments import not_none
from ring_torch.capture import is_capturing, on_device
from ring_torch.comm.ranks import PeerError, Ranks, peer_errors
from ring_torch.comm.state import note_queued
from ring_torch.comm.store import (
    LONGEST_FIELD,
    CallSignature,
    StoreAgreement,
    clear_failure,
    differences,
    read_failure,
    report_failure,
    timeout_of,
)
from ring_torch.optional import has_triton

HEADER_BYTES = 2048
_WORD_BYTES = 8
_WORDS = HEADER_BYTES // _WORD_BYTES
_MOST_AGREED = 4096  # signatures that a group remembers as compared
_HEAD = struct.Struct("<4sIQ8sQQ")
_MAGIC = b"RING"
# Kinds of headers: with readable fields, or the repeated digest of a call compared before.
_IN_WORDS, _COMPARED = 1, 2


class Header(NamedTuple):
    """Message of 2,048 bytes that a rank sends to the next one before a pass.

    ======  ==================================================================
    bytes   field
    ======  ==================================================================
    0-3     magic ``RING``: tensors that arrive in a header's place have none
    4-7     kind, 1: all fields follow
    8-15    number of the call on the group
    16-23   digest of the signature
    24-31   seed of dropout, or what the field ``seed_is`` calls it
    32-39   nonce of the group, part of the keys of its notes in the store
    40-     fields of the signature, JSON, padded with zeros
    ======  ==================================================================

    A GPU sends the header of a call that was compared before in another form: 256 times the same
    eight bytes, the digest of signature, number and seed. One kernel writes them.
    """

    kind: int
    number: int
    digest: bytes
    seed: int
    nonce: int
    fields: bytes

    @classmethod
    def of(cls, signature: CallSignature, number: int, seed: int, nonce: int = 0) -> Self:
        """Make the header of a pass, with readable fields."""
        assert len(signature.text) <= HEADER_BYTES - _HEAD.size, "a header holds all fields"
        return cls(_IN_WORDS, number, signature.digest, seed, nonce, signature.text)

    @classmethod
    def read(cls, message: bytes) -> Self | None:
        """Return the header in a message, or ``None`` if the message is no header."""
        word, kind, number, digest, seed, nonce = _HEAD.unpack_from(message)
        repeated = message[:_WORD_BYTES]
        if any(repeated) and message == repeated * _WORDS:
            return cls(_COMPARED, 0, repeated, 0, 0, b"")
        if (word, kind) != (_MAGIC, _IN_WORDS):
            return None
        return cls(kind, number, digest, seed, nonce, message[_HEAD.size :].rstrip(b"\0"))

    def bytes(self) -> bytearray:
        """Return the message as it is sent, ``HEADER_BYTES`` long."""
        if self.kind == _COMPARED:
            return bytearray(self.digest * _WORDS)
        head = _HEAD.pack(_MAGIC, self.kind, self.number, self.digest, self.seed, self.nonce)
        return bytearray((head + self.fields).ljust(HEADER_BYTES, b"\0"))

    def mismatch(self, peer_header: Header | None) -> str:
        """Describe how another rank's header differs from this one, field by field."""
        if peer_header is None:
            return (
                "what arrived is no header. It is left over from a call that failed, or something "
                "else sends messages over this process group"
            )
        return differences(self.as_fields(), peer_header.as_fields())

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of the header by name, call number and seed included."""
        if self.kind == _COMPARED:
            return {"status": "a call like an earlier one"}
        decoded: object = None
        with suppress(ValueError):
            decoded = json.loads(self.fields)
        fields = decoded if isinstance(decoded, dict) else {"fields": self.fields[:LONGEST_FIELD]}
        seed_is = str(fields.pop("seed_is", "dropout_seed"))
        return {**fields, "call": self.number, seed_is: self.seed}


def agree(
    ranks: Ranks, number: int, seed: int, signature: CallSignature, device: torch.device
) -> None:
    """Check that the previous rank is making the same call, before any of its data is used.

    Without it, messages of unequal size would crash gloo, and messages of equal size but other
    shapes would go unnoticed. On a GPU the host reads the header of the first call with this
    signature; from then on the stream compares digests, and a difference ends it in an error. The
    first such call also waits until all ranks have found their calls to be the same.

    Args:
        ranks: The ranks that hold one sequence.
        number: The call's number on the group.
        seed: The call's dropout seed, or 0.
        signature: All else that must be equal on all ranks.
        device: The device of the call's tensors.

    Raises:
        RankMismatchError: The previous rank is making another call, or some rank has reported that
            its previous one is.
        PeerError: A rank did not come within the group's timeout.
    """
    if ranks.size == 1 or ranks.members is not None:  # of a part, the whole group has agreed
        return
    state = ranks.state
    if device.type != "cpu" and ranks.is_gloo:
        device = torch.device("cpu")  # gloo sends from the host
    has_agreed = signature.digest in state.agreed
    if device.type != "cpu" and has_agreed:
        _check_on_stream(ranks, number, seed, signature, device)
        return
    # Headers go one rank ahead, all at the same time. No tensor of the pass is in flight yet.
    sent, received = _exchange_headers(ranks, Header.of(signature, number, seed), device)
    if received != sent:  # ranks that make the same call send the same bytes
        _compare(ranks, sent, received, signature, has_agreed=has_agreed)
    if not has_agreed:
        agreement = _agreement(ranks, number, signature)
        digest = signature.for_call(number, seed).to_bytes(_WORD_BYTES, "little", signed=True)
        patience = timeout_of(not_none(ranks.group), device)
        # Equal to the previous rank's call is not yet equal to all: wait at the store until every
        # rank has counted itself, or one has reported a difference. Peers do the same meanwhile.
        with peer_errors(ranks.peers):
            note = agreement.wait_for_all(digest, ranks.size, patience)
        if note is not None:
            raise RankMismatchError(note)
        _note_agreed(ranks, signature, agreement, digest)
    if device.type != "cpu" and not state.is_watched:
        state.is_watched = True
        ranks.watch(timeout_of(not_none(ranks.group), device))
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if is_nvidia and device not in state.digest_checks and has_triton():
        from ring_torch.comm.digest_kernel import loaded_check

        # Now, as a CUDA graph may hold the next such call.
        state.digest_checks[device] = loaded_check(_WORDS, device)


def agree_in_part(part: Ranks, number: int, signature: CallSignature, device: torch.device) -> None:
    """Check that some ranks of a group make the same pass, while the others make none.

    Each sends its header to every other one. A difference closes the group, as ranks outside of
    this part would not hear of it.

    Raises:
        RankMismatchError: They make different passes.
        PeerError: A rank did not come within the group's timeout.
    """
    if part.is_gloo:
        device = torch.device("cpu")
    own_header = Header.of(signature, number, 0, not_none(part.state.nonce))
    message = torch.frombuffer(own_header.bytes(), dtype=torch.uint8).to(device)
    received = [(torch.empty_like(message), peer) for peer in part.peers]
    part.start([(message, peer) for peer in part.peers], received).wait()
    for arrived, peer in received:
        peer_header = Header.read(bytes(arrived.cpu().numpy()))
        if peer_header != own_header:
            text = (
                f"ranks {not_none(part.members)[peer]} and {not_none(part.members)[part.rank]} of "
                f"the group make different calls: {own_header.mismatch(peer_header)}"
            )
            fail(part, text)
            raise RankMismatchError(text)


def _compare(
    ranks: Ranks, sent: bytes, received: bytes, signature: CallSignature, *, has_agreed: bool
) -> None:
    """Check that this rank's header and the previous rank's are of the same call.

    A difference is reported through the store to ranks that wait there.

    Raises:
        RankMismatchError: They are of different calls; it names the fields that differ.
    """
    own_header, peer_header = not_none(Header.read(sent)), Header.read(received)
    if peer_header is not None and _are_same(own_header, peer_header, signature):
        return
    message = (
        f"ranks {ranks.previous} and {ranks.rank} of the group make different calls: "
        f"{own_header.mismatch(peer_header)}. All ranks must make the same calls in the same order "
        f"with equal local shapes, dtypes and options"
    )
    _agreement(ranks, own_header.number, signature).report_mismatch(message)
    # The peer's call was compared before: such a header says so, or its signature is known here.
    was_agreed = peer_header is not None and (
        peer_header.kind == _COMPARED or peer_header.digest in ranks.state.agreed
    )
    # Ranks that find no difference wait for all in the first such call, and read the report there.
    # In a later one they go on without waiting: then the group is closed, so that they hear of it.
    if peer_header is None or (ranks.size > 2 and (was_agreed or has_agreed)):
        fail(ranks, message)
    raise RankMismatchError(message)


def _agreement(ranks: Ranks, number: int, signature: CallSignature) -> StoreAgreement:
    """Return the keys in the group's store by which ranks agree on a pass of a call."""
    return StoreAgreement.of(
        not_none(ranks.group), not_none(ranks.state.nonce), number, signature.fields["pass"]
    )


def _exchange_headers(ranks: Ranks, header: Header, device: torch.device) -> tuple[bytes, bytes]:
    """Send a header to the next rank and receive the previous rank's; return both as bytes.

    The first headers of a group also pass its nonce round: rank 0 draws it and sends, each other
    rank receives before it sends, and rank 0 receives last. Notes that an earlier group of the same
    name has left in the store are ignored from then on. Send and receive are separate transfers
    there: NCCL connects all peers of a transfer before anything moves, and rank 0, waiting for the
    last rank to connect, would keep the next rank from receiving.
    """
    state = ranks.state
    arriving = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=device)
    receives = [(arriving, ranks.previous)]
    is_first, is_origin = state.nonce is None, ranks.rank == 0
    if is_first and is_origin:
        clear_failure(not_none(ranks.group))
        state.nonce = secrets.randbits(64)
    elif is_first:
        # The previous rank sends as soon as it has the nonce; until then this rank waits.
        ranks.start([], receives).wait()
        received = Header.read(bytes(arriving.cpu().numpy()))
        state.nonce = 0 if received is None else received.nonce
    assert state.nonce is not None
    sent = header._replace(nonce=state.nonce).bytes()
    message = torch.frombuffer(sent, dtype=torch.uint8).to(device)
    # Later headers are sent and received together: every rank does both at the same time.
    ranks.start([(message, ranks.next)], [] if is_first else receives).wait()
    # The nonce has gone round: the last rank sends now.
    if is_first and is_origin:
        ranks.start([], receives).wait()
    return bytes(sent), bytes(arriving.cpu().numpy())


def _check_on_stream(
    ranks: Ranks, number: int, seed: int, signature: CallSignature, device: torch.device
) -> None:
    """Exchange headers of a call whose signature was compared before, without waiting for them.

    A difference makes the stream fail with an error.
    """
    digest = signature.for_call(number, seed)
    own_digest = torch.full((_WORDS,), digest, dtype=torch.int64, device=device)
    peer_digest = torch.empty_like(own_digest)
    ranks.rotate(own_digest, peer_digest, 1, beside=False).wait()
    # Kernels and messages queued behind this run only if the previous rank makes the same call.
    if (check := ranks.state.digest_checks.get(peer_digest.device)) is not None:
        check(peer_digest, digest)
    else:
        torch._assert_async(peer_digest[0] == digest, "ranks of a ring make different calls")  # noqa: SLF001 - the public assert waits on the host


def _are_same(own_header: Header, peer_header: Header, signature: CallSignature) -> bool:
    """Return True if a peer's header, of either kind, is of the same call."""
    if peer_header.kind == _COMPARED:
        digest = signature.for_call(own_header.number, own_header.seed)
        return peer_header.digest == digest.to_bytes(_WORD_BYTES, "little", signed=True)
    return peer_header[:4] == own_header[:4]


def _note_agreed(
    ranks: Ranks, signature: CallSignature, agreement: StoreAgreement, digest: bytes
) -> None:
    """Remember that all ranks have compared calls of this signature, and forget the oldest.

    At most ``_MOST_AGREED`` signatures are remembered. Rank 0 also deletes the store's keys of the
    agreement before this one.
    """
    state = ranks.state
    # All ranks have come to this agreement, so all have read the one before.
    if state.last is not None and ranks.rank == 0:
        last_agreement, last_digest = state.last
        # So the store does not grow with the number of calls.
        last_agreement.clear(last_digest)
    state.last = agreement, digest
    state.agreed[signature.digest] = None
    while len(state.agreed) > _MOST_AGREED:
        state.agreed.pop(next(iter(state.agreed)))


def has_agreed(ranks: Ranks, signature: CallSignature) -> bool:
    """Return True if the ranks of this group have compared calls of this signature before."""
    return signature.digest in ranks.state.agreed


def check_graph(ranks: Ranks, signature: CallSignature, keep_alive: object = None) -> None:
    """Refuse to capture a pass into a CUDA graph if its ranks have not compared it before.

    The first comparison is made by the host, which a graph cannot hold; over gloo the host makes
    all of them.

    Args:
        ranks: The ranks that hold one sequence.
        signature: The pass.
        keep_alive: Object whose tensors the captured pass reads besides its arguments, whenever the
            graph is replayed; the group keeps it.

    Raises:
        ValueError: The pass is being captured, and was not compared or is of a gloo group.
    """
    if ranks.size == 1 or not is_capturing():
        return
    if ranks.is_gloo:
        raise ValueError(
            "a call over gloo cannot be captured into a CUDA graph, as the host carries its messages: "
            "use a group with the backend 'nccl'"
        )
    if not has_agreed(ranks, signature):
        raise ValueError(
            "a call is captured into a CUDA graph before the ranks have compared it: make it once "
            "outside of a graph, forward and backward, then capture it"
        )
    if keep_alive is not None:
        ranks.state.captured[id(keep_alive)] = keep_alive


@dataclass
class GuardedPass:
    """Context manager of one pass: an error on any rank ends the pass on all, with that message.

    The rank that fails leaves its message in the store and raises its own error. The others wait
    for its tensors until the group's timeout, and find the message then. On all of them the group
    is closed for later calls. An error while a CUDA graph is captured is only passed on, as nothing
    was sent, and so is a RankMismatchError: :func:`_compare` closes the group where needed.

    Raises:
        RankMismatchError: Ranks make different calls.
        RuntimeError: A peer failed or did not answer, or a pass of an earlier call failed.
    """

    ranks: Ranks
    number: int
    signature: CallSignature
    device: torch.device  # the current one inside
    _context: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        ranks = self.ranks
        if ranks.size > 1:
            ranks.check_open()
            if ranks.state.before_passes:
                with on_device(self.device):
                    ranks.begin_pass()
        # (On a CPU, which has no index, there is none to change: an empty context takes longer.)
        if self.device.index is not None:
            self._context = on_device(self.device)
            self._context.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ranks = self.ranks
        try:
            if ranks.size == 1:
                return
            if error is not None:
                self._end(error)
            elif ranks.state.is_watched:
                try:
                    note_queued(ranks.state, self._name)
                except BaseException as failure:
                    self._end(failure)
                    raise
        finally:
            if self._context is not None:
                self._context.__exit__(kind, error, traceback)

    @property
    def _name(self) -> str:
        return f"call {self.number} ({self.signature.fields['pass']})"

    def _end(self, error: BaseException) -> None:
        """Close the group for an error of this pass, and raise what a waiting rank is told."""
        ranks = self.ranks
        if isinstance(error, RankMismatchError):
            return
        if isinstance(error, PeerError):
            # Without a nonce no header has arrived, so no rank before this one has come so far.
            has_nonce = ranks.state.nonce is not None
            note = (
                _agreement(ranks, self.number, self.signature).read_report() if has_nonce else None
            )
            failure = read_failure(not_none(ranks.group))
            own_message = f"{self._name}: rank {ranks.rank} {error}"
            # A message of this pass may still arrive, and would be taken for one of the next call:
            # close the group.
            fail(ranks, note or failure or own_message, report=False)
            if note is not None:
                raise RankMismatchError(note) from error
            raise RuntimeError(
                own_message if failure is None else f"{failure}; {own_message}"
            ) from error
        if not is_capturing():  # what is captured runs later: then nothing was sent
            # The others wait for this rank's tensors, up to the timeout: the note tells them why
            # they do not come.
            context = f"{self._name} failed on rank {ranks.rank} of the group"
            fail(ranks, f"{context}: {type(error).__name__}: {error}")


def fail(ranks: Ranks, text: str, *, report: bool = True) -> None:
    """Close a group for later calls and, with ``report``, leave the reason for the other ranks."""
    ranks.state.failure = text
    if report:
        report_failure(not_none(ranks.group), text)
