"""What ranks compare of a call, and tell each other of it through their process group's store.

A rank compares its call with that of the rank behind. Others would learn of a difference, or of a
failure inside a pass, only by waiting in vain: so who finds one leaves a note, for who waits to
read. And the first time that a group makes a call, each waits until all ranks have found it to be
the same.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import struct
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

_SAME = b"the same"
_DIGEST_BYTES = 8
LONGEST_FIELD = 96  # characters
_PATIENCE = timedelta(seconds=5)  # with a store that answers within milliseconds
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.1  # seconds between two looks at a key


@dataclass(frozen=True)
class CallSignature:
    """What must be equal on all ranks for a pass of a call, beside its number and seed."""

    fields: dict[str, Any]  # anything that ``json`` writes
    digest: bytes
    text: bytes  # the fields as a message holds them: JSON, long ones cut

    @classmethod
    def of(cls, fields: dict[str, Any], name: str) -> CallSignature:
        """The signature of the pass of this name."""
        fields = {"pass": name, **fields}
        whole = json.dumps(fields, sort_keys=True).encode()
        short = json.dumps({key: _cut(x) for key, x in fields.items()}, sort_keys=True).encode()
        return cls(fields, hashlib.blake2b(whole, digest_size=_DIGEST_BYTES).digest(), short)

    def for_call(self, number: int, seed: int) -> bytes:
        """What tells this call from any other: the digest of all, number and seed included."""
        text = self.digest + struct.pack("<QQ", number, seed)
        return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()

    def as_int64(self, number: int, seed: int) -> int:
        """The same as a number, int64."""
        return int.from_bytes(self.for_call(number, seed), "little", signed=True)


@dataclass(frozen=True)
class StoreAgreement:
    """Whether all ranks of a group make one call, in a pass of it; known by its number."""

    store: Any  # that the group's members met in
    nonce: int  # of the group: one of the same name may have left notes in the store
    number: int
    name: str  # of the pass

    @classmethod
    def of(cls, group: dist.ProcessGroup, nonce: int, number: int, name: str) -> StoreAgreement:
        """Make a group's agreement, which does not keep the group."""
        return cls(_store_of(group), nonce, number, name)

    @property
    def _key(self) -> str:
        return f"{_base_key()}/{self.nonce:x}/{self.number}/{self.name}"

    def report_mismatch(self, text: str) -> None:
        """Leave a note for ranks that wait."""
        _ask_store(lambda: self.store.set(self._key, text))

    def read_report(self) -> str | None:
        """The note that another rank left, if there is one."""
        text = _ask_store(lambda: _read(self.store, self._key))
        return None if text in {None, _SAME} else text.decode(errors="replace")

    def wait_for_all(self, digest: bytes, size: int, timeout: timedelta) -> str | None:
        """Wait until all ranks have found their calls to be the same; else the note of one.

        Raises:
            RuntimeError: A rank did not come within the timeout.
        """

        def wait() -> None:
            if self.store.add(self._count(digest), 1) == size:
                self.store.set(self._key, _SAME)
            _poll(self.store, self._key, timeout)

        try:
            _with_timeout(wait, timeout + _PATIENCE)
        except RuntimeError as error:
            raise RuntimeError(
                f"a rank of the group did not make call {self.number} within {timeout}"
            ) from error
        return self.read_report()

    def clear(self, digest: bytes) -> None:
        """Take what all ranks have read out of the store."""

        def delete() -> None:
            for key in (self._key, self._count(digest)):
                self.store.delete_key(key)

        _ask_store(delete)

    def _count(self, digest: bytes) -> str:
        """Under which name ranks that make one call are counted."""
        return f"{self._key}/{digest.hex()}"


def _cut(value: Any) -> Any:
    """Cut a field that is long to its beginning and a digest of all of it."""
    text = json.dumps(value)
    if len(text) <= LONGEST_FIELD:
        return value
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{text[: LONGEST_FIELD - 12]}... {digest}"


def report_failure(group: dist.ProcessGroup, text: str) -> None:
    """Leave a note that a rank failed inside a pass; the first that is left stays."""
    _ask_store(lambda: _store_of(group).compare_set(f"{_base_key()}/failure", "", text))


def read_failure(group: dist.ProcessGroup) -> str | None:
    """The note of the first rank of a group that failed inside a pass, if one did."""
    text = _ask_store(lambda: _read(_store_of(group), f"{_base_key()}/failure"))
    return text.decode(errors="replace") if text else None


def clear_failure(group: dist.ProcessGroup) -> None:
    """Take out the note of an earlier group, whose name and store this one has."""
    _ask_store(lambda: _store_of(group).delete_key(f"{_base_key()}/failure"))


def _store_of(group: dist.ProcessGroup) -> Any:
    groups = dist.distributed_c10d._world.pg_map  # noqa: SLF001 - no public way
    if group not in groups:
        raise RuntimeError("the process group was destroyed")
    return groups[group][1]


def _base_key() -> str:
    # torchrun may keep a store, with old notes, for processes that it starts anew.
    return f"ring/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _ask_store(what: Callable[[], Any]) -> Any:
    """What the store answers, or ``None``: it may be gone with the rank that kept it."""
    with suppress(RuntimeError):
        return _with_timeout(what)
    return None


def _poll(store: Any, key: str, timeout: timedelta) -> None:
    """Wait until a key is set.

    ``store.wait`` would keep the store's connection to itself: threads of this process that wait
    for other groups, and what their peers wait for, would have to stand behind it.

    Raises:
        RuntimeError: It was not set within the timeout.
    """
    end, pause = time.monotonic() + timeout.total_seconds(), _FIRST_PAUSE
    while not store.check([key]):
        if time.monotonic() > end:
            raise RuntimeError(f"{key} was not set within {timeout}")
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)


def _read(store: Any, key: str) -> bytes | None:
    return store.get(key) if store.check([key]) else None


def _with_timeout[T](what: Callable[[], T], patience: timedelta | None = None) -> T:
    """What the store answers; asked on a thread, for over a link that is down it never does.

    Raises:
        RuntimeError: It did not answer in time, or is gone.
    """
    answer: Future[T] = Future()
    patience = patience or _PATIENCE

    def ask() -> None:
        try:
            answer.set_result(what())
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


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the group's members wait for each other."""
    options = getattr(group._get_backend(device), "options", None)  # noqa: SLF001
    timeout: timedelta = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
    return timeout
