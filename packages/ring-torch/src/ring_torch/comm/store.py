"""Signatures of calls, and notes about them that ranks leave in their process group's store.

A rank compares its call with that of the previous rank only. Others would learn of a difference, or
of a failure inside a pass, by waiting in vain. So the rank that finds one leaves a note in the
store, and a rank that waits reads it. The first time that a group makes a call, each rank waits
until all have found it to be the same.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

_SAME = b"the same"
_DIGEST_BYTES = 8
_NUMBER_FACTOR, _SEED_FACTOR = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F  # odd, of 64 random bits
LONGEST_FIELD = 96  # characters
_MOMENT = timedelta(seconds=2)  # that a rank that failed waits for the others
_PATIENCE = timedelta(seconds=5)  # a store that is there answers within milliseconds
_UNLIKE_SHARDS = (
    " (ranks hold unlike numbers of tokens: pad every shard to the longest, and give the padding "
    "negative segment_ids, so that it neither sees nor is seen)"
)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.1  # seconds between two looks at a key


@dataclass(frozen=True)
class CallSignature:
    """Fields of a call that must be equal on all ranks in a pass, with their digest.

    The call's number and seed, which must be equal, too, are not among them.
    """

    fields: dict[str, Any]  # by name; values that ``json`` can write
    digest: bytes  # of all fields, 8 bytes
    text: bytes  # the fields as a header holds them: JSON, long values cut

    @classmethod
    def of(cls, fields: dict[str, Any], name: str) -> CallSignature:
        """Make the signature of a pass from the call's fields and the pass's name."""
        fields = {"pass": name, **fields}
        full_text = json.dumps(fields, sort_keys=True).encode()
        text = json.dumps({key: _cut(x) for key, x in fields.items()}, sort_keys=True).encode()
        return cls(fields, hashlib.blake2b(full_text, digest_size=_DIGEST_BYTES).digest(), text)

    @cached_property
    def _word(self) -> int:
        return int.from_bytes(self.digest, "little")

    def for_call(self, number: int, seed: int) -> int:
        """Return an int64 that identifies a call: its signature, number and seed.

        It never fits 32 bits: Triton would compile another kernel for such a number.
        """
        # Sums of odd multiples differ in many bits, and take the host less time than a hash.
        mixed = (self._word + number * _NUMBER_FACTOR + seed * _SEED_FACTOR) % (1 << 64)
        return (mixed - (1 << 63) | 1 << 40) & ~(1 << 41)


@dataclass(frozen=True)
class StoreAgreement:
    """The keys of one pass of one call in a group's store, by which its ranks agree on it."""

    store: Any  # the store through which the group was made
    nonce: int  # of the group: an earlier group of that name may have left notes in the store
    number: int  # of the call
    name: str  # of the pass

    @classmethod
    def of(cls, group: dist.ProcessGroup, nonce: int, number: int, name: str) -> StoreAgreement:
        """Make the agreement of a group; it does not keep the group alive."""
        return cls(_store_of(group), nonce, number, name)

    @property
    def _key(self) -> str:
        """Prefix of the keys of this agreement."""
        return f"{_base_key()}/{self.nonce:x}/{self.number}/{self.name}"

    def report_mismatch(self, text: str) -> None:
        """Leave a note about a difference, for ranks that wait in :meth:`wait_for_all`."""
        _ask_store(lambda: self.store.set(self._key, text))

    def read_report(self) -> str | None:
        """Return the note about a difference that a rank has left, or ``None``."""
        text = _ask_store(lambda: _read(self.store, self._key))
        return None if text in {None, _SAME} else text.decode(errors="replace")

    def wait_for_all(self, digest: bytes, size: int, timeout: timedelta) -> str | None:
        """Wait until all ranks have found their calls to be the same, or one has left a note.

        A rank counts itself; the last one of ``size`` ends the wait of all.

        Returns:
            ``None`` if all calls are the same, otherwise the note.

        Raises:
            RuntimeError: A rank did not come within the timeout, or the store is gone.
        """

        def wait() -> None:
            # Counted per digest: ranks with another call add to another key, and the number is not
            # reached.
            if self.store.add(self._count(digest), 1) == size:
                self.store.set(self._key, _SAME)
            _poll(self.store, self._key, timeout, _gone_key(self.nonce))

        try:
            _with_timeout(wait, timeout + _PATIENCE)
        except RuntimeError as error:
            raise RuntimeError(
                f"a rank of the group did not make call {self.number} within {timeout}"
            ) from error
        # The key was set by the last rank or by one that found a difference; what it holds tells
        # which.
        return self.read_report()

    def clear(self, digest: bytes) -> None:
        """Delete the keys of this agreement. The caller knows that all ranks have read them."""

        def delete() -> None:
            # Ranks of another digest have failed, and with them the group: their keys may stay.
            for key in (self._key, self._count(digest)):
                self.store.delete_key(key)

        _ask_store(delete)

    def _count(self, digest: bytes) -> str:
        """Return the key under which ranks are counted that make the call with this digest."""
        return f"{self._key}/{digest.hex()}"


@dataclass(frozen=True)
class StoreMeeting:
    """The keys by which ranks tell each other how a block of calls has ended on each."""

    store: Any  # the store through which the group was made
    key: str  # prefix of the keys
    gone: str  # key that is set once a rank of the group has hung up

    @classmethod
    def of(cls, group: dist.ProcessGroup, nonce: int, number: int) -> StoreMeeting:
        """Make the meeting behind a block, of a group with a nonce and by the number of a call."""
        key = f"{_base_key()}/{nonce:x}/{number}/end"
        return cls(_store_of(group), key, _gone_key(nonce))

    def end(
        self, error: str | None, rank: int, size: int, timeout: timedelta,
        hang_up: Callable[[str], None],
    ) -> tuple[str | None, bool]:  # fmt: skip
        """Wait until all ranks are here, or one has hung up, and return the first error.

        Args:
            error: Error of this rank, which it names.
            rank: Number of this rank.
            size: Number of ranks.
            timeout: Time that the others have.
            hang_up: Ends waits of the others; called with the first error if this rank failed and
                another has not come within a moment.

        Returns:
            The first error of any rank, and True if all ranks failed by themselves or none did.

        Raises:
            RuntimeError: A rank did not come within the timeout, or the store is gone.
        """
        store, first, gone = self.store, f"{self.key}/first", self.gone
        keys = [f"{self.key}/{n}" for n in range(size)]

        def meet() -> tuple[str | None, bool]:
            if error is not None:
                store.compare_set(first, "", error)
            store.set(keys[rank], "done" if error is None else "failed")
            start, pause = time.monotonic(), _FIRST_PAUSE
            while not (store.check(keys) or store.check([gone])):
                waited = timedelta(seconds=time.monotonic() - start)
                if error is not None and waited > min(_MOMENT, timeout / 4):
                    store.set(gone, error)
                    hang_up(store.get(first).decode(errors="replace"))
                elif waited > timeout:
                    raise RuntimeError(f"a rank of the group did not end within {timeout}")
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAUSE)
            cause = _read(store, first)
            ends = {b"gone"} if store.check([gone]) else {store.get(key) for key in keys}
            text = None if cause is None else cause.decode(errors="replace")
            return text, ends in ({b"done"}, {b"failed"})

        return _with_timeout(meet, timeout + _PATIENCE)


def _cut(value: Any) -> Any:
    """Return a field's value; of a long one its beginning and a digest of all of it, as text."""
    if not isinstance(value, str | tuple | list) or len(text := json.dumps(value)) <= LONGEST_FIELD:
        return value
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{text[: LONGEST_FIELD - 12]}... {digest}"


def differences(own_fields: dict[str, Any], peer_fields: dict[str, Any]) -> str:
    """Describe how the fields of another rank's call differ from those of this one's."""
    names = sorted(
        name
        for name in own_fields.keys() | peer_fields.keys()
        if own_fields.get(name) != peer_fields.get(name)
    )
    text = "; ".join(
        f"{name} is {peer_fields.get(name)!r} there and {own_fields.get(name)!r} here"
        for name in names
    )
    return text + (_UNLIKE_SHARDS if _differ_in_length(own_fields, peer_fields) else "")


def _differ_in_length(own_fields: dict[str, Any], peer_fields: dict[str, Any]) -> bool:
    """Return True if q or k differ in the number of tokens alone.

    A field holds ``[B, T_local, H, D, dtype]``.
    """
    for a, b in ((own_fields.get(name), peer_fields.get(name)) for name in "qk"):
        if not (isinstance(a, list) and isinstance(b, list) and len(a) == len(b) == 5):
            continue
        if a[1] != b[1] and (a[0], a[2:]) == (b[0], b[2:]):
            return True
    return False


def report_failure(group: dist.ProcessGroup, text: str) -> None:
    """Leave a note that this rank failed inside a pass, unless another rank was first."""
    _ask_store(lambda: _store_of(group).compare_set(f"{_base_key()}/failure", "", text))


def read_failure(group: dist.ProcessGroup) -> str | None:
    """Return the note of the first rank that failed inside a pass, or ``None``."""
    text = _ask_store(lambda: _read(_store_of(group), f"{_base_key()}/failure"))
    return text.decode(errors="replace") if text else None


def clear_failure(group: dist.ProcessGroup) -> None:
    """Delete the failure note of an earlier group with the same name and store."""
    _ask_store(lambda: _store_of(group).delete_key(f"{_base_key()}/failure"))


def publish_host(group: dist.ProcessGroup, rank: int) -> None:
    """Leave the name of this rank's host for the other ranks."""
    _ask_store(lambda: _store_of(group).set(_host_key(rank), platform.node()))


def read_hosts(group: dist.ProcessGroup, size: int, timeout: timedelta) -> tuple[str, ...]:
    """Return the name of each rank's host, which it leaves when it first uses the group.

    Raises:
        RuntimeError: A rank did not do so within the timeout.
    """

    def read() -> tuple[str, ...]:
        store, keys = _store_of(group), [_host_key(rank) for rank in range(size)]
        for key in keys:
            _poll(store, key, timeout)
        return tuple([store.get(key).decode() for key in keys])

    return _with_timeout(read, timeout + _PATIENCE)


def _host_key(rank: int) -> str:
    """Return the key of a rank's host name."""
    return f"{_base_key()}/host/{rank}"


def _store_of(group: dist.ProcessGroup) -> Any:
    """Return the store through which a group was made."""
    groups = dist.distributed_c10d._world.pg_map  # noqa: SLF001 - no public way
    if group not in groups:
        raise RuntimeError("the process group was destroyed")
    return groups[group][1]


def _gone_key(nonce: int) -> str:
    """Return the key that says that a rank of a group has hung up."""
    return f"{_base_key()}/{nonce:x}/gone"


def _base_key() -> str:
    """Return the prefix of all keys of this run."""
    # torchrun may keep a store, with old notes, for processes that it starts anew.
    return f"ring/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _ask_store(request: Callable[[], Any]) -> Any:
    """Return the store's answer, or ``None`` if it is gone with the rank that kept it."""
    with suppress(RuntimeError):
        return _with_timeout(request)
    return None


def _poll(store: Any, key: str, timeout: timedelta, stop: str | None = None) -> None:
    """Wait until a key is set, by looking at it again and again.

    ``store.wait`` would block the store's connection: other threads of this process, whose peers
    wait for what they have to write, could not use it.

    Raises:
        RuntimeError: The key was not set within the timeout, or ``stop`` was.
    """
    end, pause = time.monotonic() + timeout.total_seconds(), _FIRST_PAUSE
    while not store.check([key]):
        if stop is not None and store.check([stop]):
            raise RuntimeError("a rank has failed and waits for nobody")
        if time.monotonic() > end:
            raise RuntimeError(f"{key} was not set within {timeout}")
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)


def _read(store: Any, key: str) -> bytes | None:
    """Return the value of a key, or ``None`` if it is not set."""
    return store.get(key) if store.check([key]) else None


def _with_timeout[T](request: Callable[[], T], patience: timedelta | None = None) -> T:
    """Return the store's answer, asked for on a thread: over a link that is down none ever comes.

    Raises:
        RuntimeError: The store did not answer in time, or is gone.
    """
    answer: Future[T] = Future()
    patience = patience or _PATIENCE

    def ask() -> None:
        try:
            answer.set_result(request())
        except RuntimeError as error:
            answer.set_exception(error)

    thread = Thread(target=ask, daemon=True)
    thread.start()
    try:
        return answer.result(patience.total_seconds())
    except TimeoutError as error:
        # A process whose interpreter ends while a thread is inside the store's code is aborted.
        atexit.register(thread.join, _PATIENCE.total_seconds())
        raise RuntimeError(f"the process group's store did not answer within {patience}") from error


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the group's backend for a device; a ``RuntimeError`` if it has none."""
    return group._get_backend(device)  # noqa: SLF001 - no public way


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of a group: how long its ranks wait for each other."""
    options = getattr(backend_of(group, device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
    return timeout
